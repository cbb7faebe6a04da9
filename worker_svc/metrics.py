"""Prometheus metrics of the worker."""

from __future__ import annotations

from octavo.protocol.steps import (
    Geometry,
    PoolReport,
    RefuseReason,
    Report,
    StallReason,
    StepStatus,
    TierCopies,
)
from octavo.service.log_metrics import LogCollector
from prometheus_client import (
    GC_COLLECTOR,
    PLATFORM_COLLECTOR,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
)

from worker_svc.kv.stats import external_fragmentation, internal_fragmentation
from worker_svc.runner.base import LoadedModel

# Counters that say when they were made double the page and help nobody.
disable_created_metrics()  # type: ignore[no-untyped-call]

_US = 1e-6
# From a small GPU step to a long prefill on a CPU.
_STEP_BUCKETS = (
    0.001,
    0.002,
    0.005,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
)
_GAP_BUCKETS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25, 1)


class WorkerMetrics:
    """All series of one worker, in a registry of their own. Updated on the event loop, once a step."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self.registry = registry
        ProcessCollector(registry=registry)
        registry.register(GC_COLLECTOR)
        registry.register(PLATFORM_COLLECTOR)
        registry.register(LogCollector())
        self._info = Info("octavo_worker", "What this worker runs", registry=registry)
        self._ready = Gauge("octavo_worker_ready", "1 while the worker takes work", registry=registry)
        self._attached = Gauge("octavo_worker_attached", "1 while a scheduler is attached", registry=registry)
        self._execute = self._histogram("step", "Time of the runner per step", _STEP_BUCKETS)
        self._bubble = self._histogram("bubble", "Wait for a plan while sequences were alive", _GAP_BUCKETS)
        self._overhead = self._histogram("overhead", "Applying a plan and building its report", _GAP_BUCKETS)
        self._copy = self._histogram("copy", "Copies between tiers on a step's path", _GAP_BUCKETS)
        steps = Counter("octavo_worker_steps", "Steps, by outcome", ["status"], registry=registry)
        self._steps = {status: steps.labels(status.name.lower()) for status in StepStatus}
        tokens = Counter("octavo_worker_tokens", "Tokens computed", ["kind"], registry=registry)
        self._prefill_tokens, self._decode_tokens = tokens.labels("prefill"), tokens.labels("decode")
        self._errors = Counter("octavo_worker_step_errors", "Errors in steps", ["kind"], registry=registry)
        refused = Counter("octavo_worker_refused", "Sequences not taken", ["reason"], registry=registry)
        self._refused = {reason: refused.labels(reason.name.lower()) for reason in RefuseReason}
        stalled = Counter(
            "octavo_worker_stalled", "Steps sat out by a sequence", ["reason"], registry=registry
        )
        self._stalled = {reason: stalled.labels(reason.name.lower()) for reason in StallReason}
        self._live = Gauge("octavo_worker_sequences", "Live sequences", registry=registry)
        blocks = Gauge("octavo_worker_kv_blocks", "KV blocks, by state", ["state"], registry=registry)
        self._blocks = {
            state: blocks.labels(state) for state in ("free", "evictable", "active", "pinned", "host_free")
        }
        self._capacity = Gauge("octavo_worker_kv_blocks_total", "KV blocks", ["tier"], registry=registry)
        fragmentation = Gauge(
            "octavo_worker_kv_fragmentation_ratio",
            "internal: unused slots of active blocks; external: 1 - largest free run / free blocks",
            ["kind"],
            registry=registry,
        )
        self._internal, self._external = fragmentation.labels("internal"), fragmentation.labels("external")
        cache = Counter(
            "octavo_worker_prefix_cache_tokens",
            "Prompt tokens looked up in the cache",
            ["result"],
            registry=registry,
        )
        self._cache = {name: cache.labels(name) for name in ("hit", "miss", "host_hit")}
        self._seen_cache = dict.fromkeys(self._cache, 0)
        moves = Counter("octavo_worker_kv_key_events", "Moves of cached blocks", ["event"], registry=registry)
        self._copied_bytes = Counter(
            "octavo_worker_kv_copied_bytes",
            "Copies between the tiers",
            ["direction"],
            registry=registry,
        )
        self._copy_cost = Gauge(
            "octavo_worker_kv_copy_seconds_per_block",
            "Running average of what copying a block between the tiers costs",
            ["direction"],
            registry=registry,
        )
        self._saved_tokens = Counter(
            "octavo_worker_kv_recompute_saved_tokens",
            "Tokens that came back from the host tier instead of being computed again",
            registry=registry,
        )
        self._skipped_copies = Counter(
            "octavo_worker_kv_copies_skipped_blocks",
            "Blocks not copied because computing them again was cheaper",
            registry=registry,
        )
        self._seen_copies = TierCopies()
        self._moves = {name: moves.labels(name) for name in ("stored", "demoted", "promoted", "evicted")}
        self._block_size = 1
        self._block_bytes = 0

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
        full_name = f"octavo_worker_{name}_seconds"
        return Histogram(full_name, documentation, buckets=buckets, registry=self.registry)

    def describe(self, info: LoadedModel, geometry: Geometry) -> None:
        """Publish what does not change."""
        self._info.info(
            {"model": info.model_id, "runner": info.runner, "dtype": info.dtype, "device": info.device}
        )
        self._capacity.labels("device").set(geometry.num_blocks)
        self._capacity.labels("host").set(geometry.num_host_blocks)
        self._block_size = geometry.block_size
        self._block_bytes = geometry.block_bytes

    def set_ready(self, ready: bool) -> None:
        """Publish whether the worker takes work."""
        self._ready.set(ready)

    def set_attached(self, attached: bool) -> None:
        """Publish whether a scheduler is attached."""
        self._attached.set(attached)

    def observe(self, report: Report) -> None:
        """Account for one step."""
        timing = report.timing
        self._steps[report.status].inc()
        if report.status is not StepStatus.SKIPPED:
            self._execute.observe(timing.execute_us * _US)
            self._overhead.observe(timing.overhead_us * _US)
            self._bubble.observe(timing.bubble_us * _US)
        if timing.copy_us:
            self._copy.observe(timing.copy_us * _US)
        self._prefill_tokens.inc(timing.num_prefill_tokens)
        self._decode_tokens.inc(timing.num_decodes)
        for error in report.errors:
            self._errors.labels(error.kind.lower()).inc()
        for refused in report.refused:
            self._refused[refused.reason].inc()
        for _, reason in report.stalled:
            self._stalled[reason].inc()
        self._live.set(report.live_count)
        events = report.key_events
        for name, keys in (
            ("stored", events.stored),
            ("demoted", events.demoted),
            ("promoted", events.promoted),
            ("evicted", events.evicted),
        ):
            if keys:
                self._moves[name].inc(len(keys))
        self.observe_pool(report.pool)

    def observe_dropped(self, pool: PoolReport) -> None:
        """Account for the end of a session, with which its sequences went."""
        self._live.set(0)
        self.observe_pool(pool)

    def observe_pool(self, pool: PoolReport) -> None:
        """Account for the state of the pool."""
        for name, gauge in self._blocks.items():
            gauge.set(getattr(pool, name))
        # Sequences that wait for the same blocks from the host each count them as unused.
        self._internal.set(min(1.0, internal_fragmentation(pool, self._block_size)))
        self._external.set(external_fragmentation(pool))
        for name, since_start in (
            ("hit", pool.hit_tokens),
            ("miss", pool.miss_tokens),
            ("host_hit", pool.host_hit_tokens),
        ):
            self._cache[name].inc(since_start - self._seen_cache[name])
            self._seen_cache[name] = since_start
        if pool.copies is not None and pool.copies != self._seen_copies:
            self._observe_copies(pool.copies)

    def _observe_copies(self, copies: TierCopies) -> None:
        seen, self._seen_copies = self._seen_copies, copies
        out_blocks, in_blocks = copies.out_blocks - seen.out_blocks, copies.in_blocks - seen.in_blocks
        self._copied_bytes.labels("out").inc(out_blocks * self._block_bytes)
        self._copied_bytes.labels("in").inc(in_blocks * self._block_bytes)
        self._copy_cost.labels("out").set(copies.out_us_per_block * _US)
        self._copy_cost.labels("in").set(copies.in_us_per_block * _US)
        self._saved_tokens.inc(in_blocks * self._block_size)
        self._skipped_copies.inc(copies.skipped_blocks - seen.skipped_blocks)
