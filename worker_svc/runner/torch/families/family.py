"""What a family of Llama-like models says of itself; `docs/models.md` shows how to add one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from worker_svc.runner.torch.block import Block, LlamaBlock, WeightReader

SOME_LAYERS_ONLY: Final = "sliding_window in some layers only is not supported"


def no_window(raw: Mapping[str, Any]) -> int | None:
    """Every token sees all before it, whatever config.json says."""
    del raw
    return None


def same_window(raw: Mapping[str, Any], default: int | None = None) -> int | None:
    """Return the window that config.json gives to all layers, or `default` where it says nothing.

    Raises:
        ValueError: layers differ.
    """
    window = raw.get("sliding_window", default)
    kinds = set(raw.get("layer_types") or ["sliding_attention"])
    if window is None or kinds == {"full_attention"}:
        return None
    if kinds != {"sliding_attention"}:
        raise ValueError(SOME_LAYERS_ONLY)
    return int(window)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Where a family differs from Llama; what is left out is as there."""

    architecture: str
    """Its class in transformers, as config.json names it."""
    gguf: str | None
    """Its name in GGUF files; None when they call it another family's."""
    block: Callable[[WeightReader, int], Block] = LlamaBlock
    """Makes the block of a layer, given its index."""
    head_dim: int | None = None
    """What transformers takes when config.json leaves it out; None for hidden / heads."""
    sliding_window: Callable[[Mapping[str, Any]], int | None] = no_window
    """Reads config.json: tokens that a token sees at most, itself included. ValueError: not supported."""
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    """Weights of a layer that Llama has not: their name in GGUF, and in safetensors."""
    gguf_pairs_adjacent: bool = False
    """llama.cpp's converter reorders queries and keys so that rotary pairs lie together."""
