"""The link to one worker: find it, attach, pass plans down and reports up, and never give up."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, cast

import grpc
import structlog
from octavo.protocol.convert import (
    ProtocolError,
    admit_to_proto,
    geometry_from_proto,
    keys_from_proto,
    keys_to_proto,
    leaders_of,
    plan_to_proto,
    pool_from_proto,
    report_from_proto,
)
from octavo.protocol.later import unknown_fields
from octavo.protocol.proxy import proxy_of
from octavo.protocol.steps import KEY_BYTES, PROTOCOL_VERSION, Admit, Plan
from octavo.service.status import error_in
from octavo.service.tls import TlsFiles
from octavo.v1 import common_pb2, operations_pb2, worker_pb2, worker_pb2_grpc

from scheduler_svc.core.events import WorkerInfo
from scheduler_svc.driver import CoreDriver
from scheduler_svc.fleet.models import IncompatibleWorker, ModelRegistry, ServedModel
from scheduler_svc.fleet.pair import Pair, Peer
from scheduler_svc.fleet.way import Way, Ways

_log = structlog.get_logger()

_DESCRIBE_TIMEOUT_S: Final = 15.0
# It waits for the running step, and looks at every block.
_AUDIT_TIMEOUT_S: Final = 30.0
_WELCOME_TIMEOUT_S: Final = 60.0
_FIRST_DELAY_S: Final = 0.1
_MAX_DELAY_S: Final = 0.5
_MAX_OUTGOING: Final = 1024
_ASK_AGAIN_S: Final = 0.25
"""A worker that another scheduler has is asked this often; a takeover may wait for so long."""
_LEAVE_S: Final = 1.0
_LOOK_S: Final = 1.0
"""How often an attempt to connect looks whether the files of TLS have changed."""
# Converting this many tokens takes a few hundred microseconds.
_SLICE_TOKENS: Final = 8192
_TOKENS_PER_BIAS: Final = 8
"""Tokens that take as long to convert as one bias does."""


_Outgoing = worker_pb2.SchedulerMessage | Plan
_Call = grpc.aio.StreamStreamCall[worker_pb2.SchedulerMessage, worker_pb2.WorkerMessage]


class _Unusable(Exception):
    """This worker cannot be used now; the message says why."""


@dataclass(slots=True)
class LinkStatus:
    """What is known of a worker beside what the core knows."""

    address: str
    state: str = "connecting"
    """connecting, ready, draining, held (by another scheduler) or lost."""
    worker_id: str = ""
    model: str = ""
    runner: str = ""
    devices: int = 1
    """GPUs that it computes on together."""
    limits_reason: str = ""
    """How its limits came about."""
    held_by: Peer | None = None
    """The other scheduler that has it, while that is so."""
    asked_at: float = 0.0
    """When the worker was last asked, which is how old that is."""


class Epochs:
    """Numbers for attempts to attach: higher each time, and higher than those of an earlier process."""

    def __init__(self) -> None:
        self._last = 0

    def next(self) -> int:
        """Return the next one."""
        self._last = max(self._last + 1, time.time_ns() // 1_000_000)
        return self._last


@dataclass(frozen=True, slots=True)
class LinkContext:
    """What all links share."""

    scheduler_id: str
    window: int
    epochs: Epochs
    driver: CoreDriver
    models: ModelRegistry
    pair: Pair
    ways: Ways
    on_change: Callable[[], None]
    """Called when a worker has become ready, or is no more."""
    on_ready: Callable[[WorkerLink], None]
    on_taken_over: Callable[[ServedModel], None]
    """Called when a preferred scheduler has taken a worker of this model, which is not attached any more."""
    worker_ids: dict[str, WorkerLink] = field(default_factory=dict)
    """Who is attached, so that one worker behind two addresses is attached once."""
    drained: dict[str, str] = field(default_factory=dict)
    """Workers that an operator has drained: which process of each, by its incarnation."""


class WorkerLink:
    """Attaches to a worker for as long as it runs."""

    def __init__(self, way: Way, context: LinkContext) -> None:
        self.status = LinkStatus(way.address)
        self._way = way
        self._context = context
        self._log = _log.bind(address=way.address)
        self._session: asyncio.Task[None] | None = None
        self._outgoing: asyncio.Queue[_Outgoing] = asyncio.Queue(_MAX_OUTGOING)
        self._detach_reason: str | None = None
        self._leaving = False
        self._rank = 0
        """As last said to the worker."""
        self._stub: worker_pb2_grpc.WorkerAsyncStub | None = None
        self.last_problem = ""
        self.tried = False
        """An attempt to attach has succeeded or failed."""
        self.model_id = ""
        self._incarnation = ""
        self.pin_budget_blocks = 0

    @property
    def worker_id(self) -> str:
        """Names the worker; empty until it has been described."""
        return self.status.worker_id

    @property
    def attached(self) -> bool:
        """Whether a stream to the worker is open."""
        return self.status.state in ("ready", "draining")

    async def run(self) -> None:
        """Attach, and attach again whenever the stream has ended, until cancelled."""
        delay_s = _FIRST_DELAY_S
        if (proxy := proxy_of(self.status.address)) is not None:
            self._log.info("worker_through_proxy", proxy=proxy)
        while not self._leaving:
            files = self._way.files()
            async with self._way.open(files) as channel:
                self._stub = cast("worker_pb2_grpc.WorkerAsyncStub", worker_pb2_grpc.WorkerStub(channel))
                # A channel checks and presents for life what it was made with.
                while not self._leaving and self._way.files() == files:
                    delay_s = await self._attempt(self._stub, files, delay_s)

    async def _attempt(
        self, stub: worker_pb2_grpc.WorkerAsyncStub, files: TlsFiles | None, delay_s: float
    ) -> float:
        """Attach once, and wait before the next time; return how long that was."""
        began = time.monotonic()
        self._session = asyncio.create_task(self._attach(stub))
        try:
            # What waits for a connection that is refused would wait on though the files are others now.
            look_s = _LOOK_S if files is not None else None
            while not (await asyncio.wait([self._session], timeout=look_s))[0]:
                if not self.attached and self._way.files() != files:
                    self.detach("the files of TLS have changed")
        finally:
            # When this task is cancelled, the session ends with it.
            await _cancel(self._session)
        if self._leaving:
            return delay_s
        # An attempt that took long has waited enough: a worker that loads its model answers late.
        soon = self.attached or time.monotonic() - began > _MAX_DELAY_S
        self._conclude(self._session)
        delay_s = _FIRST_DELAY_S if soon else min(_MAX_DELAY_S, delay_s * 2)
        await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))  # noqa: S311 - spreads attempts
        return delay_s

    # From the driver -----------------------------------------------------------------------------

    def send_plan(self, plan: Plan) -> None:
        """Send a plan."""
        self._send(plan)

    def send_cancel(self, handles: tuple[int, ...]) -> None:
        """Send a cancel."""
        self._send(worker_pb2.SchedulerMessage(cancel=worker_pb2.Cancel(handles=handles)))

    def send_pin(self, name: str, keys: tuple[bytes, ...]) -> None:
        """Replace a pin; without keys it is lifted."""
        self._send(worker_pb2.SchedulerMessage(pin=worker_pb2.Pin(name=name, keys=keys_to_proto(keys))))

    def detach(self, reason: str) -> None:
        """Drop the stream."""
        self._detach_reason = reason
        if self._session is not None:
            self._session.cancel()

    async def leave(self) -> None:
        """Detach for good, so that the worker waits for nobody: another scheduler has it at once."""
        self._leaving = True
        if self.attached and self._session is not None:
            self._send(worker_pb2.SchedulerMessage(leave=worker_pb2.Leave()))
            await asyncio.wait([self._session], timeout=_LEAVE_S)

    def follow_preference(self) -> None:
        """Attach anew when the rank of this scheduler is another one now."""
        if self.attached and self._rank != self._context.pair.preference.rank():
            self.detach("the rank of this scheduler has changed")

    def drain(self) -> None:
        """Let the worker take nothing new, whatever befalls its stream, until its process is another."""
        self._context.drained[self.status.worker_id] = self._incarnation
        self._become("draining")
        self._context.driver.worker_draining(self.status.worker_id)

    async def inject_faults(self, request: worker_pb2.InjectFaultsRequest) -> None:
        """Replace the worker's faults; raises grpc.aio.AioRpcError when it does not take them."""
        assert self._stub is not None
        await self._stub.InjectFaults(request, timeout=_DESCRIBE_TIMEOUT_S, metadata=self._way.metadata())

    async def audit(self) -> operations_pb2.WorkerAudit:
        """Have the worker verify its books and return what it says, or why it says nothing."""
        assert self._stub is not None
        answer = operations_pb2.WorkerAudit(worker_id=self.worker_id)
        try:
            found = await self._stub.Audit(
                worker_pb2.AuditRequest(), timeout=_AUDIT_TIMEOUT_S, metadata=self._way.metadata()
            )
        except grpc.aio.AioRpcError as error:
            answer.problem = _say(error)
            return answer
        if found.HasField("violation"):
            answer.violation = found.violation
            self._log.error("audit_failed", worker_id=self.worker_id, violation=found.violation)
        answer.blocks, answer.check_ms = found.blocks, found.check_ms
        return answer

    def _send(self, message: _Outgoing) -> None:
        try:
            self._outgoing.put_nowait(message)
        except asyncio.QueueFull:
            self.detach("it does not read")

    # The session ---------------------------------------------------------------------------------

    async def _attach(self, stub: worker_pb2_grpc.WorkerAsyncStub) -> None:
        """One attempt, from the description to the end of the stream."""
        context, status = self._context, self.status
        description = await stub.Describe(
            worker_pb2.DescribeRequest(),
            timeout=_DESCRIBE_TIMEOUT_S,
            wait_for_ready=True,
            metadata=self._way.metadata(),
        )
        if description.protocol_version != PROTOCOL_VERSION:
            raise _Unusable(f"it speaks protocol {description.protocol_version}, we speak {PROTOCOL_VERSION}")
        worker_id = description.worker_id
        if context.worker_ids.setdefault(worker_id, self) is not self:
            raise _Unusable(f"worker {worker_id} is attached already, by another address")
        try:
            model = await context.models.claim(description)
            status.worker_id, status.model, status.runner = worker_id, model.id, description.runner
            status.devices = description.devices if description.HasField("devices") else 1
            status.limits_reason = description.limits_reason
            self.model_id = model.id
            self._incarnation = description.incarnation
            geometry = description.geometry
            # Contiguous memory shares nothing, so there is nothing to pin.
            self.pin_budget_blocks = geometry.pin_budget_blocks if geometry.paged else 0
            await self._insist(stub, description, model)
        finally:
            status.held_by = None
            context.models.release(description)
            del context.worker_ids[worker_id]

    async def _insist(
        self,
        stub: worker_pb2_grpc.WorkerAsyncStub,
        description: worker_pb2.WorkerDescription,
        model: ServedModel,
    ) -> None:
        """Attach, and ask again for as long as another scheduler has the worker."""
        while True:
            try:
                await self._run_stream(stub, description, model)
            except grpc.aio.AioRpcError as failure:
                refusal = error_in(failure)
                reason = refusal.reason if refusal is not None else ""
                if refusal is None or reason not in ("SCHEDULER_ATTACHED", "TAKEN_OVER", "RESERVED"):
                    raise
                if refusal.metadata.get("incarnation", description.incarnation) != description.incarnation:
                    raise _Unusable("it was started anew while another scheduler had it") from None
                self._held(refusal, model)
                wait_s = refusal.retry_delay_ms / 1000 or _ASK_AGAIN_S
            else:
                return
            await asyncio.sleep(wait_s)

    def _held(self, refusal: common_pb2.Error, model: ServedModel) -> None:
        """Take note of who has the worker; while it is reserved nobody has it."""
        facts, status = refusal.metadata, self.status
        former = status.held_by
        status.held_by = None
        if refusal.reason != "RESERVED":
            status.held_by = Peer(facts.get("scheduler_id", ""), facts.get("endpoint", ""))
        if status.held_by != former:
            self._log.info("worker_held", worker_id=status.worker_id, problem=refusal.message)
        self._become("held")
        if refusal.reason == "TAKEN_OVER":
            self._context.on_taken_over(model)

    async def _run_stream(
        self,
        stub: worker_pb2_grpc.WorkerAsyncStub,
        description: worker_pb2.WorkerDescription,
        model: ServedModel,
    ) -> None:
        context, worker_id = self._context, description.worker_id
        self._outgoing = asyncio.Queue(_MAX_OUTGOING)
        self._rank = context.pair.preference.rank()
        self.status.asked_at = context.driver.clock()
        call: _Call = stub.Attach(metadata=self._way.metadata())  # type: ignore[call-arg]  # written to by hand
        sender: asyncio.Task[None] | None = None
        try:
            hello = worker_pb2.Hello(
                scheduler_id=context.scheduler_id,
                epoch=context.epochs.next(),
                protocol_version=PROTOCOL_VERSION,
                window=context.window,
                rank=self._rank,
                endpoint=context.pair.endpoint,
            )
            await call.write(worker_pb2.SchedulerMessage(hello=hello))
            async with asyncio.timeout(_WELCOME_TIMEOUT_S):
                info = await self._read_welcome(call, description)
            sending = self._pump(call, self._outgoing, share_sampling=description.shared_sampling)
            sender = asyncio.create_task(sending)
            model.workers.add(worker_id)
            self.status.held_by = None
            self._become("draining" if info.draining else "ready")
            context.driver.worker_up(info, self)
            context.on_ready(self)
            await self._read_reports(call, worker_id)
        except grpc.aio.AioRpcError as failure:
            if sender is not None and (told := error_in(failure)) and told.reason == "TAKEN_OVER":
                # It lives on elsewhere: nobody is to blame for its going.
                context.driver.worker_draining(worker_id)
            raise
        finally:
            call.cancel()
            if sender is not None:
                sender.cancel()
                model.workers.discard(worker_id)
                context.driver.worker_down(worker_id, self)

    async def _read_welcome(self, call: _Call, description: worker_pb2.WorkerDescription) -> WorkerInfo:
        device_keys: list[bytes] = []
        host_keys: list[bytes] = []
        geometry = description.geometry
        while True:
            message = await self._read(call)
            if message is None or message.WhichOneof("message") != "welcome":
                raise _Unusable("it did not welcome us")
            welcome = message.welcome
            room = geometry.num_blocks + geometry.num_host_blocks - len(device_keys) - len(host_keys)
            if len(welcome.device_keys) + len(welcome.host_keys) > room * KEY_BYTES:
                raise _Unusable("it welcomed us with more keys than it has blocks")
            device_keys += keys_from_proto(welcome.device_keys, "welcome.device_keys")
            host_keys += keys_from_proto(welcome.host_keys, "welcome.host_keys")
            if welcome.incarnation != description.incarnation:
                raise _Unusable("it was started anew while we attached")
            if welcome.last:
                break
        return WorkerInfo(
            worker_id=welcome.worker_id,
            incarnation=welcome.incarnation,
            model=description.model_id,
            geometry=geometry_from_proto(welcome.geometry),
            max_num_seqs=welcome.max_num_seqs,
            max_num_batched_tokens=welcome.max_num_batched_tokens,
            max_model_len=description.max_model_len,
            pool=pool_from_proto(welcome.pool),
            device_keys=tuple(device_keys),
            host_keys=tuple(host_keys),
            adapters=tuple(description.adapters),
            draining=self._context.drained.get(welcome.worker_id) == welcome.incarnation,
            devices=self.status.devices,
        )

    async def _read_reports(self, call: _Call, worker_id: str) -> None:
        driver = self._context.driver
        noted = False
        while (message := await self._read(call)) is not None:
            match message.WhichOneof("message"):
                case "report":
                    driver.report(worker_id, report_from_proto(message.report))
                case "draining":
                    self._become("draining")
                    driver.worker_draining(worker_id)
                case "standby":
                    standby = message.standby
                    self._context.pair.heard(Peer(standby.scheduler_id, standby.endpoint))
                    self._send(worker_pb2.SchedulerMessage(alive=worker_pb2.Alive()))
                case None if numbers := unknown_fields(message):
                    if not noted:
                        self._log.warning("unknown_message_ignored", worker_id=worker_id, fields=numbers)
                    noted = True
                case other:
                    raise _Unusable(f"it sent {other} out of turn")

    @staticmethod
    async def _read(call: _Call) -> worker_pb2.WorkerMessage | None:
        """Return the next message, or None at the end of the stream."""
        message = await call.read()
        return message if isinstance(message, worker_pb2.WorkerMessage) else None

    @staticmethod
    async def _pump(call: _Call, outgoing: asyncio.Queue[_Outgoing], *, share_sampling: bool) -> None:
        # A write that fails is seen by the reader, too.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                message = await outgoing.get()
                if isinstance(message, Plan):
                    message = await _plan_message(message, share_sampling=share_sampling)
                await call.write(message)

    def _conclude(self, session: asyncio.Task[None]) -> None:
        """Say how a session ended; a repeated problem is said once."""
        reason, self._detach_reason = self._detach_reason, None
        problem = reason or "cancelled" if session.cancelled() else _say(session.exception())
        self._become("lost" if self.status.worker_id else "connecting")
        if problem != self.last_problem:
            self._log.warning("worker_link_ended", worker_id=self.status.worker_id, problem=problem)
            if _is_of_a_twin(session):
                self._log.error(
                    "scheduler_id_not_unique",
                    scheduler_id=self._context.scheduler_id,
                    meaning="another scheduler of this name takes the worker away; each needs its own",
                    remedy="give every scheduler another --scheduler-id, or none",
                )
        self.last_problem = problem

    def _become(self, state: str) -> None:
        self.tried = True
        if state == self.status.state:
            return
        was_attached = self.attached
        self.status.state = state
        if self.attached and not was_attached:
            self.last_problem = ""
            self._log.info("worker_attached", worker_id=self.status.worker_id, model=self.status.model)
        self._context.on_change()


