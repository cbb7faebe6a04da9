"""A scheduler and real workers in this process: real ports, engines and pools, and a model that repeats.

The model says its prompt again and then ends, so that a test can make it say anything; a test can also
hold its steps.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2
from octavo.protocol.steps import TokenLogprobs
from octavo.steptimes import StepTimes
from octavo.v1 import common_pb2, generation_pb2_grpc, operations_pb2, operations_pb2_grpc
from octavo.v1 import generation_pb2 as pb

from scheduler_svc.config import SchedulerSettings
from scheduler_svc.process import SchedulerProcess
from worker_svc.api.convert import describe
from worker_svc.api.server import Business, WorkerServer, WorkerService
from worker_svc.api.session import Sessions, Terms
from worker_svc.config import WorkerSettings
from worker_svc.engine.loop import EngineLoop
from worker_svc.metrics import WorkerMetrics
from worker_svc.runner.base import LoadedModel, StepBatch, StepResult
from worker_svc.runner.sim import SimRunner, built_in_model
from worker_svc.start.load import build

WAIT_S = 60.0
EOS = 2


class Gate:
    """Stands in for the time that a step takes: none, or until the test lets the step go."""

    def __init__(self) -> None:
        self._steps = threading.Semaphore(0)
        self._closed = False

    def __call__(self, seconds: float) -> None:
        if self._closed:
            assert self._steps.acquire(timeout=WAIT_S)

    @property
    def is_spent(self) -> bool:
        """Whether every step that was let go has begun."""
        return not self._steps._value

    def close(self) -> None:
        """From now on steps wait."""
        self._closed = True

    def let_go(self, steps: int = 1) -> None:
        """Let this many steps go."""
        self._steps.release(steps)

    def open(self) -> None:
        """Steps wait no more."""
        self._closed = False
        self._steps.release(10_000)


class EchoRunner(SimRunner):
    """Says the prompt again, token by token, and then the end-of-sequence token."""

    def execute(self, batch: StepBatch) -> StepResult:
        # The base makes vectors up, and takes no time for it.
        read = super().execute(batch)
        token_ids: dict[int, int] = {}
        logprobs: dict[int, TokenLogprobs] = {}
        for row in batch.rows:
            sequence = row.sequence
            if row.scored:
                read.prompt_logprobs[sequence.handle] = [
                    TokenLogprobs(sequence.token_ids[at], -at / 16, at, (9, 8), (-0.25, -0.5))
                    for at in row.scored
                ]
            if row.sample:
                output = row.start + row.num_tokens - sequence.prompt_len
                token_id = sequence.token_ids[output] if output < sequence.prompt_len else EOS
                if sequence.sampling.ignore_eos and token_id == EOS:
                    token_id = sequence.token_ids[output % sequence.prompt_len]
                token_ids[sequence.handle] = token_id
                if sequence.sampling.logprobs is not None:
                    logprobs[sequence.handle] = TokenLogprobs(token_id, -0.5, 1, (token_id,), (-0.5,))
        return replace(read, token_ids=token_ids, logprobs=logprobs)

    def supports(self, sampling: Any) -> str | None:
        return "structured output: an echo follows no grammar" if sampling.structured is not None else None


@dataclass
class Worker:
    """A worker in this process."""

    worker_id: str
    address: str
    gate: Gate
    loop: EngineLoop
    num_blocks: int
    server: WorkerServer

    async def pool(self) -> Any:
        """The pool's figures of the moment."""
        return await self.loop.call(lambda engine: engine.pool_report())

    async def is_empty(self) -> bool:
        """Whether no sequence and no block is in use."""
        live = await self.loop.call(lambda engine: engine.num_live)
        return live == 0 and (await self.pool()).active == 0

    async def stop(self) -> None:
        """End it as a process would end: its streams break."""
        self.gate.open()
        await self.server.stop(0)
        assert self.loop.stop(WAIT_S)


async def start_worker(
    worker_id: str = "w1",
    *,
    port: int = 0,
    info: LoadedModel | None = None,
    num_devices: int = 1,
    runner: type[SimRunner] = EchoRunner,
    **flags: object,
) -> Worker:
    """Start a worker."""
    given = {"runner": "sim", "num_blocks": 256, "max_model_len": 1024, "max_num_seqs": 16, **flags}
    settings = WorkerSettings.load({"check_integrity": True, "enable_faults": True, **given})
    gate = Gate()
    model = info or replace(built_in_model(), model_id="echo")
    loop = EngineLoop(lambda: build(settings, runner(model, StepTimes.builtin(), sleep=gate)))
    loop.start()
    loaded = await loop.ready
    terms = Terms(
        worker_id=worker_id,
        incarnation=f"{worker_id}-{id(loop)}",
        geometry=loaded.geometry,
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.info.vocab_size,
        limits=loaded.limits,
        adapters=loaded.info.adapters,
        simulated=True,
        num_devices=num_devices,
        structured_output=loaded.grammars is not None,
    )
    sessions = Sessions(terms, loop, WorkerMetrics(), loaded.faults)
    service = WorkerService()
    service.open(Business(describe(loaded.info, terms), sessions, loaded.faults))
    server = WorkerServer(service)
    bound = await server.start("127.0.0.1", port)
    await server.set_serving(serving=True)
    num_blocks = loaded.geometry.num_blocks
    return Worker(worker_id, f"127.0.0.1:{bound}", gate, loop, num_blocks, server)


