"""Reads `google.rpc.Status` with the details that Octavo attaches.

The bare install has no `googleapis-common-protos`, and four small messages do not justify it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from octavo.errors import ErrorInfo, FieldViolation

STATUS_KEY = "grpc-status-details-bin"


def parse(data: bytes, fallback: ErrorInfo) -> ErrorInfo:
    """Return what the serialized status says; `fallback` fills what it leaves out."""
    info = fallback
    for number, value in _fields(data):
        if number == 1 and isinstance(value, int):
            info = replace(info, code=value)
        elif number == 2 and isinstance(value, bytes):
            info = replace(info, message=value.decode(errors="replace"))
        elif number == 3 and isinstance(value, bytes):
            info = _detail(value, info)
    return info


def _detail(packed: bytes, info: ErrorInfo) -> ErrorInfo:
    parts = dict(_fields(packed))
    body = parts.get(2, b"")
    if not isinstance(body, bytes):
        return info
    match _text(parts.get(1, b"")).rpartition("/")[2]:
        case "google.rpc.ErrorInfo":
            return replace(
                info,
                reason=_text(dict(_fields(body)).get(1, b"")),
                metadata=dict(_pairs(body, 3)),
            )
        case "google.rpc.RetryInfo":
            delay = dict(_fields(body)).get(1, b"")
            duration = dict(_fields(delay)) if isinstance(delay, bytes) else {}
            return replace(info, retry_after_s=_number(duration.get(1)) + _number(duration.get(2)) / 1e9)
        case "google.rpc.BadRequest":
            return replace(info, violations=tuple(FieldViolation(*pair) for pair in _pairs(body, 1)))
    return info


def _pairs(data: bytes, wanted: int) -> Iterator[tuple[str, str]]:
    """Yield the texts in fields 1 and 2 of each message in field `wanted`."""
    for number, value in _fields(data):
        if number == wanted and isinstance(value, bytes):
            pair = dict(_fields(value))
            yield _text(pair.get(1, b"")), _text(pair.get(2, b""))


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (field number, value) of a protobuf message; stops where it is malformed."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        value: int | bytes
        match tag & 7:
            case 0:
                value, at = _varint(data, at)
            case 2:
                size, at = _varint(data, at)
                value, at = data[at : at + size], at + size
            case 1:
                value, at = data[at : at + 8], at + 8
            case 5:
                value, at = data[at : at + 4], at + 4
            case _:
                return
        yield tag >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data):
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            break
    return value, at


def _text(value: int | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else ""


def _number(value: int | bytes | None) -> int:
    return value if isinstance(value, int) else 0
