"""A core that writes down what it is told and what it plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from octavo.protocol.convert import report_to_proto
from octavo.protocol.steps import Report
from octavo.v1 import planlog_pb2
from octavo.v1.planlog_pb2 import PlanLogEntry

from scheduler_svc.core import (
    CoreConfig,
    Effect,
    LogEvent,
    NewRequest,
    SchedulerCore,
    WorkerInfo,
)
from scheduler_svc.planlog import checkpoint
from scheduler_svc.planlog.convert import (
    config_to_json,
    effects_crc,
    request_to_proto,
    sent_plans,
    worker_to_proto,
)
from scheduler_svc.planlog.errors import PlanLogError
from scheduler_svc.planlog.writer import PlanLogWriter

_FIRST_RETRY_S: Final = 1.0
_MAX_RETRY_S: Final = 60.0


@dataclass(slots=True)
class PlanLogHealth:
    """Whether a plan log is being written."""

    path: str
    entries_missed: int = 0
    """Entries that are in no file, since start."""
    problem: str | None = None
    """Why nothing is written at the moment."""


class RecordingCore(SchedulerCore):
    """A `SchedulerCore` of which each call is logged with its outcome.

    While the log cannot be written the core goes on without it. After a while, and again after twice
    that, a new file is tried, which begins with the state of the core and says what is missing before. A
    `plan_log_stopped` and a `plan_log_resumed` event tell of it.

    Raises:
        PlanLogError: the first file cannot be written.
    """

    def __init__(self, config: CoreConfig, writer: PlanLogWriter) -> None:
        super().__init__(config)
        self.plan_log = PlanLogHealth(str(writer.path))
        self._writer: PlanLogWriter | None = writer
        self._gap: planlog_pb2.PlanLogGap | None = None
        self._retry_at = self._retry_s = 0.0
        try:
            writer.start_file(config_to_json(config))
        except OSError as error:
            raise PlanLogError(f"{writer.path}: {error.strerror}") from error

    def submit(self, spec: NewRequest, now: float) -> list[Effect]:
        """Take a request in, or refuse it."""
        entry = PlanLogEntry(now=now, submit=request_to_proto(spec))
        return self._record(entry, partial(super().submit, spec, now))

    def cancel(self, request_id: str, now: float) -> list[Effect]:
        """The client does not want a request any more."""
        entry = PlanLogEntry(now=now, cancel=planlog_pb2.CancelEvent(request_id=request_id))
        return self._record(entry, partial(super().cancel, request_id, now))

    def stop_choice(self, request_id: str, choice: int, now: float) -> list[Effect]:
        """A stop string has ended a choice."""
        event = planlog_pb2.StopChoiceEvent(request_id=request_id, choice=choice)
        entry = PlanLogEntry(now=now, stop_choice=event)
        return self._record(entry, partial(super().stop_choice, request_id, choice, now))

    def delivered(self, request_id: str, now: float) -> list[Effect]:
        """The client has taken the end of a request late."""
        entry = PlanLogEntry(now=now, delivered=planlog_pb2.DeliveredEvent(request_id=request_id))
        return self._record(entry, partial(super().delivered, request_id, now))

    def worker_up(self, info: WorkerInfo, now: float) -> list[Effect]:
        """A worker has welcomed the scheduler."""
        entry = PlanLogEntry(now=now, worker_up=worker_to_proto(info))
        return self._record(entry, partial(super().worker_up, info, now))

    def worker_down(self, worker_id: str, now: float) -> list[Effect]:
        """The stream to a worker has ended."""
        entry = PlanLogEntry(now=now, worker_down=planlog_pb2.WorkerDownEvent(worker_id=worker_id))
        return self._record(entry, partial(super().worker_down, worker_id, now))

    def worker_draining(self, worker_id: str, now: float) -> list[Effect]:
        """A worker takes nothing new."""
        entry = PlanLogEntry(now=now, worker_draining=planlog_pb2.WorkerDrainingEvent(worker_id=worker_id))
        return self._record(entry, partial(super().worker_draining, worker_id, now))

    def report(self, worker_id: str, report: Report, now: float) -> list[Effect]:
        """A worker has answered a plan."""
        event = planlog_pb2.ReportEvent(
            worker_id=worker_id, report=report_to_proto(report).SerializeToString()
        )
        return self._record(
            PlanLogEntry(now=now, report=event), partial(super().report, worker_id, report, now)
        )

    def tick(self, now: float) -> list[Effect]:
        """Do what is due."""
        entry = PlanLogEntry(now=now, tick=planlog_pb2.TickEvent())
        return self._record(entry, partial(super().tick, now))

    def drain(self, now: float) -> list[Effect]:
        """Refuse new requests from now on."""
        entry = PlanLogEntry(now=now, drain=planlog_pb2.DrainEvent())
        return self._record(entry, partial(super().drain, now))

    def weigh_tenants(self, weights: Mapping[str, float], now: float) -> list[Effect]:
        """Give tenants these shares from now on."""
        event = planlog_pb2.TenantWeightsEvent(weights=weights)
        entry = PlanLogEntry(now=now, tenant_weights=event)
        return self._record(entry, partial(super().weigh_tenants, weights, now))

    def __getstate__(self) -> dict[str, object]:
        """Return the state of the core alone: the checkpoint at the head of a file."""
        return {name: value for name, value in vars(self).items() if name not in _OF_THE_LOG}

    def close(self) -> None:
        """End the log; the core goes on without it."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _record(self, entry: PlanLogEntry, call: Callable[[], list[Effect]]) -> list[Effect]:
        """Make a call, and log it with what came of it: also when that is an exception."""
        if self._writer is None:
            return call()
        events = self._begin_file(self._writer, entry.now)
        try:
            effects = call()
        except Exception as error:
            entry.raised = repr(error)
            self._append(self._writer, entry)
            raise
        entry.plans.extend(sent_plans(effects))
        crc = effects_crc(effects)
        if crc is not None:
            entry.effects_crc = crc
        events += self._append(self._writer, entry)
        return [*effects, *events] if events else effects

    def _begin_file(self, writer: PlanLogWriter, now: float) -> list[LogEvent]:
        """Go on in a new file when the one before is full, or when it is time to try again."""
        gap = self._gap
        if not writer.is_full if gap is None else now < self._retry_at:
            return []
        try:
            writer.start_file(config_to_json(self.config), checkpoint.dump(self), gap)
        except (OSError, checkpoint.CheckpointError) as error:
            return self._stopped(writer, now, error)
        self._gap, self._retry_s, self.plan_log.problem = None, 0.0, None
        if gap is None:
            return []
        missing = {"entries_missed": gap.entries, "missing_s": now - gap.since}
        return [LogEvent("plan_log_resumed", {"path": self.plan_log.path, **missing})]

    def _append(self, writer: PlanLogWriter, entry: PlanLogEntry) -> list[LogEvent]:
        events: list[LogEvent] = []
        if self._gap is None:
            try:
                writer.append(entry)
            except OSError as error:
                events = self._stopped(writer, entry.now, error)
        if self._gap is not None:
            self._gap.entries += 1
            self.plan_log.entries_missed += 1
        return events

    def _stopped(self, writer: PlanLogWriter, now: float, error: Exception) -> list[LogEvent]:
        """Note that nothing can be written; told once until it can be again."""
        writer.close()
        self._retry_s = min(_MAX_RETRY_S, 2 * self._retry_s or _FIRST_RETRY_S)
        self._retry_at = now + self._retry_s
        if self._gap is not None:
            return []
        self.plan_log.problem = str(error)
        self._gap = planlog_pb2.PlanLogGap(since=now, error=str(error))
        return [LogEvent("plan_log_stopped", {"path": self.plan_log.path, "error": str(error)})]


_OF_THE_LOG: Final = {"plan_log", "_writer", "_gap", "_retry_at", "_retry_s"}
