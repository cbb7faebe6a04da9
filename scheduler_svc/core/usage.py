"""Who has used the devices: the measured time of every step, split over the sequences in it.

A sequence pays what the worker's step times say of its part: a decode and the context that it reads, or
prefill tokens and the pairs of their attention. What a step costs whatever is in it is shared by the room
that each takes of it: a place, or its share of the token budget if that is more. So nobody pays for whom it
runs beside. Kept by tenant, in whole nanoseconds of one device: the shares of a step add up to its time, and
rounding loses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.protocol.steps import Report, StepStatus

from scheduler_svc.core.steptime import chunk_pairs
from scheduler_svc.core.worker import WorkerState

_NS_PER_US = 1000
_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class UsageSnapshot:
    """Seconds of devices since start; together they are the time that workers were attached."""

    tenants: dict[str, float]
    unassigned_s: float
    """Of steps that computed nothing for anybody: failed, only copying, or lost with their worker."""
    idle_s: float
    """Between steps; a step that runs counts when it is reported."""

    @property
    def total_s(self) -> float:
        """All together."""
        return sum(self.tenants.values()) + self.unassigned_s + self.idle_s


@dataclass(slots=True)
class UsageBooks:
    """The books of all workers of a scheduler."""

    tenants_ns: dict[str, int] = field(default_factory=dict)
    unassigned_ns: int = 0
    idle_ns: int = 0

    def charge(self, worker: WorkerState, report: Report, now: float) -> None:
        """Split the time of a step. To be called before its report is read into any other book."""
        timing, devices = report.timing, worker.info.devices
        step_ns = (timing.execute_us + timing.overhead_us + timing.copy_us) * _NS_PER_US
        since_ns = int((now - worker.pipeline.last_report_at) * _NS_PER_S)
        if since_ns > step_ns:
            self.idle_ns += (since_ns - step_ns) * devices
        if report.prefilled or len(worker.loads) != 1 or not _all_decode(worker, report):
            self._split(step_ns * devices, _Step(worker, report).parts())
            return
        # The usual step: one tenant decodes.
        for tenant, load in worker.loads.items():
            load.context_tokens += load.decodes
            self.tenants_ns[tenant] = self.tenants_ns.get(tenant, 0) + step_ns * devices

    def left(self, worker: WorkerState, now: float) -> None:
        """A worker is gone; of a step that it did not report, nobody knows what it was for."""
        rest_ns = round((now - worker.pipeline.last_report_at) * _NS_PER_S) * worker.info.devices
        idle_ns = round(_idle_s(worker, now) * _NS_PER_S)
        self.idle_ns += idle_ns
        self.unassigned_ns += max(0, rest_ns - idle_ns)

    def snapshot(self, workers: list[WorkerState], now: float) -> UsageSnapshot:
        """Return the books as they are now, also for workers that have had nothing to report for long."""
        idle_s = self.idle_ns / _NS_PER_S + sum(_idle_s(worker, now) for worker in workers)
        tenants = {tenant: used_ns / _NS_PER_S for tenant, used_ns in self.tenants_ns.items()}
        return UsageSnapshot(tenants, self.unassigned_ns / _NS_PER_S, idle_s)

    def _split(self, step_ns: int, parts: dict[str, float]) -> None:
        if not parts:
            self.unassigned_ns += step_ns
            return
        books, left_ns = self.tenants_ns, step_ns
        if len(parts) > 1:
            whole = sum(parts.values())
            for tenant, part in parts.items():
                share_ns = min(left_ns, int(step_ns * part / whole))
                books[tenant] = books.get(tenant, 0) + share_ns
                left_ns -= share_ns
        # The last one takes what rounding has left: less than a nanosecond per tenant.
        tenant = next(reversed(parts))
        books[tenant] = books.get(tenant, 0) + left_ns


def _idle_s(worker: WorkerState, now: float) -> float:
    """Return for how long a worker has had no plan since its last report, times its devices."""
    pipeline = worker.pipeline
    until = pipeline.in_flight[0].sent_at if pipeline.in_flight else now
    return max(0.0, until - pipeline.last_report_at) * worker.info.devices


def _all_decode(worker: WorkerState, report: Report) -> bool:
    """Return whether a step has one token of each that decodes, and none of others that did."""
    decodes = len(worker.decoding)
    return (
        report.status is StepStatus.OK
        and not (report.stalled or report.token_counts)
        and report.timing.num_decodes == decodes <= len(report.token_handles)
        and len(worker.sequences) == decodes + len(worker.prefilling)
    )


class _Step:
    """What the tenants have in a step: seconds by the step times, and shares of its room."""

    def __init__(self, worker: WorkerState, report: Report) -> None:
        self._worker = worker
        self._prices = worker.pace.step_times.prices()
        self._seat = 1 / worker.max_num_seqs
        self._room: dict[str, float] = {}
        self._cost_s: dict[str, float] = {}
        if _all_decode(worker, report):
            # Most steps: a turn per tenant, not one per sequence.
            for tenant, load in worker.loads.items():
                self._decode(tenant, load.decodes, load.context_tokens)
                load.context_tokens += load.decodes
        elif report.token_handles:
            self._decodes(report)
        if report.prefilled:
            self._prefills(report)

    def parts(self) -> dict[str, float]:
        """Return what each tenant has in it, in seconds: they are to be scaled to what it took."""
        if len(self._room) < 2:
            return self._room
        each_s = self._prices.step_s / sum(self._room.values())
        return {tenant: self._cost_s[tenant] + room * each_s for tenant, room in self._room.items()}

    def _decode(self, tenant: str, decodes: int, context_tokens: int) -> None:
        prices = self._prices
        cost_s = decodes * prices.decode_s + context_tokens * prices.context_token_s
        self._add(tenant, decodes * self._seat, cost_s)

    def _decodes(self, report: Report) -> None:
        """Look at each: some were stalled or skipped, had more than one token, or had ended here before."""
        worker = self._worker
        counts = report.token_counts or (1,) * len(report.token_handles)
        prefilled = {handle for handle, _ in report.prefilled}
        for handle, count in zip(report.token_handles, counts, strict=False):
            sequence = worker.sequences.get(handle)
            if sequence is None or handle in prefilled:
                continue
            tenant = sequence.request.tenant
            self._decode(tenant, 1, sequence.num_tokens)
            if handle in worker.decoding:
                worker.loads[tenant].context_tokens += count

    def _prefills(self, report: Report) -> None:
        worker, prices = self._worker, self._prices
        cached = {entry.handle: entry.cached_tokens + entry.host_cached_tokens for entry in report.admitted}
        for handle, tokens in report.prefilled:
            sequence = worker.sequences.get(handle)
            if sequence is None:
                continue
            start = cached.get(handle, sequence.binding.num_computed_tokens)
            cost_s = tokens * prices.prefill_token_s + chunk_pairs(tokens, start) * prices.pair_s
            self._add(sequence.request.tenant, max(self._seat, tokens / worker.token_budget), cost_s)

    def _add(self, tenant: str, room: float, cost_s: float) -> None:
        self._room[tenant] = self._room.get(tenant, 0.0) + room
        self._cost_s[tenant] = self._cost_s.get(tenant, 0.0) + cost_s
