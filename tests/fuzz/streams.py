"""Readers with a state: the scheduler's of a worker, the worker's of a scheduler, the SDK's of a scheduler.

Each plays honest sessions with its peer, a message of which is harmed now and then, and has a neighbour whose
output must be what it always is.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Self

from google.protobuf.message import DecodeError
from octavo._sdk.call import Call
from octavo._sdk.channel import Endpoints
from octavo._sdk.session import Patience, SessionStream, Transport
from octavo.protocol.convert import (
    ProtocolError,
    keys_to_proto,
    report_from_proto,
    report_to_proto,
)
from octavo.protocol.keys import chain
from octavo.protocol.steps import Plan, Report
from octavo.sampling import SamplingParams
from octavo.steptimes import StepTimes
from octavo.v1 import common_pb2, worker_pb2
from octavo.v1 import generation_pb2 as pb
from octavo_lab.sim import SimWorker, SimWorkerConfig
from octavo_lab.sim.audit import check_core
from octavo_lab.sim.worker import PlanFaultError

from scheduler_svc.core import CoreConfig, NewRequest, SchedulerCore
from scheduler_svc.core.effects import (
    DetachWorker,
    Effect,
    EmitTokens,
    FinishChoice,
    Reject,
    SendCancel,
    SendPlan,
)
from tests.e2e.worker_stack import admit, keys_of
from tests.fuzz.mutations import harmed
from tests.fuzz.reader import Fault, Reader
from worker_svc.api.session import SchedulerSession, Terms
from worker_svc.api.status import Refusal
from worker_svc.config import WorkerSettings
from worker_svc.engine.faults import Faults
from worker_svc.metrics import WorkerMetrics
from worker_svc.runner.sim import SimRunner, built_in_model
from worker_svc.start.load import build

BLOCK: Final = 16
_HARMED: Final = 0.4
_AUDIT_EVERY: Final = 16


class SchedulerReads(Reader):
    """The scheduler's core, with a worker that lies and one that does not, each for a model of its own."""

    name = "worker_messages"

    def __init__(self) -> None:
        super().__init__()
        self._seeds: deque[bytes] = deque([b"\0"], maxlen=200)
        self._audits = 0

    def episode(self, rng: random.Random) -> None:
        self._core = SchedulerCore(CoreConfig(step_watchdog_s=2.0))
        self._now = 0.0
        self._plans: dict[str, deque[Plan]] = {}
        self._workers: dict[str, SimWorker] = {}
        self._tokens: dict[str, list[int]] = {}
        self._ended: set[str] = set()
        for model in ("liar", "honest"):
            self._attach(model)
        for number in range(5):
            self._submit("liar", f"l{number}", rng.randint(1, 3), rng.randint(5, 90))
        self._submit("honest", "neighbour", 1, 40)
        for _ in range(40):
            self._step("honest", lambda report: report)
            self._step("liar", lambda report: self._harm(rng, report))
            if "liar" not in self._workers and rng.random() < 0.7:
                self._attach("liar")
            if rng.random() < 0.2:
                self._now += 0.01
                self._do(self._core.tick(self._now))
        self._end()

    def _end(self) -> None:
        for number in range(5):
            self._do(self._core.cancel(f"l{number}", self._now))
        everybody = {*(f"l{number}" for number in range(5)), "neighbour"}
        for _ in range(200):
            if self._ended == everybody and not any(self._plans.values()):
                break
            self._step("honest", lambda report: report)
            self._step("liar", lambda report: report)
            self._now += 0.01
            self._do(self._core.tick(self._now))
        check_core(self._core)
        if self._ended != everybody:
            raise Fault(f"only {sorted(self._ended)} have ended")
        said = tuple(self._tokens["neighbour"])
        self.expected = getattr(self, "expected", said)
        if said != self.expected or len(said) != 30:
            raise Fault(f"the neighbour got {said} instead of {self.expected}")

    def _attach(self, model: str) -> None:
        config = SimWorkerConfig(
            worker_id=model, step_times=StepTimes.builtin(), model=model, num_blocks=32,
            max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256,
        )  # fmt: skip
        self._workers[model] = SimWorker(config)
        self._plans[model] = deque()
        self._do(self._core.worker_up(self._workers[model].welcome(), self._now))

    def _submit(self, model: str, name: str, n: int, prompt: int) -> None:
        tokens = [7 * len(name) + at for at in range(prompt)]
        spec = NewRequest(
            request_id=name, model=model, prompt_token_ids=tokens, root_key=bytes(16),
            sampling=SamplingParams(n=n, seed=prompt, max_tokens=30, ignore_eos=True),
            prompt_keys=tuple(chain(bytes(16), tokens, BLOCK)),
        )  # fmt: skip
        self._do(self._core.submit(spec, self._now))

    def _step(self, worker_id: str, change: Callable[[Report], Report]) -> None:
        """Let a worker answer its oldest plan; one that cannot be understood is lost."""
        if worker_id not in self._workers or not self._plans[worker_id]:
            return
        self._now += 0.001
        try:
            report = change(self._workers[worker_id].run(self._plans[worker_id].popleft()))
        except (DecodeError, ProtocolError, EOFError, PlanFaultError):
            # A plan that rests on a lie may be none; the liar then ends its session, as a worker does.
            if worker_id == "honest":
                raise
            self._lose(worker_id)
            self._do(self._core.worker_down(worker_id, self._now))
            return
        self._do(self._core.report(worker_id, report, self._now))

    def _harm(self, rng: random.Random, report: Report) -> Report:
        data = worker_pb2.WorkerMessage(report=report_to_proto(report)).SerializeToString()
        self._seeds.append(data)
        if rng.random() > _HARMED:
            return report
        data = harmed(rng, data, list(self._seeds), message=True)
        self.read.append(data)
        message = worker_pb2.WorkerMessage.FromString(data)
        if message.WhichOneof("message") != "report":
            raise EOFError
        return report_from_proto(message.report)

    def _lose(self, worker_id: str) -> None:
        self._workers.pop(worker_id, None)
        self._plans[worker_id].clear()

    def _do(self, effects: list[Effect]) -> None:
        self._audits += 1
        if self._audits % _AUDIT_EVERY == 0:
            check_core(self._core)
        for effect in effects:
            match effect:
                case SendPlan():
                    self._plans[effect.worker_id].append(effect.plan)
                case SendCancel() if effect.worker_id in self._workers:
                    self._workers[effect.worker_id].cancel(effect.handles)
                case DetachWorker():
                    self._lose(effect.worker_id)
                case EmitTokens():
                    for delta in effect.deltas:
                        self._tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
                case FinishChoice() if self._core.find(effect.request_id) is None:
                    self._ended.add(effect.request_id)
                case Reject():
                    self._ended.add(effect.request_id)


