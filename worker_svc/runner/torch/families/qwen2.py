"""Qwen2: Llama with biases on queries, keys and values, and a window that is off by default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from worker_svc.runner.torch.families.family import SOME_LAYERS_ONLY, Family, same_window


def window_if_used(raw: Mapping[str, Any]) -> int | None:
    """Return the window when config.json turns it on.

    Raises:
        ValueError: layers differ.
    """
    if not raw.get("use_sliding_window", False):
        return None
    window = same_window(raw)
    if window is not None and raw.get("max_window_layers", 0):
        raise ValueError(SOME_LAYERS_ONLY)
    return window


QWEN2 = Family(architecture="Qwen2ForCausalLM", gguf="qwen2", sliding_window=window_if_used)
