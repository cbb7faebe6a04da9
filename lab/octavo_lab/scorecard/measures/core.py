"""The scheduler's core: what it promises, and what it costs. All in simulation, with the real core."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from octavo.protocol.steps import Priority

from octavo_lab.fleet.arms import LATE
from octavo_lab.fleet.experiments import FleetOutcome, FleetTraffic, execute_all, plan_runs, plus_minus, ratio
from octavo_lab.scorecard import Measurement, at_least, at_most, core_workload, entry
from octavo_lab.sim.audit import InvariantError
from octavo_lab.sim.chaos import CHAOS_CONFIG, Chaos, ChaosResult, ChaosSetting
from scheduler_svc.planlog import PlanLogWriter, RecordingCore


def _p99(values: Sequence[float]) -> float:
    return float(np.quantile(values, 0.99))


def _million() -> ChaosResult:
    return Chaos(None, ChaosSetting(rate_per_s=5.0), seed=2026).run(10**6)


@entry("core.sim_violations", "violations", at_most(0), long=True)
def sim_violations() -> Measurement:
    """promises broken in a million faulty steps

    The monitor stops at the first. A run that had too little to do counts as one.
    """
    try:
        result = _million()
    except InvariantError as error:
        return Measurement(1.0, {"broken": str(error)})
    return Measurement(0.0 if result.mean_running >= 8 else 1.0, asdict(result))


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
    return min(core_workload.steady_decode(1, 256, 400).step_us() for _ in range(3))


@entry("core.growth_1000_workers", "x", at_most(2))
def growth_1000_workers() -> Measurement:
    """cost of a step among 1000 workers over that of one

    Steps of 8 sequences, in turns: single ones differ by half on a busy machine.
    """
    rounds = [
        [core_workload.steady_decode(workers, 8, 1000).step_us() for workers in (1, 1000)] for _ in range(5)
    ]
    return Measurement(
        statistics.median(many / one for one, many in rounds),
        {"one_us": [one for one, _ in rounds], "thousand_us": [many for _, many in rounds]},
    )


@entry("core.admit_us_1000_workers", "us", at_most(1000))
def admit_us_1000_workers() -> float:
    """admitting one request among 1000 workers, median

    A submit that finds its worker, half of them idle, and sends the plan.
    """
    return core_workload.admit_us(1000, 300)


@entry("core.max_wait_vs_bound", "x", at_most(1))
def max_wait_vs_bound() -> Measurement:
    """longest wait behind higher classes over its bound

    A system is flooded with interactive requests; the others are watched.
    """
    waits = core_workload.waits_over_bound(90.0)
    return Measurement(max(waits, default=float("nan")), {"judged": len(waits)})


@entry("core.jitter_ms", "ms")
def jitter_ms() -> Measurement:
    """P99 - P50 of the time between tokens while prompts arrive, latency critical

    Prefills are capped for a target of 40 ms; the same without a cap is in the details.
    """
    capped, free = (core_workload.gaps_under_prompts(target_itl_s, 60.0) for target_itl_s in (0.040, None))
    jitter, without = (1e3 * (_p99(gaps) - statistics.median(gaps)) for gaps in (capped, free))
    return Measurement(jitter, {"without_cap_ms": without, "p50_ms": 1e3 * statistics.median(capped)})


@entry("core.short_behind_long", "x", at_most(2))
def short_behind_long() -> Measurement:
    """P99 TTFT of prompts under 200 tokens beside prompts of 8,000 over that without them

    Half of all tokens are of the long ones. Standard beside standard; interactive beside batch, the long
    ones and the tokens per second of a worker that never rests are in the details.
    """
    standard, interactive, batch = Priority.STANDARD, Priority.INTERACTIVE, Priority.BATCH
    alone, _, _ = core_workload.beside_long_prompts(standard, None, 1200.0)
    beside, long_s, _ = core_workload.beside_long_prompts(standard, standard, 1200.0)
    above, _, _ = core_workload.beside_long_prompts(interactive, batch, 1200.0)
    _, _, tokens_per_s = core_workload.beside_long_prompts(standard, standard, 300.0, load=0.6)
    details = {"alone_s": alone, "beside_s": beside, "long_p99_s": long_s, "tokens_per_s": tokens_per_s}
    return Measurement(beside / alone, {**details, "interactive_beside_batch": above / alone})


@entry("core.fair_isolation", "x", at_most(1.2))
def fair_isolation() -> Measurement:
    """a tenant's P99 TTFT beside a flood over that on its share alone

    Its fair share is half of the workers, of which it uses 80%.
    """
    alone, beside, fcfs = (
        _p99(core_workload.tenant_ttft_s(policy, workers, flood=flood, seconds=120.0))
        for policy, workers, flood in (("fair", 1, False), ("fair", 2, True), ("fcfs", 2, True))
    )
    return Measurement(beside / alone, {"alone_s": alone, "beside_s": beside, "beside_fcfs_s": fcfs})


@entry("core.edf_gain", "x", at_least(1.1))
def edf_gain() -> Measurement:
    """deadlines met by edf over fcfs at 110% load"""
    rate = 1.1 * core_workload.capacity_per_s(60.0)
    edf, fcfs = (core_workload.deadlines_met(policy, rate, 120.0) for policy in ("edf", "fcfs"))
    return Measurement(edf / fcfs, {"edf": edf, "fcfs": fcfs, "rate_per_s": rate})


# -- late binding, prefixes and replay; the first two need the public traces

REQUESTS: Final = 1200
PREFIX_REQUESTS: Final = 6000
REPLAYED_STEPS: Final = 6000


def _outcomes(condition: str, other: str, traffic: FleetTraffic, seeds: int) -> list[FleetOutcome]:
    """Simulate late binding and another arm on the same drawings of the traffic."""
    runs = [run for run in plan_runs([condition], traffic, seeds) if run.arm in (LATE, other)]
    return list(execute_all(runs, min(4, os.cpu_count() or 1)))


def _p99_ratio(condition: str, other: str) -> Measurement:
    """Return the P99 TTFT of one queue over that of a router: the mean over seeds."""
    outcomes = _outcomes(condition, other, FleetTraffic(requests=REQUESTS, load=0.9), seeds=3)
    found = ratio(outcomes, condition, (LATE, other), lambda o: o.ttft_p99_s)
    p99s = {f"{o.arm}, seed {o.seed}": round(o.ttft_p99_s, 3) for o in outcomes}
    return Measurement(found.value, {"ratio": plus_minus(found), "ttft_p99_s": p99s, "requests": REQUESTS})


_LATE: Final = """P99 TTFT of one late-binding queue over that of round robin: Azure conversation trace at 90%
of the capacity of eight simulated workers, mean over three windows"""
_EXACT: Final = "the same over an exact least-tokens router, which sees every engine and knows every length"
_DEGRADED: Final = "the same with one worker three times slower throughout and another draining at half time"
for name, bound, condition, other, measures in (
    ("round_robin", 0.6, "healthy", "round robin", _LATE),
    ("least_tokens", 1.05, "healthy", "least tokens", _EXACT),
    ("least_tokens_degraded", 0.6, "degraded", "least tokens", _DEGRADED),
):
    late = partial(_p99_ratio, condition, other)
    entry(f"core.late_vs_{name}", "ratio", at_most(bound), measures=measures)(late)


@entry("core.prefix_hit_gain", "ratio", at_least(1.5))
def prefix_hit_gain() -> Measurement:
    """prefix hit rate of placement by prefix over that of round robin: Mooncake trace, lengths by eight

    The details have the hit rate of a cache without bounds as well.
    """
    traffic = FleetTraffic(requests=PREFIX_REQUESTS, load=0.7)
    outcomes = _outcomes("prefix", "round robin", traffic, seeds=1)
    found = ratio(outcomes, "prefix", (LATE, "round robin"), lambda o: o.hit_rate)
    details = {
        o.arm: {
            "hit_rate": round(o.hit_rate, 4),
            "share_of_unbounded": round(o.hit_rate / o.bound_hit_rate, 4),
            "unbounded": round(o.bound_hit_rate, 4),
        }
        for o in outcomes
    }
    return Measurement(found.value, {**details, "requests": PREFIX_REQUESTS})


@entry("core.replay_mismatches", "count", at_most(0))
def replay_mismatches() -> Measurement:
    """plans and other effects that come out otherwise when the log of a run full of faults is replayed by
    another process, under another hash seed

    Recorded, rotated, and each file replayed.
    """
    with tempfile.TemporaryDirectory() as folder:
        writer = PlanLogWriter(Path(folder) / "plan.log", max_bytes=2**20, files=1000)
        core = RecordingCore(CHAOS_CONFIG, writer)
        faults = Chaos(core, seed=1).run(REPLAYED_STEPS).faults
        core.close()
        replays = [_replay(path) for path in Path(folder).iterdir()]
    different = sum(len(one["mismatches"]) + one["effect_mismatches"] for one in replays)
    plans = sum(one["plans"] for one in replays)
    return Measurement(different, {"plans": plans, "files": len(replays), "faults": faults})


def _replay(path: Path) -> Any:
    done = subprocess.run(  # noqa: S603 # our own command
        [sys.executable, "-m", "octavo.cli.main", "replay", str(path), "--json"],
        env={**os.environ, "PYTHONHASHSEED": "4711"},
        stdout=subprocess.PIPE,
        check=False,
    )
    return json.loads(done.stdout)
