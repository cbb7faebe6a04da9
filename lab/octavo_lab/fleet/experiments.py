"""What is compared, on which traffic at a stated load, and what came of each run."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
from octavo.protocol.steps import KEY_BYTES

from octavo_lab.datasets.lengths import Drawn
from octavo_lab.fleet.arms import ARMS, LATE, STANDARD_FLEET, FleetConfig, Job, simulate
from octavo_lab.load.statistics import Interval, mean_interval
from octavo_lab.sim import compressed, poisson, request_of
from octavo_lab.traces import MOONCAKE, MOONCAKE_BLOCK_TOKENS, TraceRequest, read_trace
from scheduler_svc.core import CoreConfig
from scheduler_svc.planlog import PlanLogError, replayed_requests

NUM_QUANTILES: Final = 401
MOONCAKE_SCALE: Final = 8
START_S: Final = 1.0
"""When the first request comes: all workers have attached by then."""
HEALTHY: Final = "healthy"
DEGRADED: Final = "degraded"
PREFIX: Final = "prefix"
POISSON: Final = "poisson"
CONDITIONS: Final = {
    HEALTHY: "all workers well",
    DEGRADED: "one worker three times slower, another drains at half time",
    PREFIX: "requests that share prefixes",
}
ARMS_OF: Final[dict[str, tuple[str, ...]]] = {
    HEALTHY: tuple(ARMS),
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


Value = Callable[[FleetOutcome], float]


def plan_runs(
    conditions: Sequence[str], traffic: FleetTraffic, num_seeds: int, fleet: FleetConfig = STANDARD_FLEET
) -> list[Run]:
    """Return the runs of an experiment, the seeds of an arm apart, so that a few tell something early.

    Where prefixes matter all lengths of the trace are an eighth of what they were, to suit a small model;
    the longest still need a longer context than the demo model has.
    """
    caching = replace(fleet, worker=replace(fleet.worker, prefix_caching=True, max_model_len=16384))
    fleets = {HEALTHY: fleet, DEGRADED: fleet, PREFIX: caching}
    return [
        Run(condition=condition, arm=arm, seed=seed, traffic=traffic, fleet=fleets[condition])
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


def execute(run: Run) -> FleetOutcome:
    """Simulate one run; TraceNotFoundError, PlanLogError: there is no such traffic."""
    jobs, bound = _jobs_of(run)
    # As they come, but nobody is refused.
    config = CoreConfig(max_waiting_requests=10**9, prefix_caching=run.fleet.worker.prefix_caching)
    degraded = run.condition == DEGRADED
    results = simulate(run.arm, jobs, run.fleet, config, seed=run.seed, degraded=degraded)
    ttfts = np.array([result.ttft_s for result in results if result.ttft_s is not None])
    p50, p90, p99 = np.percentile(ttfts, (50, 90, 99)).tolist()
    tpots = [result.tpot_s for result in results if result.tpot_s is not None]
    tpot_p50, tpot_p99 = np.percentile(tpots, (50, 99)).tolist()
    cached = sum(result.cached_tokens for result in results)
    return FleetOutcome(
        condition=run.condition,
        arm=run.arm,
        seed=run.seed,
        requests=len(results),
        failed=sum(not result.completed for result in results),
        span_s=jobs[-1][0] - jobs[0][0],
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


# -- traffic


def _jobs_of(run: Run) -> tuple[list[Job], float]:
    """Return the jobs of a run, and the hit rate that a cache without bounds would have on them."""
    traffic, fleet, size = run.traffic, run.fleet, run.fleet.worker
    shared = run.condition == PREFIX
    if traffic.plan_log is not None and not shared:
        return _jobs_of_plan_log(traffic.plan_log, fleet, traffic.load), 0.0
    scale = MOONCAKE_SCALE if shared else 1
    if traffic.trace == POISSON and not shared:
        times = poisson(1.0, random.Random(run.seed))
        drawn = traffic.lengths.draw(traffic.requests, size.max_model_len, run.seed)
        part = [replace(one, at=at) for one, at in zip(drawn, times, strict=False)]
    else:
        trace = _trace(MOONCAKE if shared else traffic.trace, size.max_model_len, scale, traffic.traces)
        start = random.Random(run.seed).randint(0, max(0, len(trace) - traffic.requests))
        part = trace[start : start + traffic.requests]
        part = [replace(one, at=one.at - part[0].at) for one in part]
    part = _at_load(part, fleet, traffic.load)
    specs = [request_of(one, f"r{number}", number, size.block_size, scale) for number, one in enumerate(part)]
    keyed = [replace(spec, root_key=number.to_bytes(KEY_BYTES, "big")) for number, spec in enumerate(specs)]
    jobs = [(START_S + one.at, spec) for one, spec in zip(part, keyed, strict=True)]
    return jobs, _unbounded_hit_rate(part, scale) if shared else 0.0


def _trace(name: str, context: int, scale: int, folder: Path | None) -> list[TraceRequest]:
    """Read a trace with all lengths divided by `scale`; what no worker can hold is left out.

    The prefixes that requests share stay what they are, though each hash stands for fewer tokens: `scale`
    divides MOONCAKE_BLOCK_TOKENS.
    """
    kept = []
    for one in read_trace(name, folder):
        prompt, answer = max(1, one.prompt_tokens // scale), max(1, one.output_tokens // scale)
        if prompt + answer <= context:
            kept.append(replace(one, prompt_tokens=prompt, output_tokens=answer))
    return kept


def _jobs_of_plan_log(path: Path, fleet: FleetConfig, load: float) -> list[Job]:
    logged = replayed_requests(path)
    asked = [
        TraceRequest(at, len(spec.prompt_token_ids), spec.sampling.max_tokens or 1) for at, spec in logged
    ]
    if len(asked) < 2 or asked[-1].at <= asked[0].at:
        raise PlanLogError(f"{path}: fewer than two requests were answered")
    moved = _at_load(asked, fleet, load)
    return [
        (START_S + one.at, replace(spec, model=fleet.worker.model, adapter=None))
        for one, (_, spec) in zip(moved, logged, strict=True)
    ]


def _at_load(requests: Sequence[TraceRequest], fleet: FleetConfig, load: float) -> list[TraceRequest]:
    """Return requests moved together or apart so that they offer a share of the fleet's capacity."""
    capacity_per_s = fleet.num_workers * len(requests) / sum(_work_s(one, fleet) for one in requests)
    rate_per_s = len(requests) / (requests[-1].at - requests[0].at)
    return compressed(requests, load * capacity_per_s / rate_per_s)


