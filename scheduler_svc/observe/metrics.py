"""Prometheus metrics of the scheduler: `octavo_*`, in base units."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from octavo.protocol.steps import Priority
from octavo.service.log_metrics import LogCollector
from octavo.service.memory import rss_bytes
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from scheduler_svc.core.snapshot import CoreSnapshot, OverloadSnapshot, WorkerSnapshot
from scheduler_svc.core.usage import UsageSnapshot
from scheduler_svc.planlog.recording import PlanLogHealth

_SCRAPE_TIMEOUT_S: Final = 5.0
_WAIT_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip
_TOKEN_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip
_ERROR_BUCKETS: Final = (
    -10.0, -5.0, -2.0, -1.0, -0.5, -0.2, -0.1, -0.05, -0.02, 0.0,
    0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip
_PRIORITIES: Final = frozenset(Priority)
_PLAN_BUCKETS: Final = (
    0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1,
)  # fmt: skip


class BulkHistogram(Collector):
    """A histogram that takes many equal values at once, as the tokens of a step are.

    The library's takes over a microsecond for each. Written by one thread only.
    """

    def __init__(self, name: str, documentation: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int) -> None:
        """Count a value this often."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterable[Metric]:
        """Yield the histogram as it stands."""
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append((floatToGoString(bound), total))  # type: ignore[no-untyped-call]  # untyped library
        family = HistogramMetricFamily(self._name, self._documentation)
        family.add_metric([], buckets, self._sum)
        yield family