class _AtOnce:
    """An engine loop without a thread: plans run when they are submitted."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def submit(self, plan: Plan, deliver: Callable[[Report], None]) -> None:
        deliver(self.engine.run_step(plan, lambda: 0.0))
        self.engine.check_integrity()

    def call(self, function: Callable[[Any], Any]) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        future.set_result(function(self.engine))
        return future

    def discard_plans(self) -> None:
        """There are none."""


class WorkerReads(Reader):
    """A worker's session over a real engine and pool."""

    name = "scheduler_messages"

    def __enter__(self) -> Self:
        flags = {
            "runner": "sim",
            "num_blocks": 64,
            "max_model_len": 256,
            "max_num_seqs": 8,
            "num_host_blocks": 8,
        }
        settings = WorkerSettings.load({**flags, "check_integrity": True})
        loaded = build(settings, SimRunner(built_in_model(), StepTimes.builtin(), sleep=lambda _: None))
        self._engine = loaded.engine
        self._terms = Terms(
            "w",
            "i",
            loaded.geometry,
            loaded.max_model_len,
            loaded.info.vocab_size,
            loaded.limits,
            simulated=True,
        )
        self._metrics = WorkerMetrics()
        self._runner = asyncio.Runner()
        self._seeds: deque[bytes] = deque([b"\0"], maxlen=200)
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.close()

    def episode(self, rng: random.Random) -> None:
        self._runner.run(self._session(rng))

    async def _session(self, rng: random.Random) -> None:
        hello = worker_pb2.Hello(scheduler_id="s", epoch=1, protocol_version=1, window=4)
        session = SchedulerSession(hello, self._terms, _AtOnce(self._engine), self._metrics, Faults())  # type: ignore[arg-type]
        messages = self._messages(rng)

        class Stream:
            async def read(self) -> Any:
                return next(messages, None)

        try:
            await session._read(Stream())  # type: ignore[arg-type]
        except Refusal as refusal:
            if refusal.code.name in ("INTERNAL", "UNKNOWN"):
                raise Fault(f"{refusal}") from refusal
        session.close()
        # A block whose copy from the host is under way is held until the copy has ended.
        self._engine.run_step(Plan(1), lambda: 0.0)
        self._engine.drop_all()
        self._engine.check_integrity()
        pool = self._engine.pool_report()
        if self._engine.num_live or pool.active:
            raise Fault(f"{self._engine.num_live} sequences and {pool.active} blocks are left")

    def _messages(self, rng: random.Random) -> Any:
        """Yield what a scheduler might say."""
        live: list[int] = []
        for step in range(1, 30):
            plan = worker_pb2.Plan(step=step)
            for handle in range(step * 10, step * 10 + rng.randint(0, 2)):
                one = admit(handle, rng.randint(1, 80), choice=rng.randint(0, 3))
                one.keys = keys_of(one)
                plan.admit.append(one)
                plan.prefill_handles.append(handle)
                plan.prefill_tokens.append(rng.choice((1, 16, 512)))
                live.append(handle)
            if live and rng.random() < 0.4:
                plan.release.append(live.pop(rng.randrange(len(live))))
            if live and rng.random() < 0.3:
                plan.skip.append(rng.choice(live))
                plan.seal.add(handle=rng.choice(live), block_index=rng.randint(0, 3), key=rng.randbytes(16))
            message = worker_pb2.SchedulerMessage(plan=plan)
            if live and rng.random() < 0.1:
                message = worker_pb2.SchedulerMessage(cancel=worker_pb2.Cancel(handles=[live.pop()]))
            elif rng.random() < 0.1:
                keys = keys_to_proto([rng.randbytes(16) for _ in range(3)])
                message = worker_pb2.SchedulerMessage(pin=worker_pb2.Pin(name="p", keys=keys))
            data = message.SerializeToString()
            self._seeds.append(data)
            if rng.random() < _HARMED:
                data = harmed(rng, data, list(self._seeds), message=True)
                self.read.append(data)
            yield data