def _work_s(one: TraceRequest, fleet: FleetConfig) -> float:
    """Return the seconds of a worker that a request costs when nothing of it is cached.

    Its share of steps that are full: the fixed cost of a step is divided among its tokens, all
    else is counted as the step-time model does.
    """
    times, prompt, decodes = fleet.worker.step_times, one.prompt_tokens, one.output_tokens - 1
    context = decodes * prompt + decodes * (decodes + 1) / 2
    seconds = times.per_prefill_token * prompt + times.per_prefill_token_squared * prompt**2
    seconds += times.per_decode * decodes + times.per_context_token * context
    tokens = prompt + one.output_tokens
    return seconds + (times.base + times.prefill_base) * tokens / fleet.worker.max_num_batched_tokens


def _unbounded_hit_rate(requests: Sequence[TraceRequest], scale: int) -> float:
    """Return the share of prompt tokens that a cache without bounds would have held."""
    seen: set[int] = set()
    hits = 0
    for one in requests:
        known = next((at for at, key in enumerate(one.prefix) if key not in seen), len(one.prefix))
        hits += min(known * MOONCAKE_BLOCK_TOKENS // scale, one.prompt_tokens)
        seen.update(one.prefix)
    return hits / sum(one.prompt_tokens for one in requests)


# -- estimates


def plus_minus(one: Interval) -> str:
    """Return a mean over seeds, and half of its 95% confidence interval where there are seeds enough."""
    return f"{one.value:.3g}" if one.high is None else f"{one.value:.3g} ± {one.high - one.value:.2g}"


def by_seed(outcomes: Sequence[FleetOutcome], condition: str, arm: str, value: Value) -> dict[int, float]:
    """Return something of an arm, by the seed of the traffic."""
    return {one.seed: value(one) for one in outcomes if (one.condition, one.arm) == (condition, arm)}


def ratio(outcomes: Sequence[FleetOutcome], condition: str, arms: tuple[str, str], value: Value) -> Interval:
    """Estimate the ratio of the first arm to the second, seed by seed: both had the same requests."""
    over, under = (by_seed(outcomes, condition, arm, value) for arm in arms)
    return mean_interval([over[seed] / under[seed] for seed in over if seed in under])
