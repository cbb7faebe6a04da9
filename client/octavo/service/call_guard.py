"""What stands before every method of a gRPC port: keys, places, and the first message.

grpc reads the message of a unary call before anybody is asked whether the call may come, and keeps what has
come of it in memory until it is whole. Here every method has the shape of a stream: a call is refused at its
headers, and its message is read when it is its turn, within a time.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

import grpc
import grpc.aio

from octavo.service.places import Places, Turns
from octavo.service.status import Context, abort
from octavo.v1 import common_pb2

Metadata = Iterable[tuple[str, str | bytes]]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Identify = Callable[[str, Metadata | None, Context], str | None]
"""Says who calls, from what is known at the headers of a call: its method, as `/package.Service/Method`, its
metadata and its connection. None is whoever is at the other end of that. Raises CallRefused."""

_EOF: Final = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lag
_RETRY_MS: Final = 1_000
_AT_ONCE: Final = 8
"""First messages of one caller that are received at the same time."""
_SOON_S: Final = 0.5
"""A message that takes longer is slow."""
_SLOW: Final = 32
"""Slow messages of all callers."""
_SLOW_SHARE: Final = 1 / 3
_LATEST_S: Final = 60.0


def bearer_key(metadata: Metadata | None) -> str | None:
    """Return the key in a call's metadata as it stands there, or None if there is none."""
    values = [value for name, value in metadata or () if name == "authorization"]
    if not values:
        return None
    scheme, _, key = str(values[0]).partition(" ")
    # Of two keys one may be somebody else's, added on the way: neither is trusted.
    return key.strip() if scheme.lower() == "bearer" and len(values) == 1 else ""


class CallRefused(Exception):
    """A call may not come; `error` says why."""

    def __init__(self, error: common_pb2.Error) -> None:
        super().__init__(error.message)
        self.error = error


class CallGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Refuses calls before their message is read, and reads it within bounds of time and number."""

    def __init__(self, identify: Identify, places: Mapping[str, Places], others: Places) -> None:
        """`places`: those of each service by its full name; `others`: those of all other services."""
        self._identify = identify
        self._places = places
        self._others = others
        self._turns = Turns(_AT_ONCE)
        self._slow = Places(_SLOW, _SLOW_SHARE)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Return what answers a call: its method behind the guard, or a refusal."""
        handler = await continuation(handler_call_details)
        if handler is None:
            # An unknown method is answered as such by grpc.
            return handler
        method, metadata = handler_call_details.method, handler_call_details.invocation_metadata
        places = self._places.get(method.split("/")[1], self._others)
        return self._guarded(handler, places, partial(self._identify, method, metadata))

    def _guarded(self, handler: Any, places: Places, identify: Callable[[Context], str | None]) -> Handler:
        async def serve(_: object, context: Context) -> Any:
            try:
                caller = identify(context) or _host(context.peer())
            except CallRefused as refused:
                await abort(context, refused.error)
            if not places.take(caller):
                await abort(context, _full(f"no more than {places.size} calls of this kind can be open"))
            try:
                if handler.request_streaming:
                    return await _answer(
                        handler.stream_stream, self._messages(handler, context, caller), context
                    )
                request = await self._first(context, caller)
                if request is _EOF:
                    return None
                request = (handler.request_deserializer or bytes)(request)
                if inspect.isawaitable(request):
                    request = await request
                return await _answer(handler.unary_stream or handler.unary_unary, request, context)
            finally:
                places.leave(caller)

        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return make(serve, None, handler.response_serializer)

    async def _messages(self, handler: Handler, context: Context, caller: str) -> AsyncIterator[Any]:
        parse = handler.request_deserializer or bytes
        message = await self._first(context, caller)
        while message is not _EOF:
            yield parse(message)
            message = await context.read()

    async def _first(self, context: Context, caller: str) -> Any:
        """Return the bytes of the first message, or EOF; end a call whose message does not come."""
        await self._turns.take(caller)
        loop = asyncio.get_running_loop()
        held: Turns | Places | None = self._turns

        def slow_down() -> None:
            """Let the next one have its turn, and go on as one of the slow, if there is a place."""
            nonlocal held
            self._turns.leave(caller)
            held = self._slow if self._slow.take(caller) else None
            limit.reschedule(loop.time() + (_LATEST_S - _SOON_S if held is not None else 0.0))

        timer = loop.call_later(_SOON_S, slow_down)
        try:
            # Most messages come at once, and need no second timer.
            async with asyncio.timeout(None) as limit:
                return await context.read()
        except TimeoutError:
            full = _full("too many calls wait for their first message")
            return await abort(context, full if held is None else _late())
        finally:
            timer.cancel()
            if held is not None:
                held.leave(caller)


async def _answer(method: Callable[..., Any], request: Any, context: Context) -> Any:
    answer = method(request, context)
    if inspect.isasyncgen(answer):
        async for message in answer:
            await context.write(message)
        return None
    return await answer


def _host(peer: str) -> str:
    """Return the host of an address as grpc writes it: `ipv4:10.0.0.1:4711`."""
    return unquote(peer).rpartition(":")[0] or peer


def _full(message: str) -> common_pb2.Error:
    return common_pb2.Error(
        code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0],
        reason="TOO_MANY_CALLS",
        message=message,
        retry_delay_ms=_RETRY_MS,
    )


def _late() -> common_pb2.Error:
    return common_pb2.Error(
        code=grpc.StatusCode.DEADLINE_EXCEEDED.value[0],
        reason="MESSAGE_TIMEOUT",
        message=f"the first message did not come within {_LATEST_S:.0f} s",
    )
