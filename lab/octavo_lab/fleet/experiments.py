"""What is compared, on which traffic, and what came of each run."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np

from octavo_lab.datasets.lengths import Drawn
from octavo_lab.fleet import workload
from octavo_lab.fleet.arms import ARMS, LATE, NO_TROUBLE, Trouble, simulate
from octavo_lab.fleet.workload import FleetConfig, Job
from octavo_lab.load.statistics import Interval, mean_interval
from octavo_lab.sim import SimResult
from scheduler_svc.core import CoreConfig

NUM_QUANTILES: Final = 401
MOONCAKE_SCALE: Final = 8
HEALTHY: Final = "healthy"
DEGRADED: Final = "degraded"
PREFIX: Final = "prefix"
POISSON: Final = "poisson"
CONDITIONS: Final = {
    HEALTHY: "all workers well",
    DEGRADED: "one worker three times slower, another drains at half time",
    PREFIX: "requests that share prefixes",
}
STANDARD_FLEET: Final = FleetConfig()
ARMS_OF: Final[dict[str, tuple[str, ...]]] = {
    HEALTHY: ARMS,
    DEGRADED: (LATE, "round robin", "least requests", "least tokens"),
    PREFIX: (LATE, "round robin", "least tokens"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTraffic:
    """How much of which trace, and how dense."""

    requests: int = 3000
    load: float = 0.9
    """Share of the capacity of the fleet when nothing ails it and nothing is cached."""
    traces: Path | None = None
    """Folder of the public traces; None: as `read_trace` has it."""
    trace: str = "azure-conv"
    """One of `traces.TRACES`, or POISSON; where prefixes do not matter."""
    lengths: Drawn = Drawn(1000, 200, 1.0)
    """Of the requests of POISSON."""
    plan_log: Path | None = None
    """Replaces the trace by the requests of a plan log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One arm, on one drawing of the traffic, in one condition."""

    condition: str
    arm: str
    seed: int
    traffic: FleetTraffic
    fleet: FleetConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOutcome:
    """What the clients of one run saw. Times are seconds."""

    condition: str
    arm: str
    seed: int
    requests: int
    failed: int
    span_s: float
    """From the first request to the last."""
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    ttft_mean_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    hit_rate: float
    """Share of prompt tokens that came from a cache."""
    bound_hit_rate: float
    """The same of a single cache without bounds."""
    ttft_quantiles_s: tuple[float, ...] = field(repr=False)
    """At equal steps from the least to the greatest."""


def fleet_for(condition: str, fleet: FleetConfig = STANDARD_FLEET) -> FleetConfig:
    """Return the fleet of a condition, made from one that no condition has changed.

    Where prefixes matter all lengths of the trace are an eighth of what they were, to suit a small model;
    the longest still need a longer context than the demo model has.
    """
    return replace(fleet, prefix_caching=True, max_model_len=16384) if condition == PREFIX else fleet


def jobs_of(run: Run) -> tuple[list[Job], float]:
    """Return the jobs of a run, and the hit rate that a cache without bounds would have on them."""
    traffic, fleet = run.traffic, run.fleet
    if run.condition == PREFIX:
        trace = workload.mooncake(fleet, MOONCAKE_SCALE, traffic.traces)
        part = workload.at_load(workload.window(trace, traffic.requests, run.seed), fleet, traffic.load)
        bound = workload.unbounded_hit_rate(part, MOONCAKE_SCALE)
        return workload.jobs(part, fleet, MOONCAKE_SCALE), bound
    if traffic.plan_log is not None:
        return workload.jobs_of_plan_log(traffic.plan_log, fleet, traffic.load), 0.0
    if traffic.trace == POISSON:
        drawn = traffic.lengths.draw(traffic.requests, fleet.max_model_len, run.seed)
        part = workload.at_random_times(drawn, run.seed)
    else:
        trace = workload.azure(traffic.trace, fleet, traffic.traces)
        part = workload.window(trace, traffic.requests, run.seed)
    return workload.jobs(workload.at_load(part, fleet, traffic.load), fleet), 0.0


def execute(run: Run) -> FleetOutcome:
    """Simulate one run.

    Raises:
        TraceNotFoundError: the trace is not there.
    """
    jobs, bound = jobs_of(run)
    first, last = jobs[0][0], jobs[-1][0]
    span_s = last - first
    trouble = NO_TROUBLE
    if run.condition == DEGRADED:
        half_time_s = (first + last) / 2
        trouble = Trouble(slow_workers=(0,), slow_factor=3.0, draining_worker=1, drains_at_s=half_time_s)
    # As they come, but nobody is refused.
    config = CoreConfig(max_waiting_requests=10**9, prefix_caching=run.fleet.prefix_caching)
    results = simulate(run.arm, jobs, run.fleet, config, seed=run.seed, trouble=trouble)
    return _outcome(run, results, span_s, bound)


def _outcome(run: Run, results: Sequence[SimResult], span_s: float, bound: float) -> FleetOutcome:
    ttfts = np.array([result.ttft_s for result in results if result.ttft_s is not None])
    tpots = np.array([result.tpot_s for result in results if result.tpot_s is not None])
    p50, p90, p99 = np.percentile(ttfts, (50, 90, 99)).tolist()
    tpot_p50, tpot_p99 = np.percentile(tpots, (50, 99)).tolist()
    cached = sum(result.cached_tokens for result in results)
    return FleetOutcome(
        condition=run.condition,
        arm=run.arm,
        seed=run.seed,
        requests=len(results),
        failed=sum(not result.completed for result in results),
        span_s=span_s,
        ttft_p50_s=p50,
        ttft_p90_s=p90,
        ttft_p99_s=p99,
        ttft_mean_s=float(ttfts.mean()),
        tpot_p50_s=tpot_p50,
        tpot_p99_s=tpot_p99,
        hit_rate=cached / sum(result.prompt_tokens for result in results),
        bound_hit_rate=bound,
        ttft_quantiles_s=tuple(np.quantile(ttfts, np.linspace(0, 1, NUM_QUANTILES)).tolist()),
    )


def plan_runs(
    conditions: Sequence[str], traffic: FleetTraffic, num_seeds: int, fleet: FleetConfig = STANDARD_FLEET
) -> list[Run]:
    """Return the runs of an experiment, the seeds of an arm apart, so that a few tell something early."""
    return [
        Run(condition=condition, arm=arm, seed=seed, traffic=traffic, fleet=fleet_for(condition, fleet))
        for seed in range(1, 1 + num_seeds)
        for condition in conditions
        for arm in ARMS_OF[condition]
    ]


def execute_all(runs: Sequence[Run], processes: int) -> Iterator[FleetOutcome]:
    """Yield outcomes as they come, from so many processes; 1 is this one."""
    if processes == 1:
        yield from map(execute, runs)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        for future in as_completed([pool.submit(execute, run) for run in runs]):
            yield future.result()


def plus_minus(one: Interval) -> str:
    """Return a mean over seeds, and half of its 95% confidence interval where there are seeds enough."""
    return f"{one.value:.3g}" if one.high is None else f"{one.value:.3g} ± {one.high - one.value:.2g}"


def over_seeds(
    outcomes: Sequence[FleetOutcome], condition: str, arm: str, value: Callable[[FleetOutcome], float]
) -> Interval:
    """Estimate something of an arm."""
    return mean_interval([value(one) for one in outcomes if (one.condition, one.arm) == (condition, arm)])


def ratio(
    outcomes: Sequence[FleetOutcome],
    condition: str,
    arms: tuple[str, str],
    value: Callable[[FleetOutcome], float],
) -> Interval:
    """Estimate the ratio of the first arm to the second, seed by seed: both had the same requests."""
    over, under = (
        {one.seed: value(one) for one in outcomes if (one.condition, one.arm) == (condition, arm)}
        for arm in arms
    )
    return mean_interval([over[seed] / under[seed] for seed in over if seed in under])
