"""The scheduler's core: what it promises, and what it costs. All in simulation, with the real core."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from octavo_lab.scorecard import Measured, at_least, at_most, entry
from octavo_lab.scorecard.core_workload import (
    admit_us,
    aging,
    capacity_per_s,
    deadlines_met,
    gaps_under_prompts,
    steady_decode,
    tenant_ttft_s,
)
from octavo_lab.sim import InvariantError
from octavo_lab.sim.chaos import Chaos, ChaosResult, ChaosSetting


def _p99(values: Sequence[float]) -> float:
    return float(np.quantile(values, 0.99))


def _million() -> ChaosResult:
    return Chaos(None, ChaosSetting(rate_per_s=5.0), seed=2026).run(10**6)


@entry("core.sim_violations", "violations", at_most(0), long=True)
def sim_violations() -> Measured:
    """promises broken in a million faulty steps

    The monitor stops at the first. A run that had too little to do counts as one.
    """
    try:
        result = _million()
    except InvariantError as error:
        return Measured(1.0, {"broken": str(error)})
    return Measured(0.0 if result.mean_running >= 8 else 1.0, asdict(result))


@entry("core.sim_million_cpu_s", "s", at_most(300), long=True)
def sim_million_cpu_s() -> float:
    """CPU time of a million faulty steps"""
    return _million().cpu_s


@entry("core.report_to_plan_us_256", "us", at_most(600))
def report_to_plan_us_256() -> float:
    """report to next plan, 256 sequences decode, median

    Steady decode with prefix caching on: every sixteenth token makes a key. The best of three medians:
    neighbours on the machine only ever add.
    """
    return min(steady_decode(1, 256, 400).step_us() for _ in range(3))


@entry("core.growth_1000_workers", "x", at_most(2))
def growth_1000_workers() -> Measured:
    """cost of a step among 1000 workers over that of one

    Steps of 8 sequences, in turns: single ones differ by half on a busy machine.
    """
    rounds = [[steady_decode(workers, 8, 1000).step_us() for workers in (1, 1000)] for _ in range(5)]
    return Measured(
        statistics.median(many / one for one, many in rounds),
        {"one_us": [one for one, _ in rounds], "thousand_us": [many for _, many in rounds]},
    )


@entry("core.admit_us_1000_workers", "us", at_most(1000))
def admit_us_1000_workers() -> float:
    """admitting one request among 1000 workers, median

    A submit that finds its worker, half of them idle, and sends the plan.
    """
    return admit_us(1000, 300)


@entry("core.max_wait_vs_bound", "x", at_most(1))
def max_wait_vs_bound() -> Measured:
    """longest wait behind higher classes over its bound

    A system is flooded with interactive requests; the others are watched.
    """
    watch = aging(90.0)
    return Measured(watch.worst if watch.judged else float("nan"), {"judged": watch.judged})


@entry("core.jitter_ms", "ms")
def jitter_ms() -> Measured:
    """P99 - P50 of the time between tokens while prompts arrive, latency critical

    Prefills are capped for a target of 40 ms; the same without a cap is in the details.
    """
    capped, free = (gaps_under_prompts(target_itl_s, 60.0) for target_itl_s in (0.040, None))
    jitter, without = (1e3 * (_p99(gaps) - statistics.median(gaps)) for gaps in (capped, free))
    return Measured(jitter, {"without_cap_ms": without, "p50_ms": 1e3 * statistics.median(capped)})


@entry("core.fair_isolation", "x", at_most(1.2))
def fair_isolation() -> Measured:
    """a tenant's P99 TTFT beside a flood over that on its share alone

    Its fair share is half of the workers, of which it uses 80%.
    """
    alone, beside, fcfs = (
        _p99(tenant_ttft_s(policy, workers, flood=flood, seconds=120.0))
        for policy, workers, flood in (("fair", 1, False), ("fair", 2, True), ("fcfs", 2, True))
    )
    return Measured(beside / alone, {"alone_s": alone, "beside_s": beside, "beside_fcfs_s": fcfs})


@entry("core.edf_gain", "x", at_least(1.1))
def edf_gain() -> Measured:
    """deadlines met by edf over fcfs at 110% load"""
    rate = 1.1 * capacity_per_s(60.0)
    edf, fcfs = (deadlines_met(policy, rate, 120.0) for policy in ("edf", "fcfs"))
    return Measured(edf / fcfs, {"edf": edf, "fcfs": fcfs, "rate_per_s": rate})
