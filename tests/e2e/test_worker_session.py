"""A worker's session over a real port: real server, engine and pool, simulated steps that the test holds."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from octavo.protocol.keys import chain
from octavo.protocol.transport import CLIENT_OPTIONS, PING_INTERVAL_MS
from octavo.v1 import common_pb2, operations_pb2, worker_pb2_grpc
from octavo.v1 import worker_pb2 as pb

from worker_svc import server as server_module
from worker_svc.config import WorkerSettings
from worker_svc.describe import describe
from worker_svc.load import build
from worker_svc.loop import EngineLoop, StepEngine
from worker_svc.metrics import Metrics
from worker_svc.runner.sim import SimRunner, built_in_model
from worker_svc.runner.steptime import StepTimes
from worker_svc.server import Business, WorkerServer, WorkerService
from worker_svc.session import Session, Sessions, Terms

WAIT_S = 60.0
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


class Worker:
    """A worker in this process, and how to reach it."""

    def __init__(self, address: str, gate: Gate, sessions: Sessions, loop: EngineLoop) -> None:
        self.address = address
        self.gate = gate
        self.sessions = sessions
        self.loop = loop

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[worker_pb2_grpc.WorkerAsyncStub]:
        async with grpc.aio.insecure_channel(self.address, options=CLIENT_OPTIONS) as channel:
            yield cast("worker_pb2_grpc.WorkerAsyncStub", worker_pb2_grpc.WorkerStub(channel))

    @asynccontextmanager
    async def attach(
        self, scheduler_id: str = "one", epoch: int = 1, window: int = 2
    ) -> AsyncIterator[Scheduler]:
        async with self.connect() as stub:
            scheduler = Scheduler(stub)
            try:
                await scheduler.hello(scheduler_id, epoch, window)
                yield scheduler
            finally:
                scheduler.call.cancel()

    async def quiet(self) -> tuple[int, int]:
        """Return (live sequences, blocks in use) once the last session's sequences have been dropped."""
        async with self.attach("observer", epoch=1) as observer:
            assert observer.welcome is not None
            return await self.loop.call(lambda engine: engine.num_live), observer.welcome.pool.active


class Scheduler:
    """The other end of the stream."""

    def __init__(self, stub: worker_pb2_grpc.WorkerAsyncStub) -> None:
        self.stub = stub
        self.call: Any = stub.Attach()  # type: ignore[call-arg] # the stubs lag: it is written to instead
        self.welcome: pb.Welcome | None = None
        self.step = 0

    async def hello(self, scheduler_id: str, epoch: int, window: int) -> None:
        await self.send(
            hello=pb.Hello(scheduler_id=scheduler_id, epoch=epoch, protocol_version=1, window=window)
        )
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
async def running(**flags: object) -> AsyncIterator[Worker]:
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
    loop = EngineLoop(lambda: build(settings, SimRunner(built_in_model(), StepTimes(), sleep=gate)))
    loop.start()
    loaded = await loop.ready
    terms = Terms(
        worker_id="w",
        incarnation="i",
        sizing=loaded.sizing,
        vocab_size=loaded.info.vocab_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        simulated=True,
    )
    sessions = Sessions(terms, loop, Metrics(), loaded.faults)
    service = WorkerService()
    service.open(Business(describe(loaded.info, terms), sessions, loaded.faults))
    server = WorkerServer(service)
    port = await server.start("127.0.0.1", 0)
    await server.set_serving(serving=True)
    yield Worker(f"127.0.0.1:{port}", gate, sessions, loop)
    gate.open()
    await server.stop(0)
    assert loop.stop(WAIT_S)


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    async with running() as worker:
        yield worker


@pytest.fixture
async def faulty_worker() -> AsyncIterator[Worker]:
    async with running(enable_faults=True) as worker:
        yield worker


async def test_describe_has_all_that_a_scheduler_needs(worker: Worker) -> None:
    async with worker.connect() as stub:
        description = await stub.Describe(pb.DescribeRequest())
    assert (description.worker_id, description.incarnation, description.runner) == ("w", "i", "sim")
    assert (description.geometry.num_blocks, description.max_model_len) == (NUM_BLOCKS, MAX_MODEL_LEN)
    assert [file.name for file in description.tokenizer_files] == ["tokenizer.json"]
    assert list(description.eos_token_ids) == [2]


