"""Rotary position embedding over adjacent pairs, as a product of complex numbers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from worker_svc.runner.torch.config import Llama3Rope, ModelConfig


def rotations(config: ModelConfig, length: int, factors: Tensor | None) -> Tensor:
    """Return e^(i * position * frequency), complex64 [length, head_dim / 2].

    `factors` [head_dim / 2] divide the frequencies, as GGUF files state Llama 3's scaling.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_scaling is not None:
        frequencies = _stretch(frequencies, config.rope_scaling)
    if factors is not None:
        frequencies = frequencies / factors.float()
    angles = torch.outer(torch.arange(length).float(), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def rotate_(heads: Tensor, turns: Tensor) -> None:
    """Rotate the pairs of `heads` [tokens, heads, head_dim] in place by `turns` [tokens, 1, head_dim / 2]."""
    pairs = heads.view(*heads.shape[:-1], -1, 2)
    if heads.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(turns)
    else:
        pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()) * turns))


def adjacent_pairs(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder rows from halves (i, i + head_dim / 2) to pairs (2i, 2i + 1), head by head.

    Queries and keys in one order give the same scores as both in the other.
    """
    halves = weight.view(-1, 2, head_dim // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def _stretch(frequencies: Tensor, scaling: Llama3Rope) -> Tensor:
    """Llama 3.1: divide low frequencies by `factor`, keep high ones, interpolate between."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position / wavelengths
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share = share.clamp(0.0, 1.0)
    return frequencies * (share + (1 - share) / scaling.factor)
