"""What a model on disk offers to the runner, whatever its format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from octavo.sampling import SamplingParams

from worker_svc.runner.torch.config import ModelConfig


@dataclass(frozen=True, slots=True)
class TextSide:
    """Everything about text: none of it touches the weights."""

    tokenizer_files: dict[str, bytes]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    add_bos_token: bool
    chat_template: str | None
    special_tokens: dict[str, str]
    generation_defaults: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model whose weights are read one at a time.

    `read` takes a name as Hugging Face spells it (`model.layers.0.self_attn.q_proj.weight`) and
    returns the tensor in the type it is stored in (dequantized where it is quantized); ModelLoadError
    when it is missing or damaged. `names` lists what can be read.
    """

    source: str
    config: ModelConfig
    text: TextSide
    names: frozenset[str]
    read: Callable[[str], torch.Tensor]
    rope_pairs_adjacent: bool
    """Query and key rows come as rotary pairs (2i, 2i+1), not as halves (i, i + head_dim/2)."""
    rope_factors: torch.Tensor | None = None
    """Divisors of the rotary frequencies, [head_dim / 2], where the file states them one by one."""
