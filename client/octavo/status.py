"""What `status()` returns: queues, workers and rates of a scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.keys import Quotas
from octavo.protocol.steps import Priority
from octavo.types import ModelInfo


@dataclass(frozen=True, slots=True)
class PlanLogStatus:
    """Whether the plan log is written."""

    path: str
    entries_missed: int
    """Entries that are in no file, since start."""
    problem: str | None
    """Why nothing is written at the moment; None while entries are."""


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """Sequences that wait for one model in one class."""

    model: str
    priority: Priority | None
    """None for a class that only a later version knows."""
    waiting: int
    waiting_tokens: int
    oldest_wait_s: float


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """Blocks of a worker's pool: free + evictable + active == total."""

    total: int
    free: int
    evictable: int
    active: int
    pinned: int
    host_total: int
    host_free: int
    largest_free_run: int
    block_size: int
    internal_fragmentation: float
    external_fragmentation: float
    hit_tokens: int
    miss_tokens: int
    host_hit_tokens: int
    copied_out_bytes: int
    copied_in_bytes: int
    copy_out_us_per_block: float
    copy_in_us_per_block: float
    recompute_saved_tokens: int
    copies_skipped_blocks: int
    step_active: int
    """Blocks that were active while the last step ran: with what it finished."""
    step_internal_fragmentation: float


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker as its scheduler sees it. `state` is connecting, ready, draining, held (by
    another scheduler) or lost."""

    worker_id: str
    address: str
    model: str
    state: str
    running: int
    pool: PoolStatus
    step_s: float
    bubble_share: float
    steps: int
    max_num_seqs: int
    max_num_batched_tokens: int
    runner: str
    devices: int = 1
    """GPUs that it computes on together, 1 where it has none; 0 while it is not attached."""
    limits_reason: str = ""
    """How max_num_seqs and max_num_batched_tokens came about."""
    held_by: str = ""
    """The scheduler that holds it, when that is another one."""
    held_by_endpoint: str = ""
    """Where clients reach that one, if it is known."""


@dataclass(frozen=True, slots=True)
class TenantStatus:
    """What a tenant has going on, and since start. Tokens are those that were computed."""

    tenant: str
    weight: float
    requests_in_flight: int
    waiting_requests: int
    """Requests without output yet. A request for n choices counts as n."""
    waiting_tokens: int
    """Tokens to be computed before those have output."""
    arrivals: int
    over_quota: int
    """Of the arrivals, refused for a quota."""
    prompt_tokens: int
    output_tokens: int
    tokenized_bytes: int
    """Input that tokenizers have worked on."""
    device_s: float
    """Its shares of the time of steps, times the devices of their workers."""
    quotas: Quotas


@dataclass(frozen=True, slots=True)
class Rates:
    """Over the last ten seconds."""

    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    queue_p50_s: float
    queue_p99_s: float
    cost_per_1k_tokens: float | None
    """Of output, from the configured price per GPU hour; None without one, and while nothing comes out."""
    itl_p50_s: float = 0.0
    """Between output tokens of a choice."""
    itl_p99_s: float = 0.0
    refused_per_s: float = 0.0
    """Requests that ended without output for want of room, time or workers."""


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """The control loop at one moment."""

    uptime_s: float
    level: int
    live_requests: int
    waiting: int
    running: int
    rates: Rates


@dataclass(frozen=True, slots=True)
class OverloadStatus:
    """Degradation of one model and its inputs; docs/overload.md has the thresholds."""

    model: str
    level: int
    half_open: bool
    """The breaker lets probes in."""
    backlog: float
    backlog_interactive: float
    wait: float
    wait_interactive: float
    blocks: float
    misses: float
    stalled_s: float
    predicted_wait_s: float | None
    """What a newcomer of the standard class has to expect; None while too little is known."""
    predicted_ttft_s: float | None
    trim_prompt_tokens: int | None
    """Caps in force for requests that may be trimmed; None at level 0."""
    trim_max_tokens: int | None


@dataclass(frozen=True, slots=True)
class PinStatus:
    """A pinned prefix."""

    name: str
    model: str
    blocks: int
    workers: tuple[str, ...]
    """Ids of the attached workers that keep it; the others have no room within their pin budget."""


@dataclass(frozen=True, slots=True)
class Status:
    """A scheduler. The sum of `outcomes` and `live_requests` is `arrivals`."""

    scheduler_id: str
    version: str
    uptime_s: float
    level: int
    draining: bool
    queues: tuple[QueueStatus, ...]
    workers: tuple[WorkerStatus, ...]
    outcomes: Mapping[str, int]
    arrivals: int
    live_requests: int
    rates: Rates
    tenants: tuple[TenantStatus, ...] = ()
    history: tuple[HistoryPoint, ...] = ()
    """Where it was asked for: the last ten minutes, one point each two seconds, oldest first. While
    watching, those since the status before."""
    overload: tuple[OverloadStatus, ...] = ()
    """What leads to `level`, one entry per model; empty when the ladder is off."""
    key_file_problem: str | None = None
    """Why the key file as it is now cannot be used; the last good one is in force."""
    log_lines_dropped: int = 0
    """Lines of the scheduler's own log that could not be written, since start."""
    plan_log: PlanLogStatus | None = None
    """None without a plan log."""
    rss_bytes: int = 0
    """Resident memory of the scheduler."""
    max_rss_bytes: int = 0
    """That at which it refuses new requests; 0 when it does not say."""
    pins: tuple[PinStatus, ...] = ()
    """By model and name."""
    models: tuple[ModelInfo, ...] = ()
    """Those that requests may name."""
    rank: int = 0
    """0 is preferred: this scheduler takes workers over from those of a higher rank."""
    endpoint: str = ""
    """Where clients reach it, if it knows."""
    idle_device_s: float = 0.0
    """Of attached workers between steps, times their devices, since start."""
    unassigned_device_s: float = 0.0
    """Of steps that computed nothing for anybody. With this, idle time and tenants add up."""
    standby: str | None = None
    """Where clients reach the one that stands by for it; None when there is none."""


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """What a tenant has used in a while."""

    tenant: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    device_s: float


@dataclass(frozen=True, slots=True)
class UsagePeriod:
    """What was used from one moment to another, in seconds since the epoch."""

    from_unix_s: float
    until_unix_s: float
    tenants: tuple[TenantUsage, ...]
    idle_device_s: float
    unassigned_device_s: float


@dataclass(frozen=True, slots=True)
class UsageReport:
    """Who used the devices, oldest first."""

    periods: tuple[UsagePeriod, ...]
    price_per_gpu_hour: float | None = None
