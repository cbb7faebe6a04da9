"""Replays plan logs through a fresh core and compares what it plans with what was planned then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from google.protobuf.message import DecodeError
from octavo.protocol.convert import ProtocolError, plan_from_proto, report_from_proto
from octavo.protocol.steps import Plan, Report
from octavo.v1 import planlog_pb2, worker_pb2
from octavo.v1.planlog_pb2 import PlanLogEntry

from scheduler_svc.core import Effect, SchedulerCore
from scheduler_svc.core.planning import Explain
from scheduler_svc.core.request import Sequence
from scheduler_svc.core.worker import WorkerState
from scheduler_svc.planlog import checkpoint
from scheduler_svc.planlog.convert import (
    config_from_json,
    effects_crc,
    request_from_proto,
    sent_plans,
    worker_from_proto,
)
from scheduler_svc.planlog.errors import PlanLogError
from scheduler_svc.planlog.reader import PlanLogReader


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One plan that came out otherwise; None where there was none."""

    entry: int
    """Index of the entry in the file."""
    now: float
    worker_id: str
    logged: Plan | None
    replayed: Plan | None


@dataclass(slots=True)
class ReplayResult:
    """What came of a replay."""

    core: SchedulerCore = field(compare=False)
    """As it was after the last entry."""
    events: Counter[str] = field(default_factory=Counter)
    """Entries by kind."""
    plans: int = 0
    mismatches: list[Mismatch] = field(default_factory=list)
    effect_mismatches: int = 0
    """Entries whose other effects came out otherwise."""
    first_now: float | None = None
    last_now: float | None = None
    torn_bytes: int = 0
    damaged_bytes: int = 0
    """Bytes that were left out from where the file is damaged, not just cut off."""
    gap: planlog_pb2.PlanLogGap | None = None
    """What is missing before the first entry, because it could not be written then."""
    octavo_version: str = ""
    """Of the octavo that wrote it."""
    raised: str | None = None
    """The exception that ended the log, when the core raised one; the replay raised it too."""

    @property
    def differs(self) -> bool:
        """Something came out otherwise than it was logged."""
        return bool(self.mismatches or self.effect_mismatches)

    @property
    def seconds(self) -> float:
        """Time between the first and the last entry."""
        if self.first_now is None or self.last_now is None:
            return 0.0
        return self.last_now - self.first_now


class Observer(Protocol):
    """Watches a replay."""

    def before(self, core: SchedulerCore, entry: PlanLogEntry) -> None:
        """An entry is about to be applied."""

    def passed_over(self) -> Explain | None:
        """Return what the core is to call for each waiting sequence that a plan passes over."""

    def after(self, core: SchedulerCore, entry: PlanLogEntry, effects: list[Effect]) -> None:
        """An entry was applied."""


def open_core(reader: PlanLogReader, explain: Explain | None = None) -> SchedulerCore:
    """Return the core as it was before the first entry.

    Raises:
        PlanLogError: the header names settings or a state that this version does not have.
    """
    header = reader.header
    try:
        if header.HasField("state"):
            core = checkpoint.load(header.state)
        elif header.checkpoint:
            core = _core_after(_file_before(reader))
        else:
            core = SchedulerCore(config_from_json(header.core_config_json))
    except ValueError as error:
        raise PlanLogError(f"{reader.path}: {error} (written by octavo {header.octavo_version})") from error
    core.explain_to(explain)
    return core


def _file_before(reader: PlanLogReader) -> PlanLogReader:
    """Return the file that a file of format 2 goes on from: its own state is a pickle, which is never read.

    Raises:
        PlanLogError: it is not there.
    """
    path = reader.path
    stem, number = (path.stem, int(path.suffix[1:])) if path.suffix[1:].isdecimal() else (path.name, 0)
    before = path.with_name(f"{stem}.{number + 1}")
    version = reader.header.octavo_version
    try:
        found = PlanLogReader(before)
    except (OSError, PlanLogError) as error:
        found, problem = None, str(error)
    else:
        problem = f"{before} is not the file before it"
    if found is None or found.header.sequence + 1 != reader.header.sequence:
        raise PlanLogError(
            f"{path} begins with a state that only octavo {version} reads; it can be replayed after the files"
            f" before it, down to the first one, and {problem}"
        )
    return found


def _core_after(reader: PlanLogReader) -> SchedulerCore:
    """Return the core as it was after the last entry of a file."""
    core = open_core(reader)
    for index, entry in enumerate(reader):
        _apply_as_logged(core, index, entry, ReplayResult(core))
    if reader.torn_bytes or reader.damaged_bytes:
        raise PlanLogError(f"{reader.path} is not whole, and the file after it goes on from its end")
    return core


