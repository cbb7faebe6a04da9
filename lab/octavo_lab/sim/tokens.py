"""What a simulated model says: a pure function, so that a lost or repeated token shows."""

from __future__ import annotations

VOCAB_SIZE = 1 << 15
_STRIDE = 0x9E3779B1
_SEED = 0x85EBCA77C2B2AE63
_CHOICE = 0xC2B2AE3D27D4EB4F
_MASK = 2**64 - 1


def stream_of(seed: int, choice: int) -> int:
    """Return the number from which all tokens of a choice follow."""
    mixed = (seed * _SEED + choice * _CHOICE + 1) & _MASK
    return mixed ^ (mixed >> 29)


def token_at(stream: int, position: int) -> int:
    """Return the token at a position of a sequence, prompt included."""
    return ((stream + position * _STRIDE) >> 12) & (VOCAB_SIZE - 1)
