"""The status that operators see: the core's figures and the shell's in one message."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Final

from octavo.protocol.convert import priority_to_proto
from octavo.service import logs
from octavo.service.memory import MemoryCeiling, rss_bytes
from octavo.v1 import operations_pb2

from scheduler_svc.api.convert import model_to_proto
from scheduler_svc.core.snapshot import CoreSnapshot, OverloadSnapshot, QueueSnapshot, WorkerSnapshot
from scheduler_svc.core.usage import UsageSnapshot
from scheduler_svc.driver import CoreDriver
from scheduler_svc.fleet.models import ModelRegistry
from scheduler_svc.fleet.pair import Pair
from scheduler_svc.fleet.pins import PinRegistry
from scheduler_svc.fleet.workers import Fleet
from scheduler_svc.observe.recent import History
from scheduler_svc.observe.usage import UsageHistory, UsageTotals, totals_of
from scheduler_svc.planlog import PlanLogHealth
from scheduler_svc.requests.accounts import Accounts
from scheduler_svc.requests.tenants import TenantState

VERSION: Final = metadata.version("octavo")


@dataclass(frozen=True, slots=True)
class StatusSources:
    """What a status is made of."""

    driver: CoreDriver
    accounts: Accounts
    fleet: Fleet
    pins: PinRegistry
    models: ModelRegistry
    pair: Pair
    key_file_problem: Callable[[], str | None]
    plan_log: PlanLogHealth | None
    ceiling: MemoryCeiling


class StatusCollector:
    """Collects the status, and its history."""

    def __init__(self, scheduler_id: str, sources: StatusSources, price_per_gpu_hour: float | None) -> None:
        self._scheduler_id = scheduler_id
        self._sources = sources
        self._price_per_gpu_hour = price_per_gpu_hour
        self._started = sources.accounts.clock()
        self.history = History(self.status)
        self.usage = UsageHistory(self.usage_totals, price_per_gpu_hour)

    def status(self) -> operations_pb2.Status:
        """Return the status of the moment."""
        sources = self._sources
        accounts, snapshot = sources.accounts, sources.driver.snapshot()
        workers = self._workers(snapshot)
        standby = sources.pair.standby()
        return operations_pb2.Status(
            scheduler_id=self._scheduler_id,
            version=VERSION,
            uptime_s=accounts.clock() - self._started,
            level=max((overload.level for overload in snapshot.overload), default=0),
            overload=map(_overload, snapshot.overload),
            draining=sources.driver.draining,
            queues=map(_queue, snapshot.queues),
            workers=workers,
            outcomes=accounts.outcomes,
            arrivals=accounts.arrivals,
            live_requests=accounts.live,
            rates=self._rates(sum(worker.devices for worker in workers)),
            tenants=[_tenant(one, snapshot.usage) for one in accounts.tenants],
            key_file_problem=sources.key_file_problem(),
            rss_bytes=rss_bytes(),
            max_rss_bytes=sources.ceiling.max_rss_bytes,
            pins=self._pin_status(snapshot),
            models=map(model_to_proto, sources.models),
            log_lines_dropped=logs.dropped(),
            plan_log=_plan_log(sources.plan_log),
            rank=sources.pair.preference.rank(),
            endpoint=sources.pair.endpoint,
            standby=standby.endpoint if standby is not None else None,
            idle_device_s=snapshot.usage.idle_s,
            unassigned_device_s=snapshot.usage.unassigned_s,
        )

    def usage_totals(self) -> UsageTotals:
        """Return what everybody has used since start."""
        usage = self._sources.driver.snapshot().usage
        counts = {
            one.tenant.name: (one.arrivals - one.over_quota, one.prompt_tokens, one.output_tokens)
            for one in self._sources.accounts.tenants
        }
        return totals_of(counts, usage)

    def _pin_status(self, snapshot: CoreSnapshot) -> Iterable[operations_pb2.PinStatus]:
        attached = {worker.worker_id for worker in snapshot.workers}
        for pin in self._sources.pins:
            yield operations_pb2.PinStatus(
                name=pin.name,
                model=pin.model,
                blocks=len(pin.keys),
                workers=sorted(pin.workers & attached),
            )

    def _workers(self, snapshot: CoreSnapshot) -> list[operations_pb2.WorkerStatus]:
        known = {worker.worker_id: worker for worker in snapshot.workers}
        accounts = self._sources.accounts
        now = accounts.clock()
        found = []
        for link in (one.status for one in self._sources.fleet):
            proto = operations_pb2.WorkerStatus(
                worker_id=link.worker_id,
                address=link.address,
                model=link.model,
                state=link.state,
                runner=link.runner,
            )
            if (holder := link.held_by) is not None:
                proto.held_by, proto.held_by_endpoint = holder.scheduler_id, holder.endpoint
            worker = known.get(link.worker_id)
            if worker is not None and link.state != "lost":
                _fill_worker(proto, worker)
                proto.devices, proto.limits_reason = link.devices, link.limits_reason
                bubbles = accounts.recent_bubble_s.get(link.worker_id)
                if bubbles is not None:
                    proto.bubble_share = min(1.0, bubbles.per_s(now))
            found.append(proto)
        return found

    def _rates(self, devices: int) -> operations_pb2.Rates:
        accounts = self._sources.accounts
        now = accounts.clock()
        output_per_s = accounts.recent_output_tokens.per_s(now)
        rates = operations_pb2.Rates(
            requests_per_s=accounts.recent_requests.per_s(now),
            prompt_tokens_per_s=accounts.recent_prompt_tokens.per_s(now),
            output_tokens_per_s=output_per_s,
            ttft_p50_ms=accounts.recent_ttft_s.quantile(0.5, now) * 1000,
            ttft_p99_ms=accounts.recent_ttft_s.quantile(0.99, now) * 1000,
            queue_p50_ms=accounts.recent_queue_s.quantile(0.5, now) * 1000,
            queue_p99_ms=accounts.recent_queue_s.quantile(0.99, now) * 1000,
            itl_p50_ms=accounts.recent_itl_s.quantile(0.5, now) * 1000,
            itl_p99_ms=accounts.recent_itl_s.quantile(0.99, now) * 1000,
            refused_per_s=accounts.recent_refusals.per_s(now),
        )
        if self._price_per_gpu_hour is not None and output_per_s > 0:
            rates.cost_per_1k_tokens = self._price_per_gpu_hour * devices / 3600 / output_per_s * 1000
        return rates


def _plan_log(health: PlanLogHealth | None) -> operations_pb2.PlanLogStatus | None:
    if health is None:
        return None
    return operations_pb2.PlanLogStatus(
        path=health.path, entries_missed=health.entries_missed, problem=health.problem
    )


def _overload(overload: OverloadSnapshot) -> operations_pb2.OverloadStatus:
    pressure, expected, caps = overload.pressure, overload.expected, overload.caps
    return operations_pb2.OverloadStatus(
        model=overload.model,
        level=overload.level,
        half_open=overload.half_open,
        backlog=pressure.backlog[2],
        backlog_interactive=pressure.backlog[0],
        wait=pressure.wait[1],
        wait_interactive=pressure.wait[0],
        blocks=pressure.blocks,
        misses=pressure.misses,
        stalled_ms=pressure.stalled_s * 1000,
        predicted_wait_ms=expected.wait_s * 1000 if expected is not None else None,
        predicted_ttft_ms=expected.ttft_s * 1000 if expected is not None else None,
        trim_prompt_tokens=caps.prompt_tokens if caps is not None else None,
        trim_max_tokens=caps.max_tokens if caps is not None else None,
    )


def _queue(queue: QueueSnapshot) -> operations_pb2.QueueStatus:
    return operations_pb2.QueueStatus(
        model=queue.model,
        priority=priority_to_proto(queue.priority),
        waiting=queue.waiting,
        waiting_tokens=queue.waiting_tokens,
        oldest_wait_ms=queue.oldest_wait_s * 1000,
    )


def _tenant(state: TenantState, usage: UsageSnapshot) -> operations_pb2.TenantStatus:
    tenant = state.tenant
    return operations_pb2.TenantStatus(
        tenant=tenant.name,
        weight=tenant.weight,
        requests_in_flight=state.requests_in_flight,
        waiting_requests=state.waiting_requests,
        waiting_tokens=state.waiting_tokens,
        arrivals=state.arrivals,
        over_quota=state.over_quota,
        prompt_tokens=state.prompt_tokens,
        output_tokens=state.output_tokens,
        tokenized_bytes=state.text_bytes,
        device_s=usage.tenants.get(tenant.name, 0.0),
        quotas=operations_pb2.TenantQuotas(**asdict(tenant.quotas)),
    )


def _fill_worker(proto: operations_pb2.WorkerStatus, worker: WorkerSnapshot) -> None:
    proto.running = worker.running
    proto.step_ms = worker.step_s * 1000
    proto.steps = worker.steps
    proto.max_num_seqs = worker.max_num_seqs
    proto.max_num_batched_tokens = worker.max_num_batched_tokens
    pool, geometry = worker.pool, worker.geometry
    block_size, block_bytes = geometry.block_size, geometry.block_bytes
    proto.pool.total = geometry.num_blocks
    proto.pool.host_total = geometry.num_host_blocks
    proto.pool.block_size = block_size
    for name in ("free", "evictable", "active", "pinned", "host_free", "largest_free_run"):
        setattr(proto.pool, name, getattr(pool, name))
    for name in ("hit_tokens", "miss_tokens", "host_hit_tokens"):
        setattr(proto.pool, name, getattr(pool, name))
    if pool.active:
        # Sequences that wait for the same blocks from the host each count them as unused.
        proto.pool.internal_fragmentation = min(1.0, pool.unused_slots / (pool.active * block_size))
    proto.pool.step_active = pool.step_active
    if pool.step_active:
        slots = pool.step_active * block_size
        proto.pool.step_internal_fragmentation = min(1.0, pool.step_unused_slots / slots)
    if pool.free and pool.largest_free_run:
        proto.pool.external_fragmentation = 1 - pool.largest_free_run / pool.free
    if (copies := pool.copies) is not None:
        proto.pool.copied_out_bytes = copies.out_blocks * block_bytes
        proto.pool.copied_in_bytes = copies.in_blocks * block_bytes
        proto.pool.copy_out_us_per_block = copies.out_us_per_block
        proto.pool.copy_in_us_per_block = copies.in_us_per_block
        proto.pool.recompute_saved_tokens = copies.in_blocks * block_size
        proto.pool.copies_skipped_blocks = copies.skipped_blocks