async def _plan_message(plan: Plan, *, share_sampling: bool) -> worker_pb2.SchedulerMessage:
    """Convert a plan. What is long goes in slices, with a turn for others in between."""
    if sum(map(_cost, plan.admit)) <= _SLICE_TOKENS:
        return worker_pb2.SchedulerMessage(plan=plan_to_proto(plan, share_sampling=share_sampling))
    message = worker_pb2.SchedulerMessage(plan=plan_to_proto(replace(plan, admit=())))
    for admit, leaders in zip(plan.admit, leaders_of(plan.admit, share_sampling=share_sampling), strict=True):
        token_ids = admit.token_ids if leaders.prompt is None else admit.token_ids[admit.prompt_len :]
        proto = message.plan.admit.add()
        proto.CopyFrom(admit_to_proto(replace(admit, token_ids=()), leaders))
        await asyncio.sleep(0)
        for start in range(0, len(token_ids), _SLICE_TOKENS):
            proto.token_ids.extend(token_ids[start : start + _SLICE_TOKENS])
            await asyncio.sleep(0)
    return message


def _cost(admit: Admit) -> int:
    """Return about how long an admission takes to convert, in tokens."""
    sampling = admit.sampling
    return len(admit.token_ids) + _TOKENS_PER_BIAS * (len(sampling.logit_bias) + len(sampling.stop_token_ids))


def _is_of_a_twin(session: asyncio.Task[None]) -> bool:
    """Return whether a session ended because somebody else attached in the name of this scheduler."""
    error = None if session.cancelled() else session.exception()
    told = error_in(error) if isinstance(error, grpc.aio.AioRpcError) else None
    return told is not None and told.reason in ("SUPERSEDED", "STALE_EPOCH")


def _say(error: BaseException | None) -> str:
    match error:
        case None:
            return "it ended the stream"
        case grpc.aio.AioRpcError():
            return f"{error.code().name}: {error.details()}"
        case TimeoutError():
            return "it did not welcome us in time"
        case _Unusable() | IncompatibleWorker() | ProtocolError():
            return str(error)
        case _:
            return f"{type(error).__name__}: {error}"


async def _cancel(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait until it is over; its outcome is somebody else's business."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task
