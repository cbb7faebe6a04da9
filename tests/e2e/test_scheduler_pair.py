"""Two schedulers and a worker in this process: who has it, and what becomes of requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from octavo.v1 import common_pb2
from octavo.v1 import generation_pb2 as pb

from tests.e2e.scheduler_stack import (
    Output,
    Stack,
    Worker,
    error_of,
    one_worker,
    request,
    scheduler,
    start_worker,
    until,
)

TEXT = "what the model says again"


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    worker = await start_worker()
    yield worker
    await worker.stop()


class Asked:
    """A request that runs until something is done to its scheduler."""

    def __init__(self, stack: Stack, **fields: Any) -> None:
        self.output = Output()
        self.progress: list[pb.Progress] = []
        self.call: Any = stack.generation.Generate(request(text=TEXT, return_token_ids=True, **fields))
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> common_pb2.Error | None:
        try:
            async for event in self.call:
                if event.HasField("progress"):
                    self.progress.append(event.progress)
                self.output.take(event)
        except grpc.aio.AioRpcError as failure:
            return error_of(failure)
        return None

    @property
    def num_tokens(self) -> int:
        return len(self.output.token_ids.get(0, ()))

    def resume(self) -> pb.ResumedChoice:
        """What the next scheduler is told of it."""
        shown = self.output.text.get(0, "").encode()
        return pb.ResumedChoice(token_ids=self.output.token_ids.get(0, ()), shown_bytes=len(shown))


async def run_to(asked: Asked, worker: Worker, num_tokens: int) -> None:
    """Let the worker go on until a request has so many tokens, and hold it there."""
    while asked.num_tokens < num_tokens:
        before = asked.num_tokens
        worker.gate.let_go()
        await until(lambda before=before: asked.num_tokens > before or worker.gate.is_spent)


def state_of(stack: Stack) -> list[str]:
    return [link.status.state for link in stack.process.fleet]


async def test_preferred_scheduler_takes_the_worker_and_clients_are_told_where_to_go(worker: Worker) -> None:
    async with scheduler(worker.address, rank=1, scheduler_id="b") as standby:
        await standby.wait_ready()
        worker.gate.close()
        asked = Asked(standby)
        await run_to(asked, worker, 5)
        async with scheduler(worker.address, scheduler_id="a") as preferred:
            error = await asked.task
            worker.gate.open()
            assert error is not None
            endpoint = f"127.0.0.1:{preferred.port}"
            assert (error.reason, error.metadata["endpoint"]) == ("NO_WORKER", endpoint)
            assert not asked.output.finished

            await preferred.wait_ready()
            rest = Asked(preferred, resume=[asked.resume()])
            assert await rest.task is None
            assert asked.output.text[0] + rest.output.text[0] == TEXT
            status = await standby.status()
            assert (status.rank, status.workers[0].state, status.workers[0].held_by) == (1, "held", "a")
            assert status.workers[0].held_by_endpoint == endpoint
            assert status.outcomes["NO_WORKER"] == 1
            await until(lambda: preferred.process.pair.standby() is not None)
            assert (await preferred.status()).standby == f"127.0.0.1:{standby.port}"


async def test_request_of_a_scheduler_whose_workers_another_one_has_is_told_where_to_go(
    worker: Worker,
) -> None:
    async with scheduler(worker.address) as holder:
        await holder.wait_ready()
        async with scheduler(worker.address) as other:
            await until(lambda: state_of(other) == ["held"])
            asked = Asked(other)
            await until(lambda: asked.output.accepted is not None)
            other.let_time_pass(0.5)
            error = await asked.task
            assert error is not None
            assert error.reason == "NO_WORKER"
            assert error.metadata["endpoint"] == f"127.0.0.1:{holder.port}"


@pytest.mark.parametrize("fields", [{}, {"terms": {"deadline_ms": 3_600_000}}])
async def test_wait_for_a_worker_that_is_gone_for_good_is_told_and_ends(fields: dict[str, Any]) -> None:
    async with one_worker(no_worker_timeout_s=10) as (stack, worker):
        worker.gate.close()
        running = Asked(stack, **fields)
        await run_to(running, worker, 3)
        await worker.server.stop(0)
        await until(lambda: state_of(stack) == ["lost"])
        waiting = Asked(stack, **fields)
        await until(lambda: waiting.output.accepted is not None)
        stack.let_time_pass(2)
        for asked in (running, waiting):
            await until(lambda asked=asked: asked.progress)
            assert asked.progress[0].reason == pb.WAIT_REASON_NO_WORKER
            assert asked.progress[0].waited_ms + asked.progress[0].left_ms == 10_000
        stack.let_time_pass(10)
        for asked in (running, waiting):
            error = await asked.task
            assert error is not None
            assert (error.reason, error.code) == ("NO_WORKER", grpc.StatusCode.UNAVAILABLE.value[0])
            assert "endpoint" not in error.metadata


async def test_worker_that_comes_back_in_time_ends_the_wait(worker: Worker) -> None:
    async with scheduler(worker.address, no_worker_timeout_s=10) as stack:
        await stack.wait_ready()
        worker.gate.close()
        asked = Asked(stack)
        await run_to(asked, worker, 3)
        await worker.server.stop(0)
        await until(lambda: state_of(stack) == ["lost"])
        stack.let_time_pass(9)
        again = await start_worker(port=int(worker.address.rpartition(":")[2]))
        assert await asked.task is None
        assert asked.output.text[0] == TEXT
        await again.stop()


async def test_drain_hands_what_runs_over_to_the_standby(worker: Worker) -> None:
    async with scheduler(worker.address, drain_hand_over_s=0) as first:
        await first.wait_ready()
        async with scheduler(worker.address, rank=1) as standby:
            await until(lambda: first.process.pair.standby() is not None)
            worker.gate.close()
            asked = Asked(first)
            await run_to(asked, worker, 4)
            first.process.stop("test", 60.0)
            error = await asked.task
            worker.gate.open()
            assert error is not None
            endpoint = f"127.0.0.1:{standby.port}"
            assert (error.reason, error.metadata["endpoint"]) == ("DRAINING", endpoint)
            await standby.wait_ready()
            rest = Asked(standby, resume=[asked.resume()])
            assert await rest.task is None
            assert asked.output.text[0] + rest.output.text[0] == TEXT


async def test_rank_that_changes_is_said_anew(worker: Worker) -> None:
    class Changing:
        value = 0

        def rank(self) -> int:
            return self.value

    async with scheduler(worker.address) as first:
        preference = first.process.pair.preference = Changing()
        await first.wait_ready()
        async with scheduler(worker.address, rank=1) as second:
            await until(lambda: state_of(second) == ["held"])
            preference.value = 2
            await second.wait_ready()
            await until(lambda: state_of(first) == ["held"])
