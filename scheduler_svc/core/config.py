"""Settings of the scheduler's core."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.protocol.steps import Priority

from scheduler_svc.core.overload import OverloadConfig


def _aging() -> dict[Priority, float]:
    return {Priority.INTERACTIVE: 1.0, Priority.STANDARD: 10.0, Priority.BATCH: 60.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticConfig:
    """The static control arm: length buckets, fill or timeout, one batch in, one batch out."""

    batch_size: int = 8
    timeout_s: float = 0.5
    bucket_bounds: tuple[int, ...] = ()
    """Upper prompt lengths of the buckets; longer prompts share a last one. Empty: one bucket."""
    hold_finished: bool = True
    """Rows that have finished are computed until the batch ends; False is the no-waste variant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """How the core schedules. Durations are seconds; a worker's own limits may only be lowered."""

    policy: str = "fcfs"
    """Order within a class: a name of `POLICIES` in `policies.py`."""
    static: StaticConfig | None = None
    """Set: continuous batching is replaced by the static control arm."""
    window: int = 2
    """Plans outstanding per worker at most."""
    max_waiting_requests: int = 500
    max_waiting_tokens: int | None = None
    overload: OverloadConfig | None = None
    """Set: levels of degradation, and refusal of what cannot meet its deadline."""
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_partial_prefills: int = 4
    """Sequences whose prefill may be spread over steps at the same time."""
    chunked_prefill: bool = True
    prefix_caching: bool = True
    watermark: float = 0.01
    """Share of a pool that admissions leave free for the growth of what runs."""
    lookahead: int = 8
    """Waiting sequences that are considered when the first does not fit."""
    lookahead_age_s: float = 2.0
    """Once the first has waited this long for blocks, nobody passes it."""
    aging_s: dict[Priority, float] = field(default_factory=_aging)
    """Wait after which a class takes its turn although higher ones wait."""
    aging_stride: int = 4
    """An aged class takes one start in this many."""
    starvation_age_s: float = 30.0
    """Within a class, a sequence that has waited this long goes before the policy's choice."""
    max_preemptions: int = 3
    """Preempted this often, a sequence is protected."""
    max_worker_deaths: int = 2
    """Workers that must have died computing nothing else before a sequence is quarantined, at least."""
    worker_drain_grace_s: float = 5.0
    """What a draining worker runs after so long moves to others, as they have room."""
    step_watchdog_s: float = 30.0
    """A worker that owes a report for longer is lost."""
    target_itl_s: float | None = None
    """Latency-critical mode: prefill in a step is capped so that it takes about this long."""
    tenant_weights: dict[str, float] = field(default_factory=dict)
    """Shares under `fair`; 1 for tenants not named."""

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window}")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark must be in [0, 1), got {self.watermark}")
        if self.max_partial_prefills < 1:
            raise ValueError(f"max_partial_prefills must be at least 1, got {self.max_partial_prefills}")
