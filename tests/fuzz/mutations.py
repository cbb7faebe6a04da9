"""Harm to bytes, by chance that repeats: flipped, lost, doubled, reordered, cut, made extreme."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final

_EXTREMES: Final = (0, 1, 2, 127, 128, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
_NUMBERS: Final = (
    b"0",
    b"-1",
    b"1e999",
    b"NaN",
    b"null",
    b"18446744073709551616",
    b"9" * 5000,
    b"0.1",
    b'""',
)
_TEXTS: Final = (
    b"\x00",
    b"\xff",
    b"\xed\xa0\x80",
    b"\\ud800",
    b"[" * 3000,
    b'{"a":' * 2000,
    b'"',
    b"\n",
    b"]",
    b"}",
)
_MOST_COPIES: Final = 200
_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
Field = tuple[int, int, bytes]
"""Number, wire type, value: of a varint and of fixed ones their bytes, of a delimited one what is in it."""


def harmed(rng: random.Random, data: bytes, others: Sequence[bytes], *, message: bool) -> bytes:
    """Return bytes with one to four faults; a protobuf message is also harmed by its fields."""
    for _ in range(rng.randint(1, 4)):
        if message and rng.random() < 0.7:
            fields = parsed(data)
            if fields:
                data = encoded(_harm_fields(rng, fields))
                continue
        data = rng.choice(_WAYS)(rng, data, others)
    return data


# Bytes -------------------------------------------------------------------------------------------


def _slice(rng: random.Random, data: bytes) -> tuple[int, int]:
    start = rng.randint(0, len(data))
    return start, min(len(data), start + rng.choice((1, 2, 4, 8, 40, 400)))


def _flip(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    if not data:
        return b"\x00"
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def _replace(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    start, end = _slice(rng, data)
    return data[:start] + rng.randbytes(end - start) + data[end:]


def _drop(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    start, end = _slice(rng, data)
    return data[:start] + data[end:]


def _copy(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    start, end = _slice(rng, data)
    return data[:end] + data[start:end] * rng.randint(1, 20) + data[end:]


def _cut(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    return data[: rng.randint(0, len(data))]


def _splice(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    other = rng.choice(others)
    return data[: rng.randint(0, len(data))] + other[rng.randint(0, len(other)) :]


def _insert(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    at = rng.randint(0, len(data))
    return data[:at] + rng.choice(_TEXTS) + data[at:]


def _number(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """Make a number in a text extreme, or four or eight bytes of another file."""
    digits = [at for at, byte in enumerate(data[:4096]) if 48 <= byte < 58]
    if digits and rng.random() < 0.5:
        start = end = rng.choice(digits)
        while end < len(data) and 48 <= data[end] < 58:
            end += 1
        return data[:start] + rng.choice(_NUMBERS) + data[end:]
    size = rng.choice((4, 8))
    at = rng.randint(0, len(data))
    extreme = (rng.choice(_EXTREMES) % (1 << 8 * size)).to_bytes(size, "little")
    return data[:at] + extreme + data[at + size :]


_WAYS: Final[tuple[Callable[[random.Random, bytes, Sequence[bytes]], bytes], ...]] = (
    _flip, _replace, _drop, _copy, _cut, _splice, _insert, _number,
)  # fmt: skip


# Messages ----------------------------------------------------------------------------------------


def _harm_fields(rng: random.Random, fields: list[Field]) -> list[Field]:
    at = rng.randrange(len(fields))
    number, wire, value = fields[at]
    match rng.randrange(7):
        case 0:
            return fields[:at] + fields[at + 1 :]
        case 1:
            return fields[:at] + [fields[at]] * rng.randint(2, _MOST_COPIES) + fields[at + 1 :]
        case 2:
            return rng.sample(fields, len(fields))
        case 3:
            number = rng.choice((number + 1, rng.randint(1, 30), 2**29 - 1))
        case 4:
            wire = rng.choice((_VARINT, _FIXED64, _DELIMITED, _FIXED32))
        case _:
            value = _harm_value(rng, wire, value)
    return [*fields[:at], (number, wire, value), *fields[at + 1 :]]


def _harm_value(rng: random.Random, wire: int, value: bytes) -> bytes:
    if wire == _VARINT:
        return _varint(rng.choice(_EXTREMES))
    if wire != _DELIMITED:
        return rng.randbytes(len(value))
    inner = parsed(value)
    if inner and rng.random() < 0.8:
        return encoded(_harm_fields(rng, inner))
    if value and rng.random() < 0.5:
        # Perhaps packed: as many numbers, one of them extreme.
        at = rng.randrange(len(value))
        return value[:at] + _varint(rng.choice(_EXTREMES)) + value[at + 1 :]
    return rng.choice(_WAYS)(rng, value, (value,))


def parsed(data: bytes) -> list[Field] | None:
    """Return the fields of a message, or None for bytes that are none."""
    fields: list[Field] = []
    at = 0
    try:
        while at < len(data):
            tag, at = _read_varint(data, at)
            wire = tag & 7
            if wire == _VARINT:
                _, end = _read_varint(data, at)
            elif wire == _DELIMITED:
                length, at = _read_varint(data, at)
                end = at + length
            elif wire in (_FIXED64, _FIXED32):
                end = at + (8 if wire == _FIXED64 else 4)
            else:
                return None
            if end > len(data) or tag < 8:
                return None
            fields.append((tag >> 3, wire, data[at:end]))
            at = end
    except IndexError:
        return None
    return fields


def encoded(fields: Sequence[Field]) -> bytes:
    """Return fields as a message."""
    parts = []
    for number, wire, value in fields:
        parts.append(_varint(number << 3 | wire))
        if wire == _DELIMITED:
            parts.append(_varint(len(value)))
        parts.append(value)
    return b"".join(parts)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise IndexError


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
