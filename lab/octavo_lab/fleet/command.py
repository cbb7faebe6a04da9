"""`octavo bench fleet`: one late-binding queue against routers that bind early, in simulation."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from octavo.cli import output
from octavo.steptimes import StepTimes, StepTimesError

from octavo_lab.command import BenchError, Flag, add_flags, claim_folder
from octavo_lab.datasets.lengths import Drawn
from octavo_lab.fleet.arms import FleetConfig
from octavo_lab.fleet.experiments import CONDITIONS, DEGRADED, FleetTraffic, execute_all, plan_runs
from octavo_lab.fleet.report import as_record, as_text, write
from octavo_lab.sim import FaultRates
from scheduler_svc.planlog import PlanLogError

# Names of `FaultRates` as flags have them. Draining is not among them: routers do not send to who drains.
FAULTS: Final = {
    "crash": "crash",
    "hang": "hang",
    "slow": "slow",
    "refuse": "refuse",
    "lost-report": "lose_report",
    "drift": "drift",
    "stream-drop": "drop_stream",
    "step-error": "fail_step",
}
FAULT_CHANCE: Final = 1e-4
MAX_CHANCE: Final = 0.01
MIN_DEGRADED_WORKERS: Final = 2
"""One is slow and another leaves."""
FLAGS: Final[tuple[Flag, ...]] = (
    ("--requests", int, 3000, "N", "requests in a row per run"),
    ("--seeds", int, 3, "N", "drawings of the traffic"),
    ("--load", float, 0.9, "X", "share of the fleet's capacity"),
    ("--prompt-tokens", float, 1000.0, "X", "mean tokens of a prompt of poisson"),
    ("--output-tokens", float, 200.0, "X", "mean tokens of an answer"),
    ("--cv", float, 1.0, "X", "coefficient of variation of both"),
    ("--workers", int, 8, "N", "size of the fleet"),
    ("--jobs", int, os.cpu_count() or 1, "N", "runs at a time"),
    ("--steps", Path, None, "FILE", "step times of the workers (format: docs/simulator.md)"),
    ("--traces", Path, None, "DIR", "folder of the public traces"),
    ("--plan-log", Path, None, "FILE", "requests of a plan log in place of the trace"),
    ("--out", Path, None, "DIR", "write record, tables and figures there"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add = parser.add_argument
    described = ", ".join(f"{name} ({what})" for name, what in CONDITIONS.items())
    add("conditions", nargs="*", metavar="CONDITION", help=f"what to simulate: {described} (default: all)")
    add_flags(parser, FLAGS)
    traces = "what comes where prefixes do not matter; poisson: at random times, with lognormal lengths"
    known = ("azure-conv", "azure-code", "poisson")
    add("--trace", choices=known, default=known[0], help=f"{traces} (default azure-conv)")
    chance = f"let workers fail, with this chance per step (default {FAULT_CHANCE:g}); may be repeated"
    faults: dict[str, Any] = {"action": "append", "default": [], "metavar": "KIND[=CHANCE]"}
    add("--fault", help=f"{chance}: {', '.join(FAULTS)}", **faults)
    add("--json", action="store_true", help="print as JSON")


def run(arguments: argparse.Namespace) -> str:
    """Simulate; return the tables.

    Raises:
        BenchError: there is no such condition, trace or plan log, or the folder cannot be written.
    """
    conditions = arguments.conditions or list(CONDITIONS)
    unknown = sorted(set(conditions) - set(CONDITIONS))
    if unknown:
        raise BenchError(f"no condition {unknown[0]!r}: there are {', '.join(CONDITIONS)}")
    if min(arguments.requests, arguments.seeds, arguments.jobs) < 1 or arguments.load <= 0:
        raise BenchError("requests, seeds, load and jobs must be positive")
    if arguments.workers < (MIN_DEGRADED_WORKERS if DEGRADED in conditions else 1):
        raise BenchError(f"there must be workers, and with degraded {MIN_DEGRADED_WORKERS} of them")
    traffic = FleetTraffic(
        requests=arguments.requests,
        load=arguments.load,
        traces=arguments.traces,
        trace=arguments.trace,
        lengths=Drawn(arguments.prompt_tokens, arguments.output_tokens, arguments.cv),
        plan_log=arguments.plan_log,
    )
    fleet = FleetConfig(
        num_workers=arguments.workers, faults=FaultRates(**dict(map(_fault, arguments.fault)))
    )
    outcomes = []
    try:
        if arguments.steps is not None:
            worker = replace(fleet.worker, step_times=StepTimes.load(arguments.steps))
            fleet = replace(fleet, worker=worker)
        runs = plan_runs(conditions, traffic, arguments.seeds, fleet)
        if arguments.out is not None:
            claim_folder(arguments.out)
        with output.ProgressLine() as progress:
            for outcome in execute_all(runs, arguments.jobs):
                outcomes.append(outcome)
                progress(f"{outcome.condition}: {outcome.arm}", len(outcomes) / len(runs))
    except (StepTimesError, PlanLogError, OSError) as error:
        raise BenchError(str(error)) from error
    told = json.dumps(as_record(outcomes, runs), indent=2) if arguments.json else as_text(outcomes)
    if arguments.out is not None:
        try:
            for path in write(outcomes, runs, arguments.out):
                output.note(f"wrote {path}")
        except OSError as error:
            raise BenchError(str(error), partial=told) from error
    return told


def _fault(text: str) -> tuple[str, float]:
    kind, _, chance = text.partition("=")
    if kind not in FAULTS:
        raise BenchError(f"no fault {kind!r}: there are {', '.join(FAULTS)}")
    try:
        value = float(chance) if chance else FAULT_CHANCE
    except ValueError:
        value = -1.0
    if not 0 < value <= MAX_CHANCE:
        raise BenchError(f"{text}: the chance per step must be above 0 and at most {MAX_CHANCE:g}")
    return FAULTS[kind], value
