"""The scheduler core in simulation: late binding, prefixes, replay. Needs the public traces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from octavo_lab.fleet.arms import LATE
from octavo_lab.fleet.experiments import Outcome, Traffic, execute_all, plan_runs, ratio
from octavo_lab.scorecard import Measured, at_least, at_most, entry
from octavo_lab.sim.chaos import CHAOS_CONFIG, Chaos
from scheduler_svc.planlog import PlanLogWriter, RecordingCore

REQUESTS: Final = 1200
PREFIX_REQUESTS: Final = 6000
REPLAYED_STEPS: Final = 6000


def _outcomes(condition: str, other: str, traffic: Traffic, seeds: int) -> list[Outcome]:
    """Simulate late binding and another arm on the same drawings of the traffic."""
    runs = [run for run in plan_runs([condition], traffic, seeds) if run.arm in (LATE, other)]
    return list(execute_all(runs, min(4, os.cpu_count() or 1)))


def _p99_ratio(condition: str, other: str) -> Measured:
    """Return the P99 TTFT of one queue over that of a router: the mean over seeds."""
    outcomes = _outcomes(condition, other, Traffic(requests=REQUESTS, load=0.9), seeds=3)
    found = ratio(outcomes, condition, (LATE, other), lambda o: o.ttft_p99_s)
    p99s = {f"{o.arm}, seed {o.seed}": round(o.ttft_p99_s, 3) for o in outcomes}
    return Measured(found.mean, {"ratio": str(found), "ttft_p99_s": p99s, "requests": REQUESTS})


@entry("core.late_vs_round_robin", "ratio", at_most(0.6))
def late_vs_round_robin() -> Measured:
    """P99 TTFT of one late-binding queue over that of round robin: Azure conversation trace at 90% of the
    capacity of eight simulated workers, mean over three windows

    Round robin is the router that looks at nothing.
    """
    return _p99_ratio("healthy", "round robin")


@entry("core.late_vs_least_tokens", "ratio", at_most(1.05))
def late_vs_least_tokens() -> Measured:
    """the same over an exact least-tokens router, which sees every engine and knows every length"""
    return _p99_ratio("healthy", "least tokens")


@entry("core.late_vs_least_tokens_degraded", "ratio", at_most(0.6))
def late_vs_least_tokens_degraded() -> Measured:
    """the same with one worker three times slower throughout and another draining at half time"""
    return _p99_ratio("degraded", "least tokens")


@entry("core.prefix_hit_gain", "ratio", at_least(1.5))
def prefix_hit_gain() -> Measured:
    """prefix hit rate of placement by prefix over that of round robin: Mooncake trace, lengths by eight

    The details have the hit rate of a cache without bounds as well.
    """
    traffic = Traffic(requests=PREFIX_REQUESTS, load=0.7)
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
    return Measured(found.mean, {**details, "requests": PREFIX_REQUESTS})


@entry("core.replay_mismatches", "count", at_most(0))
def replay_mismatches() -> Measured:
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
    return Measured(different, {"plans": plans, "files": len(replays), "faults": faults})


def _replay(path: Path) -> Any:
    done = subprocess.run(  # noqa: S603 # our own command
        [sys.executable, "-m", "octavo.cli.main", "replay", str(path), "--json"],
        env={**os.environ, "PYTHONHASHSEED": "4711"},
        stdout=subprocess.PIPE,
        check=False,
    )
    return json.loads(done.stdout)