class SchedulerMetrics:
    """What the shell counts while it works, and what it reads from the core when it is asked."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry(auto_describe=True)
        self.arrivals = Counter(
            "octavo_request_arrivals", "Requests that came in.", ["transport"], registry=registry
        )
        self.outcomes = Counter(
            "octavo_requests",
            "Requests that ended, by how.",
            ["model", "priority", "outcome"],
            registry=registry,
        )
        self.queue = Histogram(
            "octavo_queue_seconds",
            "Wait from acceptance to the first step.",
            ["priority"],
            buckets=_WAIT_BUCKETS,
            registry=registry,
        )
        self.ttft = Histogram(
            "octavo_ttft_seconds",
            "From arrival to the first token.",
            ["priority"],
            buckets=_WAIT_BUCKETS,
            registry=registry,
        )
        self.duration = Histogram(
            "octavo_request_seconds",
            "From arrival to the end.",
            ["priority"],
            buckets=_WAIT_BUCKETS,
            registry=registry,
        )
        self.inter_token = BulkHistogram(
            "octavo_inter_token_seconds", "Time between output tokens of a choice.", _TOKEN_BUCKETS
        )
        registry.register(self.inter_token)
        ProcessCollector(registry=registry)
        registry.register(LogCollector())
        self.prompt_tokens = Counter(
            "octavo_prompt_tokens", "Prompt tokens of accepted requests.", registry=registry
        )
        self.cached_tokens = Counter(
            "octavo_cached_prompt_tokens", "Of these, found in a prefix cache.", registry=registry
        )
        self.output_tokens = Counter(
            "octavo_output_tokens", "Output tokens that came from workers.", registry=registry
        )
        self.preemptions = Counter(
            "octavo_preemptions", "Times that a choice was preempted.", registry=registry
        )
        self.recoveries = Counter(
            "octavo_recoveries", "Times that a choice moved on after a lost worker.", registry=registry
        )
        self.tokenize = Histogram(
            "octavo_tokenize_seconds",
            "From arrival to the prompt's token ids.",
            buckets=_WAIT_BUCKETS,
            registry=registry,
        )
        self.plan = Histogram(
            "octavo_plan_seconds",
            "Time that the core takes for a report and the plans that follow.",
            buckets=_PLAN_BUCKETS,
            registry=registry,
        )
        self.deliver = Histogram(
            "octavo_deliver_seconds",
            "Time that the shell takes to hand out what the core decided.",
            buckets=_PLAN_BUCKETS,
            registry=registry,
        )
        self.step = Histogram(
            "octavo_step_seconds",
            "Time that a worker's runner took for a step.",
            ["worker"],
            buckets=_TOKEN_BUCKETS,
            registry=registry,
        )
        self.bubble = Counter(
            "octavo_bubble_seconds",
            "Time that a worker waited for a plan while it had sequences.",
            ["worker"],
            registry=registry,
        )
        self.tenant_outcomes = Counter(
            "octavo_tenant_requests",
            "Requests of a tenant that ended, by how.",
            ["tenant", "outcome"],
            registry=registry,
        )
        self.tenant_tokens = Counter(
            "octavo_tenant_tokens",
            "Tokens that were computed for a tenant: prompt, without what a cache had, and output.",
            ["tenant", "kind"],
            registry=registry,
        )
        self.quota_refusals = Counter(
            "octavo_quota_refusals",
            "Requests that a tenant's quota did not allow.",
            ["tenant", "quota"],
            registry=registry,
        )
        self.access_refusals = Counter(
            "octavo_access_refusals",
            "Calls and requests refused for their API key, or for want of one.",
            ["reason"],
            registry=registry,
        )
        self.key_file_broken = Gauge(
            "octavo_key_file_broken",
            "1 when the key file cannot be used as it is, and an older one is in force.",
            registry=registry,
        )
        self.devices = Gauge(
            "octavo_devices",
            "GPUs of the workers that are attached, or 1 for each without.",
            registry=registry,
        )
        Gauge("octavo_rss_bytes", "Resident memory of the scheduler.", registry=registry).set_function(
            rss_bytes
        )
        self.max_rss = Gauge(
            "octavo_max_rss_bytes", "Resident memory at which new requests are refused.", registry=registry
        )
        self.price = Gauge(
            "octavo_price_per_gpu_hour",
            "As configured, in any currency; 0 without a price.",
            registry=registry,
        )
        self.worker_losses = Counter(
            "octavo_worker_losses", "Times that a worker was lost.", ["worker"], registry=registry
        )
        self.level_changes = Counter(
            "octavo_level_changes",
            "Changes of the degradation level.",
            ["model", "former", "level"],
            registry=registry,
        )
        self.prediction_error = Histogram(
            "octavo_prediction_error_seconds",
            "What came of a request less what was predicted of it.",
            ["of"],
            buckets=_ERROR_BUCKETS,
            registry=registry,
        )
        self.trimmed_tokens = Counter(
            "octavo_trimmed_prompt_tokens", "Prompt tokens cut away under load.", registry=registry
        )
        self.clamped = Counter(
            "octavo_clamped_requests", "Requests whose max_tokens was lowered.", registry=registry
        )

        self._refused: dict[tuple[str, int, str], tuple[Counter, Counter]] = {}

    def refused(self, transport: str, priority: int, reason: str) -> None:
        """Count an arrival that there was no room for."""
        key = (transport, priority if priority in _PRIORITIES else Priority.STANDARD, reason)
        counters = self._refused.get(key)
        if counters is None:
            # Looking a counter up by its labels costs more than counting.
            name = Priority(key[1]).name.lower()
            counters = self.arrivals.labels(transport), self.outcomes.labels("", name, reason)
            self._refused[key] = counters
        for counter in counters:
            counter.inc()

    def watch(self, snapshot: Callable[[], CoreSnapshot]) -> None:
        """Read queues and workers from the core whenever metrics are collected."""
        self.registry.register(_CoreCollector(snapshot))


def watch_core(metrics: SchedulerMetrics, snapshot: Callable[[], CoreSnapshot]) -> None:
    """Show the core's figures, which this event loop gives, to threads that collect metrics."""
    loop = asyncio.get_running_loop()

    async def on_loop() -> CoreSnapshot:
        return snapshot()

    metrics.watch(lambda: asyncio.run_coroutine_threadsafe(on_loop(), loop).result(_SCRAPE_TIMEOUT_S))


class PlanLogCollector(Collector):
    """Whether the plan log is written, and what it has missed."""

    def __init__(self, health: PlanLogHealth) -> None:
        self._health = health

    def collect(self) -> Iterable[Metric]:
        """Yield the figures of the moment."""
        health = self._health
        writing = 0 if health.problem is not None else 1
        yield _gauge("octavo_plan_log_writing", "1 while the plan log is written.", [], [([], writing)])
        yield CounterMetricFamily(
            "octavo_plan_log_entries_missed", "Entries that are in no file.", health.entries_missed
        )


