"""What a port answers before a message is read, over a real port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from octavo.service import call_guard
from octavo.service.call_guard import CallGuard, CallRefused
from octavo.service.places import Places
from octavo.service.status import ERROR_KEY
from octavo.v1 import common_pb2

WAIT_S = 60.0


class Echo:
    """A service with a method of each kind; `hold` waits until it is let go."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.seen: list[bytes] = []

    async def unary(self, request: bytes, _: Any) -> bytes:
        self.seen.append(request)
        return request

    async def hold(self, request: bytes, context: Any) -> None:
        await context.write(request)
        await self.go.wait()

    async def stream(self, requests: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request


def identify(_: str, metadata: Any, __: Any) -> str | None:
    who = dict(metadata).get("who")
    if who == "stranger":
        raise CallRefused(common_pb2.Error(code=16, reason="NO_API_KEY", message="who are you?"))
    return str(who) if who else None


@asynccontextmanager
async def port(places: Places | None = None) -> AsyncIterator[tuple[Echo, grpc.aio.Channel]]:
    echo = Echo()
    guard = CallGuard(identify, {"Echo": places or Places(100, 3)}, Places(4, 3))
    server = grpc.aio.server(interceptors=(guard,))
    methods = {
        "Unary": grpc.unary_unary_rpc_method_handler(echo.unary),
        "Hold": grpc.unary_stream_rpc_method_handler(echo.hold),
        "Stream": grpc.stream_stream_rpc_method_handler(echo.stream),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Echo", methods),))
    number = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{number}") as channel:
            yield echo, channel
    finally:
        echo.go.set()
        await server.stop(0)


def call(channel: grpc.aio.Channel, method: str, who: str = "tenant") -> Any:
    """Open a call that sends what it is told to, whatever kind the method is."""
    return channel.stream_stream(f"/Echo/{method}")(metadata=(("who", who),), timeout=WAIT_S)


async def refusal_of(opened: Any) -> common_pb2.Error:
    assert await opened.code() is not grpc.StatusCode.OK
    return common_pb2.Error.FromString(dict(await opened.trailing_metadata())[ERROR_KEY])


@pytest.mark.parametrize("method", ["Unary", "Hold", "Stream"])
async def test_stranger_is_refused_though_no_message_has_come(method: str) -> None:
    async with port() as (_, channel):
        assert (await refusal_of(call(channel, method, "stranger"))).reason == "NO_API_KEY"


async def test_every_kind_of_call_is_answered_as_without_a_guard() -> None:
    async with port() as (echo, channel):
        unary = channel.unary_unary("/Echo/Unary")
        assert await unary(b"hello", timeout=WAIT_S) == b"hello"
        assert await unary(b"", timeout=WAIT_S) == b""
        held = channel.unary_stream("/Echo/Hold")(b"wait", timeout=WAIT_S)
        assert await held.read() == b"wait"
        stream = call(channel, "Stream")
        for message in (b"one", b"", b"three"):
            await stream.write(message)
            assert await stream.read() == message
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lag
        assert echo.seen == [b"hello", b""]


async def test_call_without_a_place_is_told_so_and_others_still_get_in() -> None:
    async with port(Places(8, 3)) as (echo, channel):
        held = [call(channel, "Hold", "greedy") for _ in range(6)]
        for one in held:
            await one.write(b"x")
            assert await one.read() == b"x"
        error = await refusal_of(call(channel, "Hold", "greedy"))
        assert (error.code, error.reason, error.retry_delay_ms) == (8, "TOO_MANY_CALLS", 1000)

        other = call(channel, "Hold", "other")
        await other.write(b"y")
        assert await other.read() == b"y"
        other.cancel()

        echo.go.set()
        assert [await one.code() for one in held] == [grpc.StatusCode.OK] * 6
        again = call(channel, "Hold", "greedy")
        await again.write(b"z")
        assert await again.read() == b"z"


async def test_first_messages_that_do_not_come_are_few_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_guard, "_SOON_S", 0.0)
    async with port() as (_, channel):
        # Two more than may be slow: they are told at once, the others wait.
        opened = [call(channel, "Unary") for _ in range(10)]
        refusals = [asyncio.create_task(refusal_of(one)) for one in opened]
        soon = asyncio.as_completed(refusals)
        assert {(await next(soon)).reason, (await next(soon)).reason} == {"TOO_MANY_CALLS"}
        late = next(one for one in opened if not one.done())
        await late.write(b"late")
        assert await late.read() == b"late"
        for refusal in refusals:
            refusal.cancel()


async def test_first_message_has_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_guard, "_SOON_S", 0.0)
    monkeypatch.setattr(call_guard, "_LATEST_S", 0.01)
    async with port() as (_, channel):
        for method in ("Unary", "Hold", "Stream"):
            assert (await refusal_of(call(channel, method))).reason == "MESSAGE_TIMEOUT"