async def test_session_runs_sequences_to_their_end(worker: Worker) -> None:
    async with worker.attach() as scheduler:
        assert scheduler.welcome is not None
        assert scheduler.welcome.pool.free == NUM_BLOCKS
        first = await scheduler.run(
            admit=[admit(1, sampling=common_pb2.SamplingParams(max_tokens=3)), admit(2)],
            prefill_handles=[1, 2],
            prefill_tokens=[512, 5],
        )
        assert (first.status, first.simulated, first.live_count) == (pb.STEP_STATUS_OK, True, 2)
        assert list(first.token_handles) == [1]
        assert list(first.first_positions) == [20]
        second = await scheduler.run(prefill_handles=[2], prefill_tokens=[15])
        assert list(second.token_handles) == [1, 2]
        third = await scheduler.run()
        assert [(end.handle, end.reason) for end in third.finished] == [(1, common_pb2.FINISH_REASON_LENGTH)]
        fourth = await scheduler.run(release=[2])
        assert (list(fourth.released), fourth.live_count, fourth.pool.active) == ([2], 0, 0)


async def test_session_same_seed_yields_the_same_tokens_in_another_session(worker: Worker) -> None:
    tokens = []
    for epoch in (1, 2):
        async with worker.attach(epoch=epoch) as scheduler:
            reports = [await scheduler.run(admit=[admit(5)], prefill_handles=[5], prefill_tokens=[512])]
            reports += [await scheduler.run() for _ in range(5)]
            tokens.append([token for report in reports for token in report.token_ids])
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 6


async def test_session_end_drops_sequences_and_keeps_the_cache(worker: Worker) -> None:
    message = admit(1, tokens=40)
    keys = keys_of(message)
    message.keys = keys
    async with worker.attach() as scheduler:
        await scheduler.run(admit=[message], prefill_handles=[1], prefill_tokens=[512])
    assert await worker.quiet() == (0, 0)
    async with worker.attach("two") as scheduler:
        assert scheduler.welcome is not None
        assert scheduler.welcome.device_keys == keys
        report = await scheduler.run(admit=[message])
        assert report.admitted[0].cached_tokens == 32


async def test_welcome_waits_for_the_running_step_and_for_its_sequences_to_go(worker: Worker) -> None:
    worker.gate.held = True
    async with worker.attach(epoch=1) as former:
        await former.plan(admit=[admit(1)], prefill_handles=[1], prefill_tokens=[512])
        await former.plan()
        await worker.gate.step_is_running()
        async with worker.connect() as stub:
            scheduler = Scheduler(stub)
            welcomed = asyncio.create_task(scheduler.hello("one", 2, 2))
            assert await former.refusal() == (grpc.StatusCode.ABORTED, "SUPERSEDED", {})
            assert not welcomed.done()
            worker.gate.let_go()
            await welcomed
            assert scheduler.welcome is not None
            assert (scheduler.welcome.pool.active, scheduler.welcome.pool.free) == (0, NUM_BLOCKS)
            # The second plan of the former session never ran.
            worker.gate.held = False
            assert (await scheduler.run()).step == 1


async def test_second_scheduler_is_refused_until_the_first_has_gone(worker: Worker) -> None:
    async with worker.attach("one"), worker.connect() as stub:
        second = Scheduler(stub)
        with pytest.raises((grpc.aio.AioRpcError, EOFError)):
            await second.hello("two", 9, 2)
        assert await refusal_of(second.call) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "SCHEDULER_ATTACHED",
            {"scheduler_id": "one"},
        )
    async with worker.attach("two") as scheduler:
        assert (await scheduler.run()).status == pb.STEP_STATUS_OK


@pytest.mark.parametrize("epoch", [4, 5])
async def test_older_stream_of_the_same_scheduler_is_refused(worker: Worker, epoch: int) -> None:
    async with worker.attach(epoch=5) as current, worker.connect() as stub:
        late = Scheduler(stub)
        with pytest.raises((grpc.aio.AioRpcError, EOFError)):
            await late.hello("one", epoch, 2)
        assert (await refusal_of(late.call))[:2] == (grpc.StatusCode.FAILED_PRECONDITION, "STALE_EPOCH")
        assert (await current.run()).status == pb.STEP_STATUS_OK