class Stack:
    """A scheduler in this process, and channels to it."""

    def __init__(self, process: SchedulerProcess, port: int, channel: grpc.aio.Channel) -> None:
        self.process = process
        self.port = port
        self.channel = channel
        self.exit_code = 0
        """What the process is expected to end with."""
        self.generation = cast(
            "generation_pb2_grpc.GenerationAsyncStub", generation_pb2_grpc.GenerationStub(channel)
        )
        self.operations = cast(
            "operations_pb2_grpc.OperationsAsyncStub", operations_pb2_grpc.OperationsStub(channel)
        )

    async def status(self) -> operations_pb2.Status:
        """The status of the moment; its accounts have to close."""
        response = await self.operations.GetStatus(operations_pb2.GetStatusRequest())
        status = response.status
        assert status.arrivals == sum(status.outcomes.values()) + status.live_requests
        return status

    def let_time_pass(self, seconds: float) -> None:
        """Move the scheduler's clock on, so that deadlines pass without a wait."""
        clock = self.process.accounts.clock
        self.process.accounts.clock = self.process.driver._clock = lambda: clock() + seconds
        self.process.driver._wake.set()

    async def wait_ready(self, workers: int = 1) -> None:
        """Wait until this many workers are attached."""
        await until(lambda: self.process.fleet.num_ready >= workers)

    async def generate(self, **fields: Any) -> Output:
        """Run one request over its own call and return all of it."""
        output = Output()
        async for event in self.generation.Generate(request(**fields), timeout=WAIT_S):
            output.take(event)
        return output


class Output:
    """What one request has said, by choice."""

    def __init__(self) -> None:
        self.accepted: pb.Accepted | None = None
        self.text: dict[int, str] = {}
        self.token_ids: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[Any]] = {}
        self.finished: dict[int, pb.Finished] = {}
        self.deltas: list[str] = []

    def take(self, event: Any) -> None:
        match event.WhichOneof("event"):
            case "accepted":
                assert self.accepted is None
                self.accepted = event.accepted
            case "delta":
                delta = event.delta
                assert delta.choice not in self.finished
                self.deltas.append(delta.text)
                self.text[delta.choice] = self.text.get(delta.choice, "") + delta.text
                self.token_ids.setdefault(delta.choice, []).extend(delta.token_ids)
                self.logprobs.setdefault(delta.choice, []).extend(delta.logprobs)
            case "finished":
                assert event.finished.choice not in self.finished
                self.finished[event.finished.choice] = event.finished


def request(**fields: Any) -> pb.GenerateRequest:
    """A request, from plain values."""
    return pb.GenerateRequest(**fields)


def error_of(failure: Any) -> common_pb2.Error:
    """The error in the trailers of a call that failed; both of them must say the same."""
    trailers = dict(failure.trailing_metadata())
    error = common_pb2.Error.FromString(trailers["octavo-error-bin"])
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == (error.reason, "octavo")
    assert failure.code().value[0] == status.code == error.code
    assert failure.details() == status.message == error.message
    if error.violations:
        assert status.details[-1].Unpack(bad)
    assert [entry.field for entry in bad.field_violations] == [entry.field for entry in error.violations]
    return error


async def until(condition: Any, what: str = "condition") -> None:
    """Wait until a condition holds, which may be asynchronous."""
    async with asyncio.timeout(WAIT_S):
        while True:
            value = condition()
            if asyncio.iscoroutine(value):
                value = await value
            if value:
                return
            await asyncio.sleep(0.005)


@asynccontextmanager
async def scheduler(*workers: str, **flags: object) -> AsyncIterator[Stack]:
    """Run a scheduler for these workers.

    Unless a test asks for it, nothing is refused for load, nor for having waited: on a slow machine the
    level would rise by itself, and tests that are about something else would find their requests shed.
    """
    given = {
        "listen": "127.0.0.1:0",
        "metrics_port": None,
        "overload_control": False,
        "queue_timeout_standard_s": None,
        "queue_timeout_interactive_s": None,
        "workers": workers,
    }
    settings = SchedulerSettings.load({**given, **flags})
    process = SchedulerProcess(settings)
    listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(process.serve(listening))
    await asyncio.wait({listening, serving}, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        serving.result()
    port = listening.result()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stack = Stack(process, port, channel)
            yield stack
    finally:
        process.stop("test", 0.0)
        async with asyncio.timeout(WAIT_S):
            code = await serving
    assert code == stack.exit_code


@asynccontextmanager
async def one_worker(
    worker_flags: dict[str, Any] | None = None, **flags: object
) -> AsyncIterator[tuple[Stack, Worker]]:
    """Run a scheduler and one worker, attached."""
    worker = await start_worker(**(worker_flags or {}))
    try:
        async with scheduler(worker.address, **flags) as stack:
            await stack.wait_ready()
            yield stack, worker
    finally:
        await worker.stop()
