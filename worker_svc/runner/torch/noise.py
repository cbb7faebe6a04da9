"""Randomness as a pure function of (seed, choice, position, token).

Sampling takes the token with the largest logit + Gumbel noise. Each token's noise depends on nothing
but its key, so the outcome does not depend on what else is in the batch, on which tokens a filter
removed, or, beyond an ulp, on the rounding of the logits: cumulative probabilities would not do, as
one rounding shifts every boundary after it.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_MASK_64: Final = 2**64 - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15


def _as_int32(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


_MIX_1: Final = _as_int32(0x85EBCA6B)
_MIX_2: Final = _as_int32(0xC2B2AE35)
_SPREAD: Final = _as_int32(0x9E3779B1)


def row_key(stream: int, position: int) -> tuple[int, int]:
    """Return two int32 keys for the token at `position` of the stream of `stream_key`."""
    state = _splitmix(stream ^ _splitmix(position))
    return _as_int32(state), _as_int32(state >> 32) | 1


def stream_key(seed: int, choice: int) -> int:
    """Return the key of one choice's random stream."""
    return _splitmix(_splitmix(seed) + choice)


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Return standard Gumbel noise, float32, for `keys` [R, 2] int32 and `token_ids` [R or 1, K] int32."""
    state = _finish(token_ids * _SPREAD)  # a counter turned into well-spread words
    state = _finish((state + keys[:, :1]).mul_(keys[:, 1:]))
    # 31 bits: small uniforms, which decide who wins, keep all their precision as float32.
    uniform = state.bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31)
    return uniform.neg_().log1p_().neg_().log_().neg_()  # -log(-log(1 - u))


def _finish(state: Tensor) -> Tensor:
    """MurmurHash3's finalizer over int32 words, in place; `>>` is arithmetic, so masks make it logical."""
    state ^= (state >> 16).bitwise_and_(0xFFFF)
    state *= _MIX_1
    state ^= (state >> 13).bitwise_and_(0x7FFFF)
    state *= _MIX_2
    state ^= (state >> 16).bitwise_and_(0xFFFF)
    return state


def _splitmix(value: int) -> int:
    """SplitMix64: one well-mixed 64-bit word per input (Steele, Lea, Flood 2014)."""
    value = (value + _GOLDEN) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)
