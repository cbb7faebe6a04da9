"""Who used the devices in the time of a plan log."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Final

from octavo.status import TenantUsage, UsagePeriod, UsageReport
from octavo.v1.planlog_pb2 import PlanLogEntry

from scheduler_svc.core import ChargeTenant, Effect, EmitTokens, RequestAccepted, SchedulerCore
from scheduler_svc.core.usage import UsageSnapshot
from scheduler_svc.planlog.reader import PlanLogReader
from scheduler_svc.planlog.replay import replay

_MINUTE_S: Final = 60.0


class _Minutes:
    """Watches a replay, and ends a period each minute. Tokens count when they are computed."""

    def __init__(self, started_unix_s: float) -> None:
        self.periods: list[UsagePeriod] = []
        self._started_unix_s = started_unix_s
        self._first_now: float | None = None
        self._began = 0.0
        self._usage = UsageSnapshot({}, 0.0, 0.0)
        self._requests: Counter[str] = Counter()
        self._prompt: Counter[str] = Counter()
        self._output: Counter[str] = Counter()
        self._tenants: dict[str, str] = {}

    def passed_over(self) -> None:
        """Nothing is asked of the core."""

    def before(self, core: SchedulerCore, entry: PlanLogEntry) -> None:
        """Begin where the log does, and note whose the requests are."""
        if self._first_now is None:
            self._first_now = self._began = entry.now
            self._usage = core.snapshot(entry.now).usage
            self._tenants = {name: request.tenant for name, request in core.requests.items()}
        if entry.now - self._began >= _MINUTE_S:
            self.end(core, entry.now)
        if entry.WhichOneof("event") == "submit":
            self._tenants[entry.submit.request_id] = entry.submit.tenant

    def after(self, core: SchedulerCore, entry: PlanLogEntry, effects: list[Effect]) -> None:
        """Count what an entry meant."""
        for effect in effects:
            if isinstance(effect, RequestAccepted):
                self._requests[self._tenants[effect.request_id]] += 1
            elif isinstance(effect, ChargeTenant):
                self._prompt[effect.tenant] += effect.prompt_tokens
                self._output[effect.tenant] += effect.output_tokens
            elif isinstance(effect, EmitTokens):
                for delta in effect.deltas:
                    self._output[self._tenants[delta.request_id]] += len(delta.token_ids)

    def end(self, core: SchedulerCore, now: float) -> None:
        """End a period, and forget who is gone."""
        usage, before = core.snapshot(now).usage, self._usage
        names = sorted({*self._requests, *self._prompt, *self._output, *usage.tenants})
        rows = (
            TenantUsage(
                name,
                self._requests[name],
                self._prompt[name],
                self._output[name],
                usage.tenants.get(name, 0.0) - before.tenants.get(name, 0.0),
            )
            for name in names
        )
        began_unix_s = self._started_unix_s + self._began - (self._first_now or 0.0)
        period = UsagePeriod(
            began_unix_s,
            began_unix_s + now - self._began,
            tuple(
                row for row in rows if row.requests or row.device_s or row.prompt_tokens or row.output_tokens
            ),
            usage.idle_s - before.idle_s,
            usage.unassigned_s - before.unassigned_s,
        )
        self.periods.append(period)
        self._began, self._usage = now, usage
        for counter in (self._requests, self._prompt, self._output):
            counter.clear()
        self._tenants = {name: request.tenant for name, request in core.requests.items()}


def usage_of(path: Path) -> UsageReport:
    """Return who used the devices, minute by minute, by replay of a plan log.

    Raises:
        PlanLogError: it is no plan log, or another version's.
        OSError: it cannot be read.
    """
    minutes = _Minutes(PlanLogReader(path).header.started_unix_ms / 1000)
    result = replay(path, minutes)
    if result.last_now is not None:
        minutes.end(result.core, result.last_now)
    return UsageReport(tuple(minutes.periods))
