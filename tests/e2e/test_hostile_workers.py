"""A worker that lies or raves, beside one that does not: requests end right, and the scheduler lives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from octavo.protocol.transport import SERVER_OPTIONS
from octavo.v1 import worker_pb2 as pb
from structlog.testing import capture_logs

from tests.e2e.scheduler_stack import WAIT_S, Stack, Worker, scheduler, start_worker, until

Say = Callable[[pb.WorkerMessage], list[bytes]]
"""What is said in place of an honest message."""


def _as_is(message: pb.WorkerMessage) -> list[bytes]:
    return [message.SerializeToString()]


def _welcome(**fields: Any) -> Say:
    """Lie in the Welcome."""

    def say(message: pb.WorkerMessage) -> list[bytes]:
        if message.HasField("welcome"):
            message.welcome.MergeFrom(pb.Welcome(**fields))
        return _as_is(message)

    return say


def _report(change: Callable[[pb.Report], object]) -> Say:
    """Lie in every report."""

    def say(message: pb.WorkerMessage) -> list[bytes]:
        if message.HasField("report"):
            change(message.report)
        return _as_is(message)

    return say


def _instead_of_reports(*said: bytes) -> Say:
    return lambda message: list(said) if message.HasField("report") else _as_is(message)


def _absurd_pool(report: pb.Report) -> None:
    report.pool.free = report.pool.evictable = report.pool.active = 2**32 - 1


def _strange_handles(report: pb.Report) -> None:
    report.released.extend(range(1000, 2000))
    report.finished.add(handle=77_777, reason=1)
    report.stalled.add(handle=88_888, reason=1)
    report.refused.add(handle=99_999, reason=1)
    report.admitted.add(handle=66_666, cached_tokens=2**32 - 1)


def _swapped(message: pb.WorkerMessage, held: list[bytes]) -> list[bytes]:
    """Send every two reports in the wrong order."""
    if not message.HasField("report"):
        return _as_is(message)
    held[:0] = _as_is(message)
    if len(held) < 2:
        return []
    both = held[:]
    held.clear()
    return both


def _out_of_order() -> Say:
    held: list[bytes] = []
    return lambda message: _swapped(message, held)


MILLION = 1_000_000
LIES: dict[str, tuple[Say, bool]] = {
    "bytes that are no message": (_instead_of_reports(b"\xff" * 40), True),
    "a report cut in the middle": (_instead_of_reports(pb.WorkerMessage(report=pb.Report(
        step=1, token_handles=[1] * 9)).SerializeToString()[:-4]), True),
    "a report of a step nobody planned": (_report(lambda report: setattr(report, "step", 4711)), True),
    "the same report twice": (lambda message: _as_is(message) * (1 + message.HasField("report")), True),
    "reports out of order": (_out_of_order(), True),
    "a wrong digest": (_report(lambda report: setattr(report, "digest", 1)), True),
    "an absurd pool": (_report(_absurd_pool), True),
    "handles nobody knows": (_report(_strange_handles), False),
    "a second welcome": (_instead_of_reports(pb.WorkerMessage(
        welcome=pb.Welcome(last=True)).SerializeToString()), True),
    "a welcome with keys of 15 bytes": (_welcome(device_keys=b"k" * 15), True),
    "a welcome with a million keys": (
        _welcome(device_keys=b"".join(number.to_bytes(16, "big") for number in range(MILLION))), True),
    "a welcome with a pool of no blocks": (_welcome(geometry=pb.Geometry(num_blocks=2**32 - 1)), True),
}  # fmt: skip
"""What a worker says, and whether its link must end for that."""


@asynccontextmanager
async def lying(worker: Worker, say: Say) -> AsyncIterator[str]:
    """Stand between a scheduler and a worker, and say something else; yields where."""
    channel: Any = grpc.aio.insecure_channel(worker.address)
    describe = channel.unary_unary("/octavo.v1.Worker/Describe")
    attach = channel.stream_stream(
        "/octavo.v1.Worker/Attach", response_deserializer=pb.WorkerMessage.FromString
    )

    async def on_describe(request: bytes, _: object) -> bytes:
        return bytes(await describe(request))

    async def on_attach(incoming: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
        async for message in attach(incoming):
            for data in say(message):
                yield data

    server = grpc.aio.server(options=SERVER_OPTIONS)
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Describe": grpc.unary_unary_rpc_method_handler(on_describe),
        "Attach": grpc.stream_stream_rpc_method_handler(on_attach),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("octavo.v1.Worker", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
        await channel.close()


@asynccontextmanager
async def liar_and_honest(say: Say) -> AsyncIterator[tuple[Stack, str]]:
    """A scheduler with two workers of one model; yields the address of the one that lies, too."""
    honest, other = await start_worker("honest"), await start_worker("liar")
    try:
        async with (
            lying(other, say) as address,
            scheduler(honest.address, address) as stack,
        ):
            await until(lambda: all(link.tried for link in stack.process.fleet))
            yield stack, address
            await until(honest.is_empty)
    finally:
        await other.stop()
        await honest.stop()


@pytest.mark.parametrize(("say", "ends"), LIES.values(), ids=LIES)
async def test_worker_that_lies_harms_no_request_and_not_the_scheduler(say: Say, *, ends: bool) -> None:
    with capture_logs() as logs:
        async with liar_and_honest(say) as (stack, address):
            prompts = [f"request {number} that is said again" for number in range(12)]
            async with asyncio.timeout(WAIT_S):
                outputs = await asyncio.gather(*(stack.generate(text=prompt) for prompt in prompts))
            assert [output.text[0] for output in outputs] == prompts
            told = [one for one in logs if one["event"] == "worker_link_ended" and one["address"] == address]
            assert bool(told) == ends, told
            status = await stack.status()
            assert (status.live_requests, status.outcomes["STOP"]) == (0, len(prompts))
