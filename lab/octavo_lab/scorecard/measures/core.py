"""The scheduler's core: what it promises, and what it costs. All in simulation, with the real core."""

from __future__ import annotations

import functools
import statistics
from dataclasses import asdict

from octavo_lab.scorecard import Measured, at_least, at_most, entry
from octavo_lab.scorecard.core_workload import (
    admissions,
    aging,
    capacity_per_s,
    deadlines_met,
    gaps_under_prompts,
    percentile,
    steady_decode,
    tenant_ttft_s,
)
from octavo_lab.sim import InvariantError
from octavo_lab.sim.chaos import Chaos, ChaosResult, ChaosSetting

MILLION = 10**6
TARGET_ITL_S = 0.040


@functools.cache
def _million() -> ChaosResult | str:
    """Run a million steps with random faults; return what came of it, or the promise that was broken."""
    try:
        return Chaos(None, ChaosSetting(rate_per_s=5.0), seed=2026).run(MILLION)
    except InvariantError as error:
        return str(error)


@entry(
    "core.sim_violations", "promises broken in a million faulty steps", "violations", at_most(0), long=True
)
def measure_sim_violations() -> Measured:
    """Count broken promises; the monitor stops at the first."""
    result = _million()
    if isinstance(result, str):
        return Measured(1.0, {"broken": result})
    busy_enough = result.mean_running >= 8
    return Measured(0.0 if busy_enough else 1.0, asdict(result))


@entry("core.sim_million_cpu_s", "CPU time of a million faulty steps", "s", at_most(300), long=True)
def measure_sim_million_cpu_s() -> float:
    """Time the same run."""
    result = _million()
    return result.cpu_s if isinstance(result, ChaosResult) else float("nan")


@entry("core.report_to_plan_us_256", "report to next plan, 256 sequences decode, median", "us", at_most(600))
def measure_report_to_plan_us_256() -> float:
    """Time steady decode with prefix caching on: every sixteenth token makes a key."""
    # The best of three medians: neighbours on the machine only ever add.
    return min(steady_decode(1, 256, 400).step_us() for _ in range(3))


@entry("core.growth_1000_workers", "cost of a step among 1000 workers over that of one", "x", at_most(2))
def measure_growth_1000_workers() -> Measured:
    """Compare steps of 8 sequences, in turns: single ones differ by half on a busy machine."""
    rounds = [[steady_decode(workers, 8, 1000).step_us() for workers in (1, 1000)] for _ in range(5)]
    return Measured(
        statistics.median(many / one for one, many in rounds),
        {"one_us": [one for one, _ in rounds], "thousand_us": [many for _, many in rounds]},
    )


@entry("core.admit_us_1000_workers", "admitting one request among 1000 workers, median", "us", at_most(1000))
def measure_admit_us_1000_workers() -> float:
    """Time a submit that finds its worker, half of them idle, and sends the plan."""
    return 1e6 * statistics.median(admissions(1000, 300).submit_s)


@entry("core.max_wait_vs_bound", "longest wait behind higher classes over its bound", "x", at_most(1))
def measure_max_wait_vs_bound() -> Measured:
    """Flood a system with interactive requests and watch the others."""
    watch = aging(90.0)
    return Measured(watch.worst if watch.judged else float("nan"), {"judged": watch.judged})


@entry("core.jitter_ms", "P99 - P50 of the time between tokens while prompts arrive, latency critical", "ms")
def measure_jitter_ms() -> Measured:
    """Cap prefills for a target of 40 ms; the same without a cap is in the details."""
    capped, free = (gaps_under_prompts(target, 60.0) for target in (TARGET_ITL_S, None))
    jitter, without = (1e3 * (percentile(gaps, 0.99) - statistics.median(gaps)) for gaps in (capped, free))
    details = {"without_cap_ms": without, "p50_ms": 1e3 * statistics.median(capped)}
    return Measured(jitter, details)


@entry(
    "core.fair_isolation",
    "a tenant's P99 TTFT beside a flood over that on its share alone",
    "x",
    at_most(1.2),
)
def measure_fair_isolation() -> Measured:
    """Compare with half of the workers and no flood: the tenant's fair share, of which it uses 80%."""
    alone, beside, fcfs = (
        percentile(tenant_ttft_s(policy, workers, flood=flood, seconds=120.0, rate_per_s=8.0), 0.99)
        for policy, workers, flood in (("fair", 1, False), ("fair", 2, True), ("fcfs", 2, True))
    )
    return Measured(beside / alone, {"alone_s": alone, "beside_s": beside, "beside_fcfs_s": fcfs})


@entry("core.edf_gain", "deadlines met by edf over fcfs at 110% load", "x", at_least(1.1))
def measure_edf_gain() -> Measured:
    """Run the same requests under both."""
    rate = 1.1 * capacity_per_s(60.0)
    edf, fcfs = (deadlines_met(policy, rate, 120.0) for policy in ("edf", "fcfs"))
    return Measured(edf / fcfs, {"edf": edf, "fcfs": fcfs, "rate_per_s": rate})