class _CoreCollector(Collector):
    """Gauges that are read and not kept, so that nothing polls."""

    def __init__(self, snapshot: Callable[[], CoreSnapshot]) -> None:
        self._snapshot = snapshot
        self._idle_s = 0.0

    def describe(self) -> Iterable[Metric]:
        """Say nothing: asking the core at registration would be too early."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield the gauges of the moment."""
        snapshot = self._snapshot()
        yield _gauge("octavo_live_requests", "Requests in the core.", [], [([], snapshot.live_requests)])
        yield from _overload_metrics(snapshot.overload)
        for name, documentation, field in (
            ("octavo_waiting_sequences", "Sequences that wait.", "waiting"),
            ("octavo_waiting_tokens", "Tokens of the sequences that wait.", "waiting_tokens"),
            ("octavo_oldest_wait_seconds", "Wait of the oldest.", "oldest_wait_s"),
        ):
            samples = [
                ([queue.model, queue.priority.name.lower()], float(getattr(queue, field)))
                for queue in snapshot.queues
            ]
            yield _gauge(name, documentation, ["model", "priority"], samples)
        yield from _worker_metrics(snapshot.workers)
        yield from _of_model_servers(snapshot)
        yield from self._usage_metrics(snapshot.usage)

    def _usage_metrics(self, usage: UsageSnapshot) -> Iterable[Metric]:
        used = CounterMetricFamily(
            "octavo_tenant_device_seconds",
            "Time of steps that was computed for a tenant, times the devices of the worker.",
            labels=["tenant"],
        )
        for tenant, seconds in usage.tenants.items():
            used.add_metric([tenant], seconds)
        yield used
        # Should a worker's clock run a little fast against ours, it stands still for a moment.
        self._idle_s = max(self._idle_s, usage.idle_s)
        idle = "Time that workers had no step to run, times their devices."
        yield CounterMetricFamily("octavo_idle_device_seconds", idle, self._idle_s)
        nobody = "Time of steps that computed nothing for anybody, times the devices."
        yield CounterMetricFamily("octavo_unassigned_device_seconds", nobody, usage.unassigned_s)


def _worker_metrics(workers: Sequence[WorkerSnapshot]) -> Iterable[Metric]:
    models = sorted({worker.model for worker in workers})
    yield _gauge(
        "octavo_workers",
        "Workers that are attached.",
        ["model"],
        [([model], sum(worker.model == model for worker in workers)) for model in models],
    )
    yield _gauge(
        "octavo_running_sequences",
        "Sequences on a worker.",
        ["worker"],
        [([worker.worker_id], worker.running) for worker in workers],
    )
    yield _gauge(
        "octavo_kv_blocks",
        "Blocks of a worker's pool, by state.",
        ["worker", "state"],
        [
            ([worker.worker_id, state], getattr(worker.pool, state))
            for worker in workers
            for state in ("free", "evictable", "active", "pinned", "host_free")
        ],
    )
    for name, documentation, field in (
        (
            "octavo_prefix_hit_tokens",
            "Prompt tokens found on the device.",
            "hit_tokens",
        ),
        ("octavo_prefix_miss_tokens", "Prompt tokens not found in a cache.", "miss_tokens"),
        ("octavo_prefix_host_hit_tokens", "Prompt tokens found in the host tier.", "host_hit_tokens"),
    ):
        family = CounterMetricFamily(name, documentation, labels=["worker"])
        for worker in workers:
            family.add_metric([worker.worker_id], getattr(worker.pool, field))
        yield family


def _of_model_servers(snapshot: CoreSnapshot) -> Iterable[Metric]:
    """Yield what Kubernetes' inference gateway asks of a model server, by the names that vLLM gives it."""
    models = sorted({queue.model for queue in snapshot.queues})
    workers = {model: [one for one in snapshot.workers if one.model == model] for model in models}
    waiting = [
        ([model], float(sum(queue.waiting for queue in snapshot.queues if queue.model == model)))
        for model in models
    ]
    running = [([model], float(sum(one.running for one in workers[model]))) for model in models]
    used = [([model], _share_of_blocks(workers[model])) for model in models]
    yield _gauge("vllm:num_requests_waiting", "Sequences that wait.", ["model_name"], waiting)
    yield _gauge("vllm:num_requests_running", "Sequences on workers.", ["model_name"], running)
    yield _gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", ["model_name"], used)


def _share_of_blocks(workers: Sequence[WorkerSnapshot]) -> float:
    total = sum(one.geometry.num_blocks for one in workers)
    return sum(one.pool.active for one in workers) / total if total else 0.0


def _overload_metrics(overload: Sequence[OverloadSnapshot]) -> Iterable[Metric]:
    yield _gauge(
        "octavo_degradation_level",
        "0 normal, 1 trim, 2 shed batch, 3 shed standard, 4 open.",
        ["model"],
        [([model.model], model.level) for model in overload],
    )
    yield _gauge(
        "octavo_pressure",
        "Inputs of the degradation level.",
        ["model", "input"],
        [([m.model, name], value) for m in overload for name, value in m.pressure.fields().items()],
    )
    yield _gauge(
        "octavo_predicted_ttft_seconds",
        "What a newcomer of the standard class has to expect.",
        ["model"],
        [([m.model], m.expected.ttft_s) for m in overload if m.expected is not None],
    )


def _gauge(
    name: str, documentation: str, labels: list[str], samples: Iterable[tuple[list[str], float]]
) -> Metric:
    family = GaugeMetricFamily(name, documentation, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family