class SdkReads(Reader):
    """The SDK's transport, with a request whose events are harmed and one whose are not, on one stream."""

    name = "session_events"

    def __enter__(self) -> Self:
        self._runner = asyncio.Runner()
        self._seeds: deque[bytes] = deque([b"\0"], maxlen=200)
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.close()

    def episode(self, rng: random.Random) -> None:
        self._runner.run(self._session(rng))

    async def _session(self, rng: random.Random) -> None:
        transport = Transport(Endpoints(["127.0.0.1:1"]), Patience(1, 1))
        stream = _stream()
        transport._stream = stream
        asked: dict[str, Call] = {}
        for name, n in (("a", 2), ("b", 1), ("the-neighbour-of-both", 2)):
            request = pb.GenerateRequest(request_id=name, text="x")
            request.sampling.n = n
            asked[name] = Call(request, lambda: None, live=True)
            transport.submit(asked[name])
        for events in _events(("a", "b", "the-neighbour-of-both")):
            for event in events:
                message = pb.SessionEvent(events=[event])
                data = message.SerializeToString()
                self._seeds.append(data)
                if event.request_id in ("a", "b") and rng.random() < _HARMED:
                    own = [one for one in self._seeds if b"neighbour" not in one]
                    data = harmed(rng, data, own, message=True)
                    self.read.append(data)
                    try:
                        message = pb.SessionEvent.FromString(data)
                    except DecodeError:
                        continue
                transport._on_message(stream, message)
                if transport._stream is None:
                    # It refused a request that another scheduler may take: the others stay on it.
                    transport._stream = stream
                    transport._retiring.discard(stream)
            if rng.random() < 0.1:
                transport.cancel(asked["a"])
        result = asked["the-neighbour-of-both"].result()
        if [one.text for one in result.choices] != ["w0w1w2w3"] * 2:
            raise Fault(f"the neighbour got {result}")
        for name in ("a", "b"):
            transport.cancel(asked[name])
            asked[name].take_progress()
            if not asked[name].done:
                raise Fault(f"{name} has no end")


def _stream() -> SessionStream:
    """Return a stream without a call under it."""
    stream = SessionStream.__new__(SessionStream)
    stream.calls, stream.leaving, stream.credits = {}, {}, 0
    stream.opened_at = stream.heard_at = asyncio.get_running_loop().time()
    stream._outbox, stream._filled = deque(), asyncio.Event()
    return stream


def _events(names: tuple[str, ...]) -> list[list[pb.RequestEvent]]:
    """Return a recorded session, by step."""
    steps: list[list[pb.RequestEvent]] = [
        [pb.RequestEvent(request_id=name, accepted=pb.Accepted(request_id=name, seed=5)) for name in names]
    ]
    choices = [(name, choice) for name in names for choice in range(1 if name == "b" else 2)]
    for step in range(4):
        logprobs = [common_pb2.TokenLogprobs(token_id=step, logprob=-1, top_token_ids=[1], top_logprobs=[-1])]
        steps.append(
            [
                pb.RequestEvent(
                    request_id=name,
                    delta=pb.Delta(choice=choice, text=f"w{step}", token_ids=[step], logprobs=logprobs),
                )
                for name, choice in choices
            ]
        )
    usage = common_pb2.Usage(prompt_tokens=3, completion_tokens=4)
    for name, choice in choices:
        finished = pb.Finished(choice=choice, reason=common_pb2.FINISH_REASON_LENGTH, usage=usage, seed=5)
        steps.append([pb.RequestEvent(request_id=name, finished=finished)])
    return steps


def stream_readers() -> list[Reader]:
    """Return one of each."""
    return [SchedulerReads(), WorkerReads(), SdkReads()]
