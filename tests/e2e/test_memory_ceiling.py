"""What the scheduler's memory is used for, and what happens when there is no more of it."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc

import grpc
import pytest
from octavo.v1 import generation_pb2 as pb

from scheduler_svc.api import session
from tests.e2e.scheduler_stack import error_of, one_worker, until
from tests.e2e.test_scheduler_session import Client

_MOST_BYTES = 24_000
"""Of heap, for a request with a prompt of 1,000 tokens that waits."""


async def test_scheduler_at_its_ceiling_refuses_what_is_new_and_finishes_what_it_has() -> None:
    async with one_worker() as (stack, worker):
        worker.gate.close()
        running = asyncio.create_task(stack.generate(text="came before"))
        await until(lambda: stack.process.driver.snapshot().live_requests == 1)
        ceiling = stack.process._ceiling
        room, ceiling.max_rss_bytes = ceiling.max_rss_bytes, 1 << 20
        paced = Client(stack)
        await paced.open(paced=True)
        assert await paced.read()
        await until(ceiling.is_reached)

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.generate(text="comes too late")
        error = error_of(caught.value)
        assert (error.reason, error.metadata["max_rss_bytes"]) == ("MEMORY_FULL", str(1 << 20))
        assert error.retry_delay_ms > 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.generation.Tokenize(pb.TokenizeRequest(text="so does this"))
        assert error_of(caught.value).reason == "MEMORY_FULL"
        await paced.generate("batch", text="and this")
        await paced.read_until_ended("batch")
        assert paced.errors["batch"].reason == "MEMORY_FULL"

        status = await stack.status()
        assert status.max_rss_bytes == 1 << 20 < status.rss_bytes
        assert status.outcomes == {"MEMORY_FULL": 2}
        worker.gate.open()
        assert (await running).text[0] == "came before"
        ceiling.max_rss_bytes = room
        await until(lambda: not ceiling.is_reached())
        assert (await stack.generate(text="welcome again")).text[0] == "welcome again"


async def test_scheduler_at_its_ceiling_ends_sessions_in_which_nothing_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "_LOOK_S", 0.01)
    monkeypatch.setattr(session, "_IDLE_S", 0.0)
    async with one_worker() as (stack, worker):
        worker.gate.close()
        idle, busy = Client(stack), Client(stack)
        await idle.open(paced=True)
        assert await idle.read()
        await busy.generate("came before", text="came before")
        await until(lambda: stack.process.driver.snapshot().live_requests == 1)

        stack.process._ceiling.max_rss_bytes = 1 << 20
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await idle.read()
        assert error_of(caught.value).reason == "MEMORY_FULL"
        worker.gate.open()
        await busy.read_until_ended("came before")
        assert busy.outputs["came before"].text[0] == "came before"


async def test_waiting_request_takes_few_bytes_for_each_token_of_its_prompt() -> None:
    count = 200
    async with one_worker({"max_model_len": 2048, "num_blocks": 512}) as (stack, worker):
        worker.gate.close()
        client = Client(stack)

        async def send(first: int) -> None:
            for number in range(first, first + count):
                ids = [3 + (number * 7 + place) % 240 for place in range(1000)]
                await client.generate(str(number), tokens={"ids": ids})
            await until(lambda: stack.process.driver.snapshot().live_requests == first + count)
            gc.collect()

        await send(0)
        tracemalloc.start()
        try:
            await send(count)
            each = tracemalloc.get_traced_memory()[0] / count
        finally:
            tracemalloc.stop()
        assert each < _MOST_BYTES
        client.call.cancel()
        worker.gate.open()
        await until(worker.is_empty)
