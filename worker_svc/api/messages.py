"""Messages as they come: read when it is known from whom, and refused when they are none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from octavo.service.status import Context, abort
from octavo.v1 import worker_pb2

from worker_svc.api.status import Refusal

MAX_HELLO_BYTES: Final = 4096
"""The first message comes from anybody who reaches the port, and is not parsed when it is larger."""
MAX_REQUEST_BYTES: Final = 64 << 10
"""Of the methods that take no stream."""


class UnparsedMessages(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Hands streams their messages as bytes, and answers what is no message with what is wrong with it."""

    def __init__(self, service: str) -> None:
        self._prefix = f"/{service}/"

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return what answers a call."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(self._prefix):
            return handler
        if handler.request_streaming:
            return handler._replace(request_deserializer=None)
        parse, method = handler.request_deserializer, handler.unary_unary

        async def answer(raw: bytes, context: Context) -> Any:
            try:
                request = _parsed(parse, raw, MAX_REQUEST_BYTES)
            except Refusal as refusal:
                return await abort(context, refusal.to_proto())
            return await method(request, context)

        return handler._replace(request_deserializer=None, unary_unary=answer)


def scheduler_message(raw: bytes, max_bytes: int | None = None) -> worker_pb2.SchedulerMessage:
    """Return a message of a scheduler.

    Raises:
        Refusal: it is none, or larger than it may be.
    """
    message: worker_pb2.SchedulerMessage = _parsed(worker_pb2.SchedulerMessage.FromString, raw, max_bytes)
    return message


def _parsed(parse: Callable[[bytes], Any], raw: bytes, max_bytes: int | None) -> Any:
    if max_bytes is not None and len(raw) > max_bytes:
        problem = f"{len(raw)} bytes, at most {max_bytes} are read here"
        raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE", problem)
    try:
        return parse(raw)
    except DecodeError:
        problem = "it cannot be parsed"
        raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE", problem) from None
