"""Deserializers that cannot fail: a message that does not parse becomes a value that says why.

Left to itself, grpc answers a message it cannot parse with an error of the server. That is wrong for
a client in another language that sends text which is not UTF-8, and in a Session it would end every
request of the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from google.protobuf import empty_pb2, unknown_fields
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from octavo.v1 import generation_pb2 as pb

from scheduler_svc.errors import ServiceError

_M = TypeVar("_M", bound=Message)
_DELIMITED: Final = 2
_MAX_DEPTH: Final = 32


@dataclass(frozen=True, slots=True)
class Malformed:
    """A message that does not parse."""

    error: ServiceError
    request_id: str
    """Of the request in it, when that much can be read."""


def lenient(kind: type[_M]) -> Callable[[bytes], _M | Malformed]:
    """Return a deserializer for `kind`."""

    def parse(data: bytes) -> _M | Malformed:
        try:
            return kind.FromString(data)
        except DecodeError:
            return Malformed(_diagnose(kind, data), _request_id(kind, data))

    return parse


def parse_session(data: bytes) -> tuple[pb.SessionRequest | pb.GenerateRequest | Malformed, ...]:
    """Return what a message of a Session brings: itself, or the requests that it carries together.

    Of those, one that does not parse is no reason to lose the others.
    """
    try:
        message = pb.SessionRequest.FromString(data)
    except DecodeError:
        apart = _requests_together(data)
        if apart:
            return tuple(map(lenient(pb.GenerateRequest), apart))
        return (lenient(pb.SessionRequest)(data),)
    return tuple(message.generate_many.requests) if message.HasField("generate_many") else (message,)


def _requests_together(data: bytes) -> list[bytes]:
    """Return the bytes of the requests that a message carries together, if any can be told apart."""
    many = pb.SessionRequest.GENERATE_MANY_FIELD_NUMBER
    requests = pb.GenerateRequests.REQUESTS_FIELD_NUMBER
    try:
        return [one for part in _parts(data, many) for one in _parts(part, requests)]
    except DecodeError:
        return []


def _parts(data: bytes, number: int) -> list[bytes]:
    """Return the bytes of each field of this number; raises DecodeError."""
    fields: Any = unknown_fields.UnknownFieldSet(empty_pb2.Empty.FromString(data))  # the stubs lag
    return [one.data for one in fields if one.field_number == number and one.wire_type == _DELIMITED]


def accept(message: _M | Malformed) -> _M:
    """Return the message, or raise the error of one that does not parse."""
    if isinstance(message, Malformed):
        raise message.error
    return message


def _diagnose(kind: type[Message], data: bytes) -> ServiceError:
    """Return the error that names the first text field which is not UTF-8, if that is what is wrong."""
    try:
        for path, field, value in _walk(kind.DESCRIPTOR, data):
            if field.type == FieldDescriptor.TYPE_STRING and not _is_utf8(value):
                # In a Session, too, paths begin at the request.
                return ServiceError.invalid((path.removeprefix("generate."), "is not valid UTF-8"))
    except DecodeError:
        pass
    return ServiceError("INVALID_REQUEST", f"the message is no {kind.DESCRIPTOR.full_name}")


def _request_id(kind: type[Message], data: bytes) -> str:
    try:
        for _, field, value in _walk(kind.DESCRIPTOR, data):
            if field.name == "request_id" and _is_utf8(value):
                return value.decode()
    except DecodeError:
        pass
    return ""


def _walk(
    descriptor: Any, data: bytes, path: str = "", depth: int = 0
) -> Iterator[tuple[str, FieldDescriptor, bytes]]:
    """Yield (path, field, bytes) of every text field.

    Raises:
        DecodeError: the bytes are no protobuf message at all.
    """
    counts: dict[int, int] = {}
    # To an empty message every field is unknown, and what is unknown is not checked.
    fields: Any = unknown_fields.UnknownFieldSet(empty_pb2.Empty.FromString(data))  # the stubs lag
    for unknown in fields:
        field = descriptor.fields_by_number.get(unknown.field_number)
        if field is None or unknown.wire_type != _DELIMITED:
            continue
        index = counts.get(field.number, 0)
        counts[field.number] = index + 1
        name = f"{path}{field.name}"
        if _is_repeated(field):
            name += f"[{index}]"
        if field.type == FieldDescriptor.TYPE_MESSAGE and depth < _MAX_DEPTH:
            yield from _walk(field.message_type, unknown.data, f"{name}.", depth + 1)
        elif field.type == FieldDescriptor.TYPE_STRING:
            yield name, field, unknown.data


def _is_repeated(field: Any) -> bool:
    # protobuf 5 has no `is_repeated`, protobuf 7 warns about `label`.
    if hasattr(field, "is_repeated"):
        return bool(field.is_repeated)
    return bool(field.label == FieldDescriptor.LABEL_REPEATED)


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
