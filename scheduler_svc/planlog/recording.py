"""A core that writes down what it is told and what it plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

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


class RecordingCore(SchedulerCore):
    """A `SchedulerCore` of which each call is logged with its outcome.

    A log that cannot be written any more ends; the core goes on, and a `plan_log_stopped` event says
    so once.

    Raises:
        PlanLogError: the first file cannot be written.
    """

    def __init__(self, config: CoreConfig, writer: PlanLogWriter) -> None:
        super().__init__(config)
        try:
            writer.start_file(config_to_json(config))
        except OSError as error:
            raise PlanLogError(f"{writer.path}: {error.strerror}") from error
        self._writer: PlanLogWriter | None = writer

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
        return {name: value for name, value in vars(self).items() if name != "_writer"}

    def close(self) -> None:
        """End the log; the core goes on without it."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _record(self, entry: PlanLogEntry, call: Callable[[], list[Effect]]) -> list[Effect]:
        """Make a call, and log it with what came of it: also when that is an exception."""
        stopped = self._attempt(self._rotate)
        try:
            effects = call()
        except Exception as error:
            entry.raised = repr(error)
            self._attempt(lambda writer: writer.append(entry))
            raise
        entry.plans.extend(sent_plans(effects))
        crc = effects_crc(effects)
        if crc is not None:
            entry.effects_crc = crc
        stopped = self._attempt(lambda writer: writer.append(entry)) or stopped
        return [*effects, stopped] if stopped is not None else effects

    def _rotate(self, writer: PlanLogWriter) -> None:
        if writer.is_full:
            writer.start_file(config_to_json(self.config), checkpoint.dump(self))

    def _attempt(self, write: Callable[[PlanLogWriter], None]) -> LogEvent | None:
        """Write; when that fails the log has ended, and the event to tell of it is returned."""
        if self._writer is None:
            return None
        try:
            write(self._writer)
        except OSError as error:
            path = str(self._writer.path)
            self.close()
            return LogEvent("plan_log_stopped", {"path": path, "error": str(error)})
        return None