@pytest.mark.parametrize(
    ("message", "refusal"),
    [
        ({"plan": pb.Plan(step=2)}, (grpc.StatusCode.FAILED_PRECONDITION, "STEP_OUT_OF_ORDER", {})),
        ({"plan": pb.Plan()}, (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE", {"field": "step"})),
        (
            {"plan": pb.Plan(step=1, prefill_handles=[1])},
            (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE", {"field": "prefill_tokens"}),
        ),
        (
            {"pin": pb.Pin(name="p", keys=b"short")},
            (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE", {"field": "pin.keys"}),
        ),
        ({}, (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE", {"field": "message"})),
        (
            {"hello": pb.Hello(scheduler_id="one", epoch=2)},
            (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE", {"field": "message"}),
        ),
    ],
)
async def test_message_against_the_protocol_ends_the_stream_and_nothing_else(
    worker: Worker, message: dict[str, Any], refusal: tuple[grpc.StatusCode, str, dict[str, str]]
) -> None:
    async with worker.attach() as scheduler:
        await scheduler.send(**message)
        assert await scheduler.refusal() == refusal
    assert await worker.quiet() == (0, 0)


async def test_more_plans_than_the_window_end_the_stream(worker: Worker) -> None:
    worker.gate.held = True
    async with worker.attach(window=2) as scheduler:
        await scheduler.plan(admit=[admit(1)], prefill_handles=[1], prefill_tokens=[512])
        await scheduler.plan()
        await scheduler.plan()
        code, reason, _ = await scheduler.refusal()
        assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "WINDOW_EXCEEDED")
    worker.gate.open()
    assert await worker.quiet() == (0, 0)


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (pb.SchedulerMessage(plan=pb.Plan(step=1)), "MALFORMED_MESSAGE"),
        (pb.SchedulerMessage(hello=pb.Hello(epoch=1, protocol_version=1, window=2)), "MALFORMED_MESSAGE"),
        (
            pb.SchedulerMessage(hello=pb.Hello(scheduler_id="s", protocol_version=1, window=0)),
            "MALFORMED_MESSAGE",
        ),
        (
            pb.SchedulerMessage(hello=pb.Hello(scheduler_id="s", protocol_version=99, window=2)),
            "PROTOCOL_VERSION",
        ),
    ],
)
async def test_stream_that_begins_wrongly_is_refused(
    worker: Worker, first: pb.SchedulerMessage, reason: str
) -> None:
    async with worker.connect() as stub:
        scheduler = Scheduler(stub)
        await scheduler.call.write(first)
        assert (await scheduler.refusal())[1] == reason


@pytest.mark.parametrize(
    ("bad", "detail"),
    [
        (pb.Admit(handle=1, token_ids=[5, 10**6], prompt_len=2), "token id 1000000"),
        (pb.Admit(handle=1, token_ids=[5] * MAX_MODEL_LEN, prompt_len=2), "leave no room"),
        (pb.Admit(handle=1, token_ids=[5] * 3_000_000, prompt_len=2), "leave no room"),
        (pb.Admit(handle=1, token_ids=[5] * 16, prompt_len=2, keys=b"k" * 32), "2 keys for 16 tokens"),
        (pb.Admit(handle=1, token_ids=[5], prompt_len=1, adapter="poet"), "no adapter poet"),
        (
            pb.Admit(
                handle=1,
                token_ids=[5],
                prompt_len=1,
                sampling=common_pb2.SamplingParams(logit_bias={10**6: 1.0}),
            ),
            "token id 1000000",
        ),
    ],
)
async def test_sequence_that_cannot_run_is_refused_and_the_others_run(
    worker: Worker, bad: pb.Admit, detail: str
) -> None:
    async with worker.attach() as scheduler:
        report = await scheduler.run(admit=[bad, admit(2)], prefill_handles=[1, 2], prefill_tokens=[512, 512])
        assert [(entry.handle, entry.reason) for entry in report.refused] == [
            (1, pb.REFUSE_REASON_UNSUPPORTED)
        ]
        assert detail in report.refused[0].detail
        assert list(report.token_handles) == [2]


async def test_cancel_overtakes_the_plans_that_wait(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    async with worker.attach() as scheduler:
        await scheduler.run(admit=[admit(1), admit(2)], prefill_handles=[1, 2], prefill_tokens=[512, 512])
        worker.gate.held = True
        await scheduler.plan()
        await worker.gate.step_is_running()
        await scheduler.plan()
        taken = asyncio.Event()
        call = worker.loop.call

        def noted(function: Callable[[StepEngine], object]) -> asyncio.Future[object]:
            taken.set()
            return call(function)

        monkeypatch.setattr(worker.loop, "call", noted)
        await scheduler.send(cancel=pb.Cancel(handles=[1]))
        await taken.wait()
        worker.gate.open()
        assert list((await scheduler.report()).token_handles) == [1, 2]
        after = await scheduler.report()
        assert (list(after.released), list(after.token_handles)) == ([1], [2])


async def test_pinned_prefix_counts_as_pinned(worker: Worker) -> None:
    message = admit(1, tokens=40)
    message.keys = keys_of(message)
    async with worker.attach() as scheduler:
        await scheduler.run(admit=[message], prefill_handles=[1], prefill_tokens=[512])
        await scheduler.send(pin=pb.Pin(name="system", keys=message.keys))
        assert (await scheduler.run(release=[1])).pool.pinned == 2
        await scheduler.send(pin=pb.Pin(name="system"))
        assert (await scheduler.run()).pool.pinned == 0


async def test_drain_turns_new_sequences_away_and_ends_with_the_last_one(worker: Worker) -> None:
    async with worker.attach() as scheduler:
        await scheduler.run(admit=[admit(1)], prefill_handles=[1], prefill_tokens=[512])
        worker.sessions.drain("SIGTERM")
        assert (await scheduler.read()).draining.reason == "SIGTERM"
        report = await scheduler.run(admit=[admit(2)], prefill_handles=[2], prefill_tokens=[512])
        assert [entry.reason for entry in report.refused] == [pb.REFUSE_REASON_DRAINING]
        assert list(report.token_handles) == [1]
        assert not worker.sessions.drained.is_set()
        assert (await scheduler.run(release=[1])).live_count == 0
        with pytest.raises(EOFError) as end:
            await scheduler.read()
        assert end.value.args == (grpc.StatusCode.OK,)
        async with asyncio.timeout(WAIT_S):
            await worker.sessions.drained.wait()
    async with worker.connect() as stub:
        late = Scheduler(stub)
        with pytest.raises((grpc.aio.AioRpcError, EOFError)):
            await late.hello("two", 1, 2)
        assert (await refusal_of(late.call))[:2] == (grpc.StatusCode.UNAVAILABLE, "DRAINING")


async def test_drain_of_an_idle_session_ends_it_at_once(worker: Worker) -> None:
    async with worker.attach() as scheduler:
        worker.sessions.drain("SIGTERM")
        assert (await scheduler.read()).draining.reason == "SIGTERM"
        with pytest.raises(EOFError):
            await scheduler.read()


async def test_faults_are_refused_unless_enabled(worker: Worker) -> None:
    async with worker.connect() as stub:
        call = stub.InjectFaults(pb.InjectFaultsRequest())
        with pytest.raises(grpc.aio.AioRpcError):
            await call
        assert (await refusal_of(call))[:2] == (grpc.StatusCode.FAILED_PRECONDITION, "FAULTS_DISABLED")


async def test_fault_that_is_none_is_refused(faulty_worker: Worker) -> None:
    async with faulty_worker.connect() as stub:
        call = stub.InjectFaults(pb.InjectFaultsRequest(faults=[operations_pb2.Fault()]))
        with pytest.raises(grpc.aio.AioRpcError):
            await call
        assert await refusal_of(call) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "MALFORMED_MESSAGE",
            {"field": "faults.kind"},
        )


async def inject(scheduler: Scheduler, kind: operations_pb2.FaultKind.ValueType) -> None:
    await scheduler.stub.InjectFaults(
        pb.InjectFaultsRequest(faults=[operations_pb2.Fault(kind=kind, count=1)])
    )


async def test_fault_step_error_fails_one_step(faulty_worker: Worker) -> None:
    async with faulty_worker.attach() as scheduler:
        await inject(scheduler, operations_pb2.FAULT_KIND_STEP_ERROR)
        failed = await scheduler.run(admit=[admit(1)], prefill_handles=[1], prefill_tokens=[512])
        assert failed.status == pb.STEP_STATUS_FAILED
        assert (await scheduler.run()).status == pb.STEP_STATUS_SKIPPED
        after = await scheduler.run(prefill_handles=[1], prefill_tokens=[512], resume_after=failed.step)
        assert (after.status, list(after.token_handles)) == (pb.STEP_STATUS_OK, [1])


async def test_fault_stream_drop_ends_the_stream_and_leaks_nothing(faulty_worker: Worker) -> None:
    async with faulty_worker.attach() as scheduler:
        await inject(scheduler, operations_pb2.FAULT_KIND_STREAM_DROP)
        await scheduler.plan(admit=[admit(1)], prefill_handles=[1], prefill_tokens=[512])
        assert await scheduler.refusal() == (grpc.StatusCode.UNAVAILABLE, "STREAM_DROPPED", {})
    assert await faulty_worker.quiet() == (0, 0)


async def test_fault_lost_report_is_the_only_one_missing(faulty_worker: Worker) -> None:
    async with faulty_worker.attach() as scheduler:
        await inject(scheduler, operations_pb2.FAULT_KIND_LOST_REPORT)
        await scheduler.plan()
        assert (await scheduler.run()).step == 2


class FreezingProxy:
    """A network that can go silent without closing anything."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def freeze(self) -> None:
        self._thawed.clear()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        yield "{}:{}".format(*server.sockets[0].getsockname())
        for task in self._tasks:
            task.cancel()
        server.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(self._host, self._port)
        for source, sink in ((reader, there[1]), (there[0], writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                await self._thawed.wait()
                sink.write(data)
        finally:
            sink.close()


async def test_half_open_stream_is_found_and_makes_room_for_another(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = asyncio.Event()
    close = worker.sessions.close

    def noted(session: Session) -> None:
        close(session)
        closed.set()

    monkeypatch.setattr(worker.sessions, "close", noted)
    proxy = FreezingProxy(worker.address)
    async with proxy.listening() as address:
        silent = Worker(address, worker.gate, worker.sessions, worker.loop)
        async with silent.attach() as scheduler:
            await scheduler.run(admit=[admit(1)], prefill_handles=[1], prefill_tokens=[512])
            proxy.freeze()
            async with asyncio.timeout(WAIT_S):
                await closed.wait()
            assert await worker.quiet() == (0, 0)
            with pytest.raises((grpc.aio.AioRpcError, EOFError)):
                await scheduler.read()


async def test_idle_stream_outlives_many_pings(worker: Worker) -> None:
    async with worker.attach() as scheduler:
        report = asyncio.create_task(scheduler.report())
        done, _ = await asyncio.wait({report}, timeout=6 * PING_INTERVAL_MS / 1000)
        assert not done
        await scheduler.plan()
        assert (await report).status == pb.STEP_STATUS_OK


async def test_reflection_lists_what_is_served(worker: Worker) -> None:
    async with grpc.aio.insecure_channel(worker.address) as channel:
        call: Any = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        answer = await call.read()
    assert {service.name for service in answer.list_services_response.service} == {
        "octavo.v1.Worker",
        "grpc.health.v1.Health",
        "grpc.channelz.v1.Channelz",
        "grpc.reflection.v1alpha.ServerReflection",
    }


async def test_channelz_knows_the_server(worker: Worker) -> None:
    async with grpc.aio.insecure_channel(worker.address) as channel:
        call: Any = channelz_pb2_grpc.ChannelzStub(channel).GetServers(channelz_pb2.GetServersRequest())
        answer = await call
    assert len(answer.server) >= 1


async def test_describe_of_a_worker_that_loads_is_answered_once_it_has() -> None:
    service = WorkerService()
    server = WorkerServer(service)
    port = await server.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        call: Any = worker_pb2_grpc.WorkerStub(channel).Describe(pb.DescribeRequest())
        await health.Check(health_pb2.HealthCheckRequest())
        assert not call.done()
        service.open(Business(pb.WorkerDescription(worker_id="w"), sessions=None, faults=None))  # type: ignore[arg-type]
        assert (await call).worker_id == "w"
    await server.stop(0)


async def test_worker_that_ends_while_it_loads_lets_nobody_wait() -> None:
    service = WorkerService()
    server = WorkerServer(service)
    port = await server.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: Any = worker_pb2_grpc.WorkerStub(channel).Describe(pb.DescribeRequest())
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        service.close()
        with pytest.raises(grpc.aio.AioRpcError):
            await call
        assert (await refusal_of(call))[:2] == (grpc.StatusCode.UNAVAILABLE, "LOADING")
    await server.stop(0)


async def test_worker_that_loads_answers_unavailable_and_not_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "LOADING_WAIT_S", 0.0)
    server = WorkerServer(WorkerService())
    port = await server.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service="octavo.v1.Worker"))
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        call: Any = worker_pb2_grpc.WorkerStub(channel).Describe(pb.DescribeRequest())
        with pytest.raises(grpc.aio.AioRpcError):
            await call
        assert (await refusal_of(call))[:2] == (grpc.StatusCode.UNAVAILABLE, "LOADING")
    await server.stop(0)