def apply(core: SchedulerCore, entry: PlanLogEntry) -> list[Effect]:
    """Make the call that an entry logs."""
    now = entry.now
    kind = entry.WhichOneof("event")
    calls: dict[str | None, Callable[[], list[Effect]]] = {
        "submit": lambda: core.submit(request_from_proto(entry.submit), now),
        "cancel": lambda: core.cancel(entry.cancel.request_id, now),
        "stop_choice": lambda: core.stop_choice(entry.stop_choice.request_id, entry.stop_choice.choice, now),
        "worker_up": lambda: core.worker_up(worker_from_proto(entry.worker_up), now),
        "worker_down": lambda: core.worker_down(entry.worker_down.worker_id, now),
        "worker_draining": lambda: core.worker_draining(entry.worker_draining.worker_id, now),
        "report": lambda: core.report(entry.report.worker_id, _report(entry.report), now),
        "delivered": lambda: core.delivered(entry.delivered.request_id, now),
        "tick": lambda: core.tick(now),
        "drain": lambda: core.drain(now),
        "tenant_weights": lambda: core.weigh_tenants(dict(entry.tenant_weights.weights), now),
    }
    call = calls.get(kind)
    if call is None:
        raise PlanLogError(f"an entry of kind {kind} is of a newer version")
    return call()


def replay(path: Path, *observers: Observer) -> ReplayResult:
    """Replay one file.

    Raises:
        PlanLogError: it is no plan log, it cannot be read, or another version's core wrote it.
        OSError: it cannot be read.
    """
    reader = PlanLogReader(path)
    core = open_core(reader, _all_of([told for one in observers if (told := one.passed_over()) is not None]))
    header = reader.header
    gap = header.gap if header.HasField("gap") else None
    result = ReplayResult(core, gap=gap, octavo_version=header.octavo_version)
    for index, entry in enumerate(reader):
        if result.first_now is None:
            result.first_now = entry.now
        result.last_now = entry.now
        result.events[entry.WhichOneof("event") or "unknown"] += 1
        for observer in observers:
            observer.before(core, entry)
        effects = _apply_as_logged(core, index, entry, result)
        _compare(index, entry, effects, result)
        for observer in observers:
            observer.after(core, entry, effects)
    result.torn_bytes, result.damaged_bytes = reader.torn_bytes, reader.damaged_bytes
    return result


def _all_of(told: list[Explain]) -> Explain | None:
    """Return what tells all of these, or the only one itself."""
    if len(told) < 2:
        return told[0] if told else None

    def tell_all(sequence: Sequence, worker: WorkerState, reason: str, figures: dict[str, object]) -> None:
        for tell in told:
            tell(sequence, worker, reason, figures)

    return tell_all


def _apply_as_logged(
    core: SchedulerCore, index: int, entry: PlanLogEntry, result: ReplayResult
) -> list[Effect]:
    """Apply an entry; the exception that it logs, and only that one, is expected."""
    try:
        return apply(core, entry)
    except PlanLogError:
        raise
    except Exception as error:
        if not entry.HasField("raised") or repr(error) != entry.raised:
            then = entry.raised or "nothing"
            raise PlanLogError(f"entry {index}: the core raised {error!r}, then it raised {then}") from error
        result.raised = entry.raised
        return []


def _compare(index: int, entry: PlanLogEntry, effects: list[Effect], result: ReplayResult) -> None:
    logged, replayed = list(entry.plans), sent_plans(effects)
    result.plans += len(logged)
    for position in range(max(len(logged), len(replayed))):
        then = logged[position] if position < len(logged) else None
        again = replayed[position] if position < len(replayed) else None
        if then != again:
            worker_id = (then or again or planlog_pb2.SentPlan()).worker_id
            result.mismatches.append(Mismatch(index, entry.now, worker_id, _plan(then), _plan(again)))
    crc = entry.effects_crc if entry.HasField("effects_crc") else None
    if crc != effects_crc(effects):
        result.effect_mismatches += 1


def _report(event: planlog_pb2.ReportEvent) -> Report:
    return report_from_proto(worker_pb2.Report.FromString(event.report))


def _plan(sent: planlog_pb2.SentPlan | None) -> Plan | None:
    try:
        return plan_from_proto(worker_pb2.Plan.FromString(sent.plan)) if sent is not None else None
    except (DecodeError, ProtocolError) as error:
        raise PlanLogError(f"a logged plan is damaged: {error}") from error
