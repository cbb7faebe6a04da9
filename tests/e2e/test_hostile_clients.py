"""Clients that hold what they can of a scheduler, connections, streams, descriptors: others are served."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import pytest
from octavo import AsyncClient
from octavo.stack import Stack, StackConfig

from tests.e2e.scheduler_stack import until

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS, _PING = 4, 6
ASKED: dict[str, Any] = {"max_tokens": 60, "seed": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack of this module's own: what is done to its scheduler here is done to nobody else's."""
    config = StackConfig(
        model="sim",
        worker_args=("--runner", "sim"),
        scheduler_args=("--no-overload-control",),
        folder=tmp_path_factory.mktemp("hostile-clients"),
    )
    with Stack(config) as stack:
        stack.wait_ready(120)
        yield stack


def connect(stack: Stack) -> socket.socket:
    host, _, port = stack.endpoint.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def frame(kind: int, payload: bytes = b"", flags: int = 0) -> bytes:
    """An HTTP/2 frame of stream 0."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", 0) + payload


@contextmanager
def descriptors(stack: Stack, more: int) -> Iterator[None]:
    """Leave the scheduler so many descriptors more than it has open."""
    process = psutil.Process(stack.scheduler.process.pid)
    former = process.rlimit(psutil.RLIMIT_NOFILE)
    assert isinstance(former, tuple)
    process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds() + more, former[1]))
    try:
        yield
    finally:
        process.rlimit(psutil.RLIMIT_NOFILE, former)


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[AsyncClient]:
    """One that is connected before anything happens, and must get what it always gets, all the while."""
    async with AsyncClient(stack.endpoint) as client:
        expected = (await client.generate("the neighbour", **ASKED)).token_ids
        yield client
        assert (await client.generate("the neighbour", **ASKED)).token_ids == expected


async def serves_a_newcomer(stack: Stack) -> bool:
    async with AsyncClient(stack.endpoint) as newcomer:
        return bool((await newcomer.generate("hello", max_tokens=2)).token_ids)


async def is_rid_of(stack: Stack, before: int) -> None:
    """Wait until the scheduler has given its descriptors back."""
    process = psutil.Process(stack.scheduler.process.pid)
    await until(lambda: process.num_fds() <= before + 4)


@pytest.mark.parametrize("said", [b"", _PREFACE[:9], _PREFACE + frame(_SETTINGS), b"GET / HTTP/1.1\r\n"])
async def test_connections_that_say_nothing_more_keep_nobody_out(
    stack: Stack, client: AsyncClient, said: bytes
) -> None:
    before = psutil.Process(stack.scheduler.process.pid).num_fds()
    with ExitStack() as held:
        for _ in range(200):
            held.enter_context(connect(stack)).sendall(said)
        stream = client.stream("the neighbour", **ASKED)
        assert len([delta async for delta in stream]) > 1
        assert await serves_a_newcomer(stack)
    await is_rid_of(stack, before)


async def test_flood_of_pings_harms_nobody(stack: Stack, client: AsyncClient) -> None:
    ping = frame(_PING, b"floods!!")
    with connect(stack) as flooding:
        flooding.sendall(_PREFACE + frame(_SETTINGS))
        flooding.setblocking(False)
        stream, sent = client.stream("the neighbour", **ASKED), 0
        async for _ in stream:
            # It may be cut off, or not be read any more: both are right.
            try:
                sent += flooding.send(ping * 1000)
            except OSError:
                continue
        assert sent > len(ping) * 1000
    assert await serves_a_newcomer(stack)


async def test_scheduler_without_descriptors_serves_those_it_has_and_recovers(
    stack: Stack, client: AsyncClient
) -> None:
    before = psutil.Process(stack.scheduler.process.pid).num_fds()
    with descriptors(stack, more=20), ExitStack() as held:
        for _ in range(100):
            held.enter_context(connect(stack))
        stream = client.stream("the neighbour", **ASKED)
        assert len([delta async for delta in stream]) > 1
    assert await serves_a_newcomer(stack)
    await is_rid_of(stack, before)


@pytest.mark.slow
async def test_ten_thousand_streams_of_one_client_harm_nobody(stack: Stack, client: AsyncClient) -> None:
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(stack.endpoint, options=options) as greedy:
        method: Any = greedy.stream_stream("/octavo.v1.Generation/Session")
        calls = [method() for _ in range(10_000)]
        stream = client.stream("the neighbour", **ASKED)
        assert len([delta async for delta in stream]) > 1
        for call in calls:
            call.cancel()
    assert await serves_a_newcomer(stack)


def test_scheduler_has_said_nothing_of_a_failure(stack: Stack) -> None:
    stack.check()
    said = Path(stack.scheduler.log).read_text()
    assert '"level": "critical"' not in said
    assert '"level": "error"' not in said
