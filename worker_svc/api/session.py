"""One scheduler at a time: its session, from Hello to the end of its stream."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import grpc
import grpc.aio
import structlog
from octavo.protocol.convert import (
    ProtocolError,
    geometry_to_proto,
    keys_from_proto,
    keys_to_proto,
    plan_from_proto,
    pool_to_proto,
    report_to_proto,
)
from octavo.protocol.later import refuse_unknown, unknown_fields
from octavo.protocol.steps import (
    PROTOCOL_VERSION,
    Admit,
    Geometry,
    Plan,
    PoolReport,
    Refused,
    RefuseReason,
    Report,
)
from octavo.v1 import worker_pb2

from worker_svc.api.messages import scheduler_message
from worker_svc.api.reservation import Reservation
from worker_svc.api.status import Refusal, malformed
from worker_svc.engine.audit import Audit, audit
from worker_svc.engine.faults import FaultKind, Faults
from worker_svc.engine.limits import Limits
from worker_svc.engine.loop import EngineLoop, StepEngine
from worker_svc.metrics import WorkerMetrics

KEYS_PER_MESSAGE_BYTES: Final = 2**20
MAX_WINDOW: Final = 64
HELLO_TIMEOUT_S: Final = 10.0
MAX_ENDPOINT: Final = 256
_FEWEST_UNANSWERED: Final = 4
"""A scheduler is not called silent because this process had no time to read what it said."""

Stream = grpc.aio.ServicerContext[bytes, worker_pb2.WorkerMessage]
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Terms:
    """What a session holds its scheduler to, and says in Welcome."""

    worker_id: str
    incarnation: str
    geometry: Geometry
    max_model_len: int
    vocab_size: int
    limits: Limits
    adapters: tuple[str, ...] = ()
    structured_output: bool = False
    """Whether it can hold output to a constraint."""
    simulated: bool = False
    num_devices: int = 1
    """GPUs that compute together; 1 where there is none."""

    def problem_of(self, admit: Admit) -> str | None:
        """Return why this worker can never run a sequence, or None."""
        num_tokens = len(admit.token_ids)
        if num_tokens >= self.max_model_len:
            return f"{num_tokens} tokens leave no room in {self.max_model_len}"
        highest = max((*admit.sampling.logit_bias, max(admit.token_ids)))
        if highest >= self.vocab_size:
            return f"token id {highest} is beyond the vocabulary of {self.vocab_size}"
        if len(admit.keys) > num_tokens // self.geometry.block_size:
            return f"{len(admit.keys)} keys for {num_tokens} tokens"
        if admit.adapter is not None and admit.adapter not in self.adapters:
            return f"no adapter {admit.adapter}"
        return None


@dataclass(frozen=True, slots=True)
class Cache:
    """The books of the cache when a session starts."""

    device_keys: bytes
    host_keys: bytes
    pool: PoolReport


class SchedulerSession:
    """One scheduler's stream: checks what comes in, keeps the order of what goes out."""

    def __init__(
        self, hello: worker_pb2.Hello, terms: Terms, loop: EngineLoop, metrics: WorkerMetrics, faults: Faults
    ) -> None:
        self.scheduler_id = hello.scheduler_id
        self.epoch = hello.epoch
        self.rank = hello.rank
        self.endpoint = hello.endpoint
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the session must end from this side; may hold a Refusal."""
        self.num_live = 0
        self.outstanding = 0
        """Plans that wait for their reports."""
        self.left = False
        """The scheduler has ended it on purpose."""
        self._answers = False
        """It says that it is alive when it is told of a standby; older ones do not."""
        self._unanswered = 0
        self._silent_since = math.inf
        """When it was told of a standby and said nothing since; nothing at all, plans neither."""
        self._window = hello.window
        self._terms = terms
        self._loop = loop
        self._metrics = metrics
        self._faults = faults
        self._next_step = 1
        self._draining = False
        self._closed = False
        self._unknown_noted = False
        self._turned_away: dict[int, tuple[Refused, ...]] = {}
        # As many reports as plans may be outstanding, and one Draining.
        self._outbox: asyncio.Queue[worker_pb2.WorkerMessage | None] = asyncio.Queue()

    async def run(self, stream: Stream) -> None:
        """Serve the stream until it ends.

        Raises:
            Refusal: the scheduler broke the protocol, or another stream has taken over.
        """
        cache = await self._loop.call(_read_cache)
        for welcome in welcomes(self._terms, cache):
            await stream.write(worker_pb2.WorkerMessage(welcome=welcome))
        log.info(
            "session_started",
            scheduler_id=self.scheduler_id,
            rank=self.rank,
            epoch=self.epoch,
            window=self._window,
        )
        reader = asyncio.create_task(self._read(stream))
        writer = asyncio.create_task(self._write(stream))
        try:
            done, _ = await asyncio.wait({reader, writer, self.ended}, return_when=asyncio.FIRST_COMPLETED)
            for outcome in done:
                outcome.result()
        finally:
            reader.cancel()
            writer.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)

    def supersede(self, hello: worker_pb2.Hello) -> None:
        """End this session: a newer stream of the same scheduler has come, or a preferred scheduler."""
        aborted = grpc.StatusCode.ABORTED
        if hello.scheduler_id == self.scheduler_id:
            self._end(Refusal(aborted, "SUPERSEDED", "a newer stream of this scheduler has taken over"))
            return
        message = f"scheduler {hello.scheduler_id} of rank {hello.rank} has taken over"
        refusal = Refusal(
            aborted, "TAKEN_OVER", message, scheduler_id=hello.scheduler_id, endpoint=hello.endpoint
        )
        self._end(refusal)

    def drop(self) -> None:
        """End this session without a reason, as a broken connection would."""
        message = "the stream was dropped by an injected fault"
        self._end(Refusal(grpc.StatusCode.UNAVAILABLE, "STREAM_DROPPED", message))

    def _end(self, refusal: Refusal) -> None:
        if not self.ended.done():
            self.ended.set_exception(refusal)

    def silent_s(self, now: float) -> float:
        """Return for how long it has owed an answer; 0 where that may be the fault of this process."""
        return now - self._silent_since if self._answers and self._unanswered >= _FEWEST_UNANSWERED else 0.0

    def standby(self, hello: worker_pb2.Hello, now: float) -> None:
        """Tell the scheduler who would take the worker at once. It answers, if it runs."""
        self._unanswered += 1
        self._silent_since = min(self._silent_since, now)
        standby = worker_pb2.Standby(
            scheduler_id=hello.scheduler_id, rank=hello.rank, endpoint=hello.endpoint
        )
        self._outbox.put_nowait(worker_pb2.WorkerMessage(standby=standby))

    def drain(self, reason: str) -> None:
        """Tell the scheduler to send no more; the session ends when its sequences are gone."""
        self._draining = True
        self._outbox.put_nowait(worker_pb2.WorkerMessage(draining=worker_pb2.Draining(reason=reason)))
        self._end_when_drained()

    def close(self) -> None:
        """Drop what this session left behind, at the next step boundary."""
        self._closed = True
        self._loop.discard_plans()
        dropped = self._loop.call(_drop_all)
        dropped.add_done_callback(lambda done: self._metrics.observe_dropped(done.result()))
        if self.ended.done() and not self.ended.cancelled():
            self.ended.exception()  # seen, even when the stream had broken before

    async def _read(self, stream: Stream) -> None:
        while True:
            raw = await stream.read()
            if self._closed or not isinstance(raw, bytes):  # or end of stream
                return
            message = scheduler_message(raw)
            kind = message.WhichOneof("message")
            self._unanswered, self._silent_since = 0, math.inf
            try:
                if kind == "plan":
                    refused = refuse_unknown(message.plan)
                    self._note_unknown(message.plan)
                    self._on_plan(plan_from_proto(message.plan), refused)
                elif kind == "cancel":
                    self._loop.call(partial(_cancel, handles=tuple(message.cancel.handles)))
                elif kind == "pin":
                    self._on_pin(message.pin.name, keys_from_proto(message.pin.keys, "pin.keys"))
                elif kind == "alive":
                    self._answers = True
                elif kind == "leave":
                    self.left = True
                    return
                elif kind is None and unknown_fields(message):
                    self._note_unknown(message)
                else:
                    raise ProtocolError("message", f"{kind or 'nothing'} is not expected here")
            except ProtocolError as error:
                raise malformed(error, kind or "message") from None

    async def _write(self, stream: Stream) -> None:
        while (message := await self._outbox.get()) is not None:
            await stream.write(message)

    def _note_unknown(self, message: worker_pb2.SchedulerMessage | worker_pb2.Plan) -> None:
        """Say once in a session that the scheduler asks for what only a later version knows."""
        if not self._unknown_noted and (numbers := unknown_fields(message)):
            self._unknown_noted = True
            log.warning("unknown_fields_ignored", message=message.DESCRIPTOR.name, fields=numbers)

    def _on_plan(self, plan: Plan, unknown: tuple[Refused, ...]) -> None:
        if plan.step != self._next_step:
            message = f"plan of step {plan.step} came when step {self._next_step} was due"
            raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, "STEP_OUT_OF_ORDER", message)
        if self.outstanding >= self._window:
            message = f"plan of step {plan.step} exceeds the window of {self._window}"
            raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, "WINDOW_EXCEEDED", message)
        self._next_step += 1
        self.outstanding += 1
        turned_away = {refused.handle: refused for refused in unknown}
        for admit in plan.admit:
            if (refused := self._turn_away(admit)) is not None:
                turned_away[admit.handle] = refused
        if turned_away:
            self._turned_away[plan.step] = tuple(turned_away.values())
            rest = tuple([admit for admit in plan.admit if admit.handle not in turned_away])
            plan = replace(plan, admit=rest)
        self._loop.submit(plan, self._on_report)

    def _turn_away(self, admit: Admit) -> Refused | None:
        """Return why the engine must not see a sequence: what is wrong with one harms no other."""
        if self._draining:
            return Refused(admit.handle, RefuseReason.DRAINING)
        problem = self._terms.problem_of(admit)
        return None if problem is None else Refused(admit.handle, RefuseReason.UNSUPPORTED, problem)

    def _on_pin(self, name: str, keys: tuple[bytes, ...]) -> None:
        self._loop.call(partial(_pin, name=name, keys=keys))

    def _on_report(self, report: Report) -> None:
        if turned_away := self._turned_away.pop(report.step, ()):
            report = replace(report, refused=report.refused + turned_away)
        if self._terms.simulated:
            report = replace(report, simulated=True)
        self._metrics.observe(report)
        if self._closed or self._faults.draw(FaultKind.LOST_REPORT):
            return
        if self._faults.draw(FaultKind.STREAM_DROP):
            self.drop()
            return
        self.outstanding -= 1
        self.num_live = report.live_count
        self._outbox.put_nowait(worker_pb2.WorkerMessage(report=report_to_proto(report)))
        self._end_when_drained()

    def _end_when_drained(self) -> None:
        if self._draining and not self.num_live and not self.outstanding:
            self._outbox.put_nowait(None)


class Sessions:
    """Holds the one session there may be, and decides who gets it."""

    def __init__(
        self,
        terms: Terms,
        loop: EngineLoop,
        metrics: WorkerMetrics,
        faults: Faults | None = None,
        reservation: Reservation | None = None,
        scheduler_silence_s: float = math.inf,
    ) -> None:
        self._terms = terms
        self._loop = loop
        self._metrics = metrics
        self._faults = Faults() if faults is None else faults
        self._reservation = reservation or Reservation()
        self._scheduler_silence_s = scheduler_silence_s
        self._current: SchedulerSession | None = None
        self._draining = False
        self.drained = asyncio.Event()
        """Set once draining and without a session."""

    @property
    def num_live(self) -> int:
        """Sequences that live."""
        return self._current.num_live if self._current else 0

    def open(self, hello: worker_pb2.Hello) -> SchedulerSession:
        """Begin a session; the sequences of the one before are gone before its Welcome is sent.

        Raises:
            Refusal: somebody no worse is attached or expected back, the stream is an old one, or the
                worker drains.
        """
        precondition = grpc.StatusCode.FAILED_PRECONDITION
        if hello.protocol_version != PROTOCOL_VERSION:
            message = f"this worker speaks version {PROTOCOL_VERSION}, not {hello.protocol_version}"
            raise Refusal(precondition, "PROTOCOL_VERSION", message)
        if not hello.scheduler_id or not 1 <= hello.window <= MAX_WINDOW:
            message = f"hello: scheduler_id must be set and window in [1, {MAX_WINDOW}]"
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE", message)
        if len(hello.endpoint) > MAX_ENDPOINT:
            message = f"hello: endpoint must have at most {MAX_ENDPOINT} characters"
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE", message)
        if self._draining:
            raise Refusal(grpc.StatusCode.UNAVAILABLE, "DRAINING", "the worker is draining")
        former = self._current
        if former is None:
            self._check_reservation(hello)
        else:
            self._check_precedence(hello, former)
            former.supersede(hello)
            self.close(former)
        self._current = SchedulerSession(hello, self._terms, self._loop, self._metrics, self._faults)
        self._metrics.set_attached(True)
        return self._current

    def _check_reservation(self, hello: worker_pb2.Hello) -> None:
        """Raise Refusal when a preferred scheduler is expected to come."""
        left_s = self._reservation.left_s(hello.rank)
        if left_s > 0:
            raise Refusal(
                grpc.StatusCode.FAILED_PRECONDITION,
                "RESERVED",
                f"for {left_s:.3f} s more this worker is kept for a scheduler that is preferred",
                retry_after_s=left_s,
                incarnation=self._terms.incarnation,
            )

    def _check_precedence(self, hello: worker_pb2.Hello, former: SchedulerSession) -> None:
        """Raise Refusal when a scheduler may not take the worker from the one that has it."""
        precondition = grpc.StatusCode.FAILED_PRECONDITION
        if former.scheduler_id == hello.scheduler_id:
            if hello.epoch <= former.epoch:
                message = f"epoch {hello.epoch} is not above {former.epoch}, which is attached"
                raise Refusal(precondition, "STALE_EPOCH", message)
        elif hello.rank >= former.rank:
            now = self._reservation.clock()
            silent_s = former.silent_s(now)
            if silent_s >= self._scheduler_silence_s:
                log.warning("scheduler_silent", scheduler_id=former.scheduler_id, silent_s=round(silent_s, 1))
                return
            former.standby(hello, now)
            raise Refusal(
                precondition,
                "SCHEDULER_ATTACHED",
                f"scheduler {former.scheduler_id} of rank {former.rank} is attached",
                scheduler_id=former.scheduler_id,
                endpoint=former.endpoint,
                incarnation=self._terms.incarnation,
            )

    def close(self, session: SchedulerSession) -> None:
        """End a session; harmless when it has been superseded."""
        if session is not self._current:
            return
        self._current = None
        self._metrics.set_attached(False)
        session.close()
        if session.left:
            self._reservation.end()
        else:
            self._reservation.renew(session.rank)
        log.info("session_ended", scheduler_id=session.scheduler_id, epoch=session.epoch)
        if self._draining:
            self.drained.set()

    async def audit(self) -> Audit:
        """Verify the engine's books at the next step boundary."""
        found = await self._loop.call(audit)
        if found.violation is not None:
            log.error("audit_failed", worker_id=self._terms.worker_id, violation=found.violation)
        return found

    def drain(self, reason: str) -> None:
        """Take nothing new; `drained` is set when what runs is gone."""
        self._draining = True
        if self._current is None:
            self.drained.set()
        else:
            self._current.drain(reason)


