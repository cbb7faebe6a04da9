"""From the bytes of a message to the message, or to a value that says why not.

Left to itself, grpc answers a message it cannot parse with an error of the server. That is wrong for
a client in another language that sends text which is not UTF-8, and in a Session it would end every
request of the stream.

A message is counted before it is parsed (`octavo.protocol.wire`), and a large one is parsed by a thread:
no message stops the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Generic, TypeVar

from google.protobuf.message import DecodeError, Message
from octavo.protocol.bounds import BOUNDS
from octavo.protocol.wire import DELIMITED, Scanner, TooManyFields, WireError, fields
from octavo.v1 import generation_pb2 as pb

from scheduler_svc.errors import ServiceError

_M = TypeVar("_M", bound=Message)
SessionPart = pb.SessionRequest | pb.GenerateRequest

_AT_ONCE_BYTES: Final = 128 << 10
_AT_ONCE_FIELDS: Final = 4096
"""A message of no more is parsed on the event loop, in a millisecond at worst."""
_LOOKED_AT: Final = 64
"""Fields among which the id of a request is looked for when the request cannot be read."""
# One thread: more would only take turns with each other, and with the event loop.
_thread: Final = ThreadPoolExecutor(1, "parsing")


@dataclass(frozen=True, slots=True)
class Malformed:
    """A message that does not parse, or holds more than it may."""

    error: ServiceError
    request_id: str
    """Of the request in it, when that much can be read."""


class Parser(Generic[_M]):
    """Makes messages of one type; for the guard of the port, a deserializer that may have to be awaited."""

    def __init__(self, kind: type[_M]) -> None:
        self._kind = kind
        self._scanner = Scanner(kind.DESCRIPTOR)

    def __call__(self, data: bytes) -> _M | Malformed | Awaitable[_M | Malformed]:
        """Return the message, or how to wait for it where it is large."""
        if len(data) <= _AT_ONCE_BYTES:
            try:
                self._scanner.check(data, _AT_ONCE_FIELDS)
                return self._kind.FromString(data)
            except TooManyFields:
                pass
            except (WireError, DecodeError) as error:
                return self._diagnose(data, error)
        return asyncio.get_running_loop().run_in_executor(_thread, self.parse, data)

    def parse(self, data: bytes) -> _M | Malformed:
        """Return the message, however large it is."""
        try:
            self._scanner.check(data)
            return self._kind.FromString(data)
        except (WireError, DecodeError) as error:
            return self._diagnose(data, error)

    def _diagnose(self, data: bytes, error: Exception) -> Malformed:
        """Say what is wrong: the first excess, or the first text that is not UTF-8."""
        if isinstance(error, WireError):
            field, problem = error.field, str(error)
        else:
            field, problem = self._scanner.find_not_utf8(data) or "", "is not valid UTF-8"
        if field:
            # In a Session, too, paths begin at the request.
            found = ServiceError.invalid((field.removeprefix("generate."), problem))
        elif isinstance(error, TooManyFields):
            found = ServiceError("INVALID_REQUEST", f"the message {problem}")
        else:
            found = ServiceError("INVALID_REQUEST", f"the message is no {self._kind.DESCRIPTOR.full_name}")
        return Malformed(found, _request_id(self._kind.DESCRIPTOR, data))


_REQUEST: Final = Parser(pb.GenerateRequest)
_SESSION: Final = Parser(pb.SessionRequest)


async def parse_session(data: bytes) -> tuple[SessionPart | Malformed, ...]:
    """Return what a message of a Session brings: itself, or the requests that it carries together.

    Of those, one that does not parse is no reason to lose the others.
    """
    if len(data) <= _AT_ONCE_BYTES:
        message = _SESSION(data)
        if isinstance(message, Awaitable):
            message = await message
        if isinstance(message, pb.SessionRequest):
            together = message.HasField("generate_many")
            return tuple(message.generate_many.requests) if together else (message,)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_thread, _parse_apart, data)


def _parse_apart(data: bytes) -> tuple[SessionPart | Malformed, ...]:
    """Return the requests that a message carries together, each parsed for itself, or the message."""
    most = BOUNDS["GenerateRequests.requests"].count or 0
    requests = _requests_together(data, most)
    if requests and len(requests) <= most:
        return tuple(map(_REQUEST.parse, requests))
    return (_SESSION.parse(data),)


def _requests_together(data: bytes, most: int) -> list[bytes]:
    """Return the bytes of the requests that a message carries together, if any can be told apart.

    There are more than `most` when it carries more than that.
    """
    many = pb.SessionRequest.GENERATE_MANY_FIELD_NUMBER
    requests = pb.GenerateRequests.REQUESTS_FIELD_NUMBER
    parts = (one for part in _parts(data, many) for one in _parts(part, requests))
    try:
        return list(islice(parts, most + 1))
    except WireError:
        return []


def _parts(data: bytes, wanted: int) -> Iterator[bytes]:
    """Yield the bytes of each field of this number; raises WireError."""
    return (value for number, kind, value in fields(data) if number == wanted and kind == DELIMITED)


def accept(message: _M | Malformed) -> _M:
    """Return the message, or raise the error of one that does not parse."""
    if isinstance(message, Malformed):
        raise message.error
    return message


def _request_id(descriptor: Any, data: bytes) -> str:
    longest = BOUNDS["GenerateRequest.request_id"].bytes or 0
    with suppress(WireError, UnicodeDecodeError):
        for number, kind, value in islice(fields(data), _LOOKED_AT):
            field = descriptor.fields_by_number.get(number)
            if field is None or kind != DELIMITED:
                continue
            if field.name == "request_id":
                return value.decode() if len(value) <= longest else ""
            if field.name in ("generate", "cancel"):
                return _request_id(field.message_type, value)
    return ""
