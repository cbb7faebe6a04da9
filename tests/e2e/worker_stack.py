"""A worker over a real port: real server, engine and pool, simulated steps that the test holds."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2
from octavo.protocol.keys import chain
from octavo.protocol.transport import CLIENT_OPTIONS
from octavo.steptimes import StepTimes
from octavo.v1 import common_pb2, worker_pb2_grpc
from octavo.v1 import worker_pb2 as pb

from tests.e2e.scheduler_stack import WAIT_S, until
from worker_svc.api.convert import describe
from worker_svc.api.door import Door
from worker_svc.api.reservation import Reservation
from worker_svc.api.server import Business, WorkerServer, WorkerService
from worker_svc.api.session import Sessions, Terms
from worker_svc.config import WorkerSettings
from worker_svc.engine.loop import EngineLoop
from worker_svc.metrics import WorkerMetrics
from worker_svc.runner.sim import SimRunner, built_in_model
from worker_svc.start.load import build

NUM_BLOCKS = 64
MAX_MODEL_LEN = 256


class Gate:
    """Stands in for the time that a step takes: none, or until the test lets the step go."""

    def __init__(self) -> None:
        self.held = False
        self.entered = threading.Semaphore(0)
        self._let_go = threading.Semaphore(0)

    def __call__(self, seconds: float) -> None:
        if self.held:
            self.entered.release()
            assert self._let_go.acquire(timeout=WAIT_S)

    async def step_is_running(self) -> None:
        assert await asyncio.to_thread(self.entered.acquire, timeout=WAIT_S)

    def let_go(self, steps: int = 1) -> None:
        self._let_go.release(steps)

    def open(self) -> None:
        self.held = False
        self._let_go.release(100)


class Clock:
    """The worker's clock, which moves when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Worker:
    """A worker in this process, and how to reach it."""

    def __init__(self, address: str, gate: Gate, sessions: Sessions, loop: EngineLoop, clock: Clock) -> None:
        self.address = address
        self.clock = clock
        self.gate = gate
        self.sessions = sessions
        self.loop = loop

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[worker_pb2_grpc.WorkerAsyncStub]:
        async with grpc.aio.insecure_channel(self.address, options=CLIENT_OPTIONS) as channel:
            yield cast("worker_pb2_grpc.WorkerAsyncStub", worker_pb2_grpc.WorkerStub(channel))

    @asynccontextmanager
    async def attach(
        self,
        scheduler_id: str = "one",
        epoch: int = 1,
        window: int = 2,
        *,
        metadata: Any = (),
        **hello: Any,
    ) -> AsyncIterator[Scheduler]:
        async with self.connect() as stub:
            scheduler = Scheduler(stub, metadata)
            try:
                await scheduler.hello(scheduler_id, epoch, window, **hello)
                yield scheduler
            finally:
                scheduler.call.cancel()

    async def vacant(self) -> None:
        """Wait until the worker knows that its scheduler has gone, which the scheduler's end is ahead of."""
        await until(lambda: self.sessions._current is None)

    async def quiet(self) -> tuple[int, int]:
        """Return (live sequences, blocks in use) once the last session's sequences have been dropped."""
        await self.vacant()
        async with self.attach("observer", epoch=1) as observer:
            assert observer.welcome is not None
            return await self.loop.call(lambda engine: engine.num_live), observer.welcome.pool.active


class Scheduler:
    """The other end of the stream."""

    def __init__(self, stub: worker_pb2_grpc.WorkerAsyncStub, metadata: Any = ()) -> None:
        self.stub = stub
        self.call: Any = stub.Attach(metadata=metadata)  # type: ignore[call-arg] # the stubs lag: it is written to instead
        self.welcome: pb.Welcome | None = None
        self.step = 0

    async def hello(self, scheduler_id: str, epoch: int, window: int, **fields: Any) -> None:
        hello = pb.Hello(scheduler_id=scheduler_id, epoch=epoch, protocol_version=1, window=window, **fields)
        await self.send(hello=hello)
        message = await self.read()
        while not message.welcome.last:
            message = await self.read()
        self.welcome = message.welcome

    async def send(self, **message: Any) -> None:
        await self.call.write(pb.SchedulerMessage(**message))

    async def read(self) -> pb.WorkerMessage:
        async with asyncio.timeout(WAIT_S):
            message = await self.call.read()
        if isinstance(message, pb.WorkerMessage):
            return message
        raise EOFError(await self.call.code())

    async def plan(self, **fields: Any) -> None:
        self.step += 1
        await self.send(plan=pb.Plan(**{"step": self.step, **fields}))

    async def report(self) -> pb.Report:
        message = await self.read()
        assert message.WhichOneof("message") == "report"
        return message.report

    async def run(self, **fields: Any) -> pb.Report:
        await self.plan(**fields)
        return await self.report()

    async def refusal(self) -> tuple[grpc.StatusCode, str, dict[str, str]]:
        """Read on until the worker ends the stream, and return code, reason and metadata."""
        async with asyncio.timeout(WAIT_S):
            while isinstance(await _read_or_end(self.call), pb.WorkerMessage):
                pass
            return await refusal_of(self.call)


async def _read_or_end(call: Any) -> object:
    try:
        return await call.read()
    except grpc.aio.AioRpcError:
        return None


async def refusal_of(call: Any) -> tuple[grpc.StatusCode, str, dict[str, str]]:
    details = dict(await call.trailing_metadata() or ())["grpc-status-details-bin"]
    info = error_details_pb2.ErrorInfo()
    assert status_pb2.Status.FromString(details).details[0].Unpack(info)
    return await call.code(), info.reason, dict(info.metadata)


def admit(handle: int, tokens: int = 20, **fields: Any) -> pb.Admit:
    """A sequence whose tokens depend on its handle."""
    token_ids = [3 + (handle + index) % 200 for index in range(tokens)]
    sampling = common_pb2.SamplingParams(seed=handle, temperature=1.0, max_tokens=100)
    message = pb.Admit(handle=handle, token_ids=token_ids, prompt_len=tokens, sampling=sampling)
    message.MergeFrom(pb.Admit(**fields))
    return message


def keys_of(message: pb.Admit) -> bytes:
    return b"".join(chain(b"root", message.token_ids, 16))


@asynccontextmanager
async def running(door: Door | None = None, **flags: object) -> AsyncIterator[Worker]:
    settings = WorkerSettings.load(
        {
            "runner": "sim",
            "num_blocks": NUM_BLOCKS,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": 8,
            "check_integrity": True,
            **flags,
        }
    )
    gate = Gate()
    loop = EngineLoop(lambda: build(settings, SimRunner(built_in_model(), StepTimes.builtin(), sleep=gate)))
    loop.start()
    loaded = await loop.ready
    terms = Terms(
        worker_id="w",
        incarnation="i",
        geometry=loaded.geometry,
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.info.vocab_size,
        limits=loaded.limits,
        simulated=True,
    )
    clock = Clock()
    reservation = Reservation(settings.server.preferred_grace_s, clock)
    silence_s = settings.server.scheduler_silence_s
    sessions = Sessions(
        terms, loop, WorkerMetrics(), loaded.faults, reservation, scheduler_silence_s=silence_s
    )
    service = WorkerService()
    service.open(Business(describe(loaded.info, terms), sessions, loaded.faults))
    server = WorkerServer(service, door)
    port = await server.start("127.0.0.1", 0)
    await server.set_serving(serving=True)
    yield Worker(f"127.0.0.1:{port}", gate, sessions, loop, clock)
    gate.open()
    await server.stop(0)
    assert loop.stop(WAIT_S)
