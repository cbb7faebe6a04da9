"""What clients notice of a stack of real processes under attack, and an hour of churn: `octavo chaos`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

from octavo_lab.chaos.churn import churn
from octavo_lab.chaos.report import Findings
from octavo_lab.chaos.run import ChaosSettings, attack
from octavo_lab.chaos.stack import Sizes
from octavo_lab.scorecard import Measurement, at_most, entry

SECONDS = 180.0
_ONE_KIND_S = 60.0


def _measured(found: Findings, value: float) -> Measurement:
    details = found.as_record()
    return Measurement(value, {name: told for name, told in details.items() if name != "actions"})


def _attacked(runner: str) -> Callable[[], Measurement]:
    def measure() -> Measurement:
        # On few cores a real step may take seconds under this load, and a start half a minute.
        watchdog_s, tokens = (3.0, 96) if runner == "sim" else (10.0, 32)
        sizes = Sizes(runner=runner, watchdog_s=watchdog_s)
        found = attack(ChaosSettings(sizes=sizes, seconds=SECONDS, max_tokens=tokens, poison_s=20.0))
        return _measured(found, len(found.findings))

    return measure


for _runner in ("sim", "torch", "vllm"):
    entry(
        f"chaos.found_{_runner}",
        "count",
        at_most(0),
        long=True,
        measures=f"40 clients, {_runner} in float32, {SECONDS:g} s of all that can be done to 2 workers, "
        "2 schedulers and 2 gateways, poison every 20 s: requests failed or wrong, blocks leaked",
    )(_attacked(_runner))


def _pause(kind: str, every_s: float) -> Measurement:
    found = attack(ChaosSettings(seconds=_ONE_KIND_S, every_s=every_s, kinds=(kind,)))
    pauses = found.pauses()[kind]
    return _measured(found, statistics.median(pauses) if pauses and not found.findings else math.inf)


@entry("chaos.kill_pause_s", "s", at_most(1.5), long=True)
def kill_pause_s() -> Measurement:
    """median from the kill of a worker to the next token of each request that it moved"""
    return _pause("kill-worker", 6.0)


@entry("chaos.hang_pause_s", "s", at_most(4.0), long=True)
def hang_pause_s() -> Measurement:
    """the same for a step that never ends, with a watchdog of 3 s"""
    return _pause("hang", 12.0)


@entry("chaos.scheduler_pause_s", "s", at_most(2.0), long=True)
def scheduler_pause_s() -> Measurement:
    """the same for the kill of a scheduler of two"""
    return _pause("kill-scheduler", 8.0)


@entry("chaos.restart_pause_s", "s", long=True)
def restart_pause_s() -> Measurement:
    """longest pause while all workers, both schedulers and a gateway are drained and started anew"""
    found = attack(ChaosSettings(rolling=True))
    return _measured(found, math.inf if found.findings else found.worst_pause_s)


@entry("chaos.churn_mib", "MiB", at_most(4.0), long=True)
def churn_mib() -> Measurement:
    """most that any process has gained in the second half of a million short requests on simulated workers"""
    curve = churn(Sizes(), seconds=3500.0, requests=1_000_000, streams=200)
    grown = {name: {"mib": mib, "descriptors": fds} for name, (mib, fds) in curve.growth().items()}
    details = {"requests": curve.samples[-1].requests, "failed": curve.failed, **grown}
    return Measurement(max(one["mib"] for one in grown.values()) if curve.flat else math.inf, details)
