"""The scheduler core in simulation: late binding, prefixes, replay. Needs the public traces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from octavo_lab.scorecard import Measured, at_least, at_most, entry

if TYPE_CHECKING:
    from octavo_lab.fleet.experiments import Outcome

SEEDS: Final = 3
REQUESTS: Final = 1200
PREFIX_REQUESTS: Final = 6000
REPLAYED_STEPS: Final = 6000


def _outcomes(condition: str, arms: tuple[str, str], requests: int, seeds: int = SEEDS) -> list[Outcome]:
    """Simulate two arms on the same drawings of the traffic."""
    from octavo_lab.fleet.experiments import Traffic, execute_all, plan_runs  # noqa: PLC0415

    load = 0.7 if condition == "prefix" else 0.9
    runs = plan_runs([condition], Traffic(requests=requests, load=load), seeds)
    return list(execute_all([run for run in runs if run.arm in arms], min(4, os.cpu_count() or 1)))


def _p99_ratio(condition: str, other: str) -> Measured:
    """Return the P99 TTFT of one queue over that of a router: the mean over seeds."""
    from octavo_lab.fleet.arms import LATE  # noqa: PLC0415
    from octavo_lab.fleet.experiments import ratio  # noqa: PLC0415

    outcomes = _outcomes(condition, (LATE, other), REQUESTS)
    found = ratio(outcomes, condition, (LATE, other), lambda o: o.ttft_p99_s)
    p99s = {f"{o.arm}, seed {o.seed}": round(o.ttft_p99_s, 3) for o in outcomes}
    return Measured(found.mean, {"ratio": str(found), "ttft_p99_s": p99s, "requests": REQUESTS})


@entry(
    "core.late_vs_round_robin",
    "P99 TTFT of one late-binding queue over that of round robin: Azure conversation trace at 90% of the "
    "capacity of eight simulated workers, mean over three windows",
    "ratio",
    at_most(0.6),
)
def late_vs_round_robin() -> Measured:
    """Compare with the router that looks at nothing."""
    return _p99_ratio("healthy", "round robin")


@entry(
    "core.late_vs_least_tokens",
    "the same over an exact least-tokens router, which sees every engine and knows every length",
    "ratio",
    at_most(1.05),
)
def late_vs_least_tokens() -> Measured:
    """Compare with the router that sees everything."""
    return _p99_ratio("healthy", "least tokens")


@entry(
    "core.late_vs_least_tokens_degraded",
    "the same with one worker three times slower throughout and another draining at half time",
    "ratio",
    at_most(0.6),
)
def late_vs_least_tokens_degraded() -> Measured:
    """Compare where not all workers are alike."""
    return _p99_ratio("degraded", "least tokens")


@entry(
    "core.prefix_hit_gain",
    "prefix hit rate of placement by prefix over that of round robin: Mooncake trace, lengths by eight",
    "ratio",
    at_least(1.5),
)
def prefix_hit_gain() -> Measured:
    """Compare hit rates, also with that of a cache without bounds."""
    from octavo_lab.fleet.arms import LATE  # noqa: PLC0415
    from octavo_lab.fleet.experiments import ratio  # noqa: PLC0415

    arms = (LATE, "round robin")
    outcomes = _outcomes("prefix", arms, PREFIX_REQUESTS, seeds=1)
    found = ratio(outcomes, "prefix", arms, lambda o: o.hit_rate)
    details = {
        o.arm: {
            "hit_rate": round(o.hit_rate, 4),
            "share_of_unbounded": round(o.hit_rate / o.bound_hit_rate, 4),
            "unbounded": round(o.bound_hit_rate, 4),
        }
        for o in outcomes
    }
    return Measured(found.mean, {**details, "requests": PREFIX_REQUESTS})


@entry(
    "core.replay_mismatches",
    "plans and other effects that come out otherwise when the log of a run full of faults is replayed by "
    "another process, under another hash seed",
    "count",
    at_most(0),
)
def replay_mismatches() -> Measured:
    """Record, rotate, and replay each file."""
    from octavo_lab.sim.chaos import CHAOS_CONFIG, Chaos  # noqa: PLC0415
    from scheduler_svc.planlog import PlanLogWriter, RecordingCore  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        writer = PlanLogWriter(Path(folder) / "plan.log", max_bytes=2**20, files=1000)
        core = RecordingCore(CHAOS_CONFIG, writer)
        faults = Chaos(core, seed=1).run(REPLAYED_STEPS).faults
        core.close()
        replays = [_replay(path) for path in Path(folder).iterdir()]
    different = sum(len(one["mismatches"]) + one["effect_mismatches"] for one in replays)
    plans = sum(one["plans"] for one in replays)
    return Measured(different, {"plans": plans, "files": len(replays), "faults": faults})


def _replay(path: Path) -> dict[str, Any]:
    """Replay a file in a process of its own."""
    done = subprocess.run(  # noqa: S603 # our own command
        [sys.executable, "-m", "octavo.cli.main", "replay", str(path), "--json"],
        env={**os.environ, "PYTHONHASHSEED": "4711"},
        stdout=subprocess.PIPE,
        check=False,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
