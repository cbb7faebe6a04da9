"""What a model on disk offers to the runner, whatever its format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from worker_svc.models.text import ModelText
from worker_svc.runner.torch.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model whose weights are read one at a time.

    `read` takes a name as Hugging Face spells it (`model.layers.0.self_attn.q_proj.weight`) and
    returns the tensor in the type it is stored in (dequantized where it is quantized); ModelLoadError
    when it is missing or damaged. `names` lists what can be read.
    """

    source: str
    config: ModelConfig
    text: ModelText
    names: frozenset[str]
    read: Callable[[str], torch.Tensor]
    rope_pairs_adjacent: bool
    """Query and key rows come as rotary pairs (2i, 2i+1), not as halves (i, i + head_dim/2)."""
    rope_factors: torch.Tensor | None = None
    """Divisors of the rotary frequencies, [head_dim / 2], where the file states them one by one."""
