"""Hostile clients, each a process of its own: `python -m octavo_lab.chaos.floods KIND ADDRESS SECONDS`."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, cast

import grpc.aio
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as pb_grpc

STREAMS: Final = 10_000
_UNREAD: Final = 20
_CONNECTIONS: Final = 200
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""What opens an HTTP/2 connection, with empty settings."""
_PING: Final = b"\x00\x00\x08\x06\x00" + bytes(4) + b"octavo!!"


def _generation(channel: grpc.aio.Channel) -> Any:
    return cast("Any", pb_grpc.GenerationStub(channel))  # The stubs' types know the synchronous kind only.


async def flood(address: str, seconds: float) -> None:
    """Open 10,000 streams on one connection and say nothing on them."""
    async with grpc.aio.insecure_channel(address) as channel:
        calls = [_generation(channel).Session() for _ in range(STREAMS)]
        await asyncio.sleep(seconds)
        for call in calls:
            call.cancel()


async def deaf(address: str, seconds: float) -> None:
    """Ask for long answers and read none of them."""
    async with grpc.aio.insecure_channel(address) as channel:
        session = _generation(channel).Session()
        for number in range(_UNREAD):
            request = pb.GenerateRequest(request_id=f"deaf-{time.monotonic_ns()}-{number}", text="Say on:")
            request.sampling.max_tokens = 400
            request.sampling.ignore_eos = True
            await session.write(pb.SessionRequest(generate=request))
        await asyncio.sleep(seconds)
        session.cancel()


async def half_open(address: str, seconds: float) -> None:
    """Hold connections open on which nothing comes, or no more than the beginning."""
    host, _, port = address.rpartition(":")
    held = []
    for number in range(_CONNECTIONS):
        with suppress(OSError):
            connection = socket.create_connection((host, int(port)), timeout=1)
            held.append(connection)
            connection.send(_PREFACE[: number % len(_PREFACE)])
    await asyncio.sleep(seconds)
    for connection in held:
        connection.close()


async def pings(address: str, seconds: float) -> None:
    """Send as many HTTP/2 pings as go out, on one connection after the other."""
    host, _, port = address.rpartition(":")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with suppress(OSError), socket.create_connection((host, int(port)), timeout=0.5) as connection:
            connection.sendall(_PREFACE)
            while time.monotonic() < until:
                connection.sendall(_PING * 100)
                with suppress(BlockingIOError):
                    connection.recv(1 << 16, socket.MSG_DONTWAIT)
        await asyncio.sleep(0.05)


FLOODS: Final[dict[str, Callable[[str, float], Awaitable[None]]]] = {
    "flood": flood,
    "deaf": deaf,
    "half-open": half_open,
    "pings": pings,
}

if __name__ == "__main__":
    with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
        asyncio.run(FLOODS[sys.argv[1]](sys.argv[2], float(sys.argv[3])))  # type: ignore[arg-type]
