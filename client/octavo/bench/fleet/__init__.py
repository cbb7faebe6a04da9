"""`octavo bench fleet`: one late-binding queue against routers that bind early, in simulation."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from octavo.bench import BenchError, claim_folder
from octavo.cli import output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.bench.fleet.experiments import Outcome, Run

CONDITIONS: Final = {
    "healthy": "all workers well",
    "degraded": "one worker three times slower, another drains at half time",
    "prefix": "requests that share prefixes",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    described = ", ".join(f"{name} ({what})" for name, what in CONDITIONS.items())
    parser.add_argument(
        "conditions", nargs="*", metavar="CONDITION", help=f"what to simulate: {described} (default: all)"
    )
    parser.add_argument(
        "--requests", type=int, default=3000, metavar="N", help="requests in a row per run (default 3000)"
    )
    parser.add_argument(
        "--seeds", type=int, default=3, metavar="N", help="drawings of the traffic (default 3)"
    )
    parser.add_argument(
        "--load", type=float, default=0.9, metavar="X", help="share of the fleet's capacity (default 0.9)"
    )
    parser.add_argument("--traces", type=Path, metavar="DIR", help="folder of the public traces")
    parser.add_argument(
        "--plan-log", type=Path, metavar="FILE", help="requests of a plan log in place of the Azure trace"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write record, tables and figures there")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="runs at a time (default: cores)"
    )
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(arguments: argparse.Namespace) -> str:
    """Simulate; return the tables.

    Raises:
        BenchError: there is no such condition, trace or plan log, or the folder cannot be written.
    """
    # Not earlier: they need the extra `bench`, and the help does not.
    from octavo.bench.fleet.experiments import Traffic, plan_runs  # noqa: PLC0415
    from octavo.bench.fleet.report import as_record, as_text, write  # noqa: PLC0415
    from scheduler_svc.planlog import PlanLogError  # noqa: PLC0415

    conditions = arguments.conditions or list(CONDITIONS)
    unknown = sorted(set(conditions) - set(CONDITIONS))
    if unknown:
        raise BenchError(f"no condition {unknown[0]!r}: there are {', '.join(CONDITIONS)}")
    if min(arguments.requests, arguments.seeds, arguments.jobs) < 1 or arguments.load <= 0:
        raise BenchError("requests, seeds, load and jobs must be positive")
    traffic = Traffic(
        requests=arguments.requests,
        load=arguments.load,
        traces=arguments.traces,
        plan_log=arguments.plan_log,
    )
    if arguments.out is not None:
        claim_folder(arguments.out)
    try:
        outcomes = _simulate(plan_runs(conditions, traffic, arguments.seeds), arguments.jobs)
    except (PlanLogError, OSError) as error:
        raise BenchError(str(error)) from error
    told = json.dumps(as_record(outcomes, traffic), indent=2) if arguments.json else as_text(outcomes)
    if arguments.out is not None:
        try:
            for path in write(outcomes, traffic, arguments.out):
                output.note(f"wrote {path}")
        except OSError as error:
            raise BenchError(str(error), partial=told) from error
    return told


def _simulate(runs: Sequence[Run], processes: int) -> list[Outcome]:
    from octavo.bench.fleet.experiments import execute_all  # noqa: PLC0415 # see `run`

    outcomes: list[Outcome] = []
    with output.ProgressLine() as progress:
        for outcome in execute_all(runs, processes):
            outcomes.append(outcome)
            progress(f"{outcome.condition}: {outcome.arm}", len(outcomes) / len(runs))
    return outcomes