def welcomes(terms: Terms, cache: Cache) -> Iterator[worker_pb2.Welcome]:
    """Yield the Welcome, in as many messages as the keys take."""
    size = KEYS_PER_MESSAGE_BYTES
    chunks = max(1, -(-len(cache.device_keys) // size), -(-len(cache.host_keys) // size))
    for index in range(chunks):
        part = slice(index * size, (index + 1) * size)
        yield worker_pb2.Welcome(
            worker_id=terms.worker_id,
            incarnation=terms.incarnation,
            geometry=geometry_to_proto(terms.geometry),
            max_num_seqs=terms.limits.max_num_seqs,
            max_num_batched_tokens=terms.limits.max_num_batched_tokens,
            device_keys=cache.device_keys[part],
            host_keys=cache.host_keys[part],
            last=index == chunks - 1,
            pool=pool_to_proto(cache.pool),
        )


def _read_cache(engine: StepEngine) -> Cache:
    device_keys, host_keys = engine.take_cached_keys()
    return Cache(keys_to_proto(device_keys), keys_to_proto(host_keys), engine.pool_report())


def _cancel(engine: StepEngine, handles: tuple[int, ...]) -> None:
    engine.cancel(handles)


def _pin(engine: StepEngine, name: str, keys: tuple[bytes, ...]) -> None:
    if not keys:
        log.info("prefix_unpinned", name=name, freed_blocks=engine.unpin(name))
        return
    outcome = engine.pin(name, keys)
    event = "prefix_pinned" if outcome.accepted else "pin_refused"
    log.info(event, name=name, wanted_blocks=outcome.wanted_blocks, held_blocks=outcome.held_blocks)


def _drop_all(engine: StepEngine) -> PoolReport:
    engine.drop_all()
    return engine.pool_report()
