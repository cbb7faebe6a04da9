"""`octavo bench fleet`: one late-binding queue against routers that bind early, in simulation."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.figure import Figure
from octavo.cli import output
from octavo.steptimes import StepTimes, StepTimesError

from octavo_lab.command import BenchError, Flag, add_flags, claim_folder
from octavo_lab.datasets.lengths import Drawn
from octavo_lab.fleet.arms import LATE, FleetConfig
from octavo_lab.fleet.experiments import (
    ARMS_OF,
    CONDITIONS,
    DEGRADED,
    NUM_QUANTILES,
    PREFIX,
    FleetOutcome,
    FleetTraffic,
    Run,
    Value,
    by_seed,
    execute_all,
    plan_runs,
    plus_minus,
    ratio,
)
from octavo_lab.load.statistics import Interval, mean_interval
from octavo_lab.plots import BLUE, GREEN, GREY, RED, log_axis, panels, percent, save, styled
from octavo_lab.report import table
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
_COLOURS: Final = {
    LATE: GREEN,
    "least tokens": BLUE,
    "least requests": "#8a63b3",
    "round robin": RED,
    "random": GREY,
}
_WAITS: Final[dict[str, Value]] = {
    "TTFT P50 s": lambda one: one.ttft_p50_s,
    "P90 s": lambda one: one.ttft_p90_s,
    "P99 s": lambda one: one.ttft_p99_s,
    "mean s": lambda one: one.ttft_mean_s,
    "TPOT P99 s": lambda one: one.tpot_p99_s,
    "failed": lambda one: float(one.failed),
}
_HITS: Final[dict[str, Value]] = {
    "hit rate": lambda one: one.hit_rate,
    "share of an unbounded cache": lambda one: one.hit_rate / one.bound_hit_rate,
    "TTFT P50 s": lambda one: one.ttft_p50_s,
    "P99 s": lambda one: one.ttft_p99_s,
}


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
    """Simulate; return the tables."""
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


# -- tables and figures


def as_text(outcomes: Sequence[FleetOutcome]) -> str:
    """Return a table per condition, as Markdown."""
    titles = {name: f"**{CONDITIONS[name][0].upper()}{CONDITIONS[name][1:]}**" for name in _ran(outcomes)}
    return "\n\n".join(f"{title}\n\n{_table(outcomes, name)}" for name, title in titles.items())


def _ran(outcomes: Sequence[FleetOutcome]) -> list[str]:
    return [condition for condition in CONDITIONS if _arms(outcomes, condition)]


def _arms(outcomes: Sequence[FleetOutcome], condition: str) -> list[str]:
    ran = {outcome.arm for outcome in outcomes if outcome.condition == condition}
    return [arm for arm in ARMS_OF[condition] if arm in ran]


def _mean(outcomes: Sequence[FleetOutcome], condition: str, arm: str, value: Value) -> Interval:
    return mean_interval([*by_seed(outcomes, condition, arm, value).values()])


def _table(outcomes: Sequence[FleetOutcome], condition: str) -> str:
    prefix = condition == PREFIX
    columns, last = (_HITS, "hit rate to round robin") if prefix else (_WAITS, "P99 of one queue to this")
    rows = []
    for arm in _arms(outcomes, condition):
        arms, value = ((arm, "round robin"), _HITS["hit rate"]) if prefix else ((LATE, arm), _WAITS["P99 s"])
        itself = arm == LATE and not prefix
        compared = "" if itself else plus_minus(ratio(outcomes, condition, arms, value))
        means = (plus_minus(_mean(outcomes, condition, arm, value)) for value in columns.values())
        rows.append((arm, *means, compared))
    return table(("binding", *columns, last), rows)


def as_record(outcomes: Sequence[FleetOutcome], runs: Sequence[Run]) -> dict[str, Any]:
    """Return all that is needed to judge a result and to repeat it."""
    return {
        "octavo": version("octavo"),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}; simulated, so it does not change the figures",
        "traffic": {name: str(value) for name, value in asdict(runs[0].traffic).items()},
        "fleets": {run.condition: asdict(run.fleet) for run in runs},
        "seeds": sorted({outcome.seed for outcome in outcomes}),
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }


def write(outcomes: Sequence[FleetOutcome], runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write record, tables and figures into a folder, or raise OSError; return their paths."""
    ordered = sorted(outcomes, key=lambda o: (list(CONDITIONS).index(o.condition), o.seed, o.arm))
    paths = [folder / "fleet.json", folder / "fleet.md"]
    paths[0].write_text(json.dumps(as_record(ordered, runs), indent=1) + "\n")
    paths[1].write_text(as_text(ordered) + "\n")
    waits = [name for name in _ran(ordered) if name != PREFIX]
    with styled():
        figures = {"fleet_ttft": _wait_figure(ordered, waits, runs[0].fleet.num_workers)} if waits else {}
        if PREFIX in _ran(ordered):
            figures["fleet_prefix"] = _prefix_figure(ordered)
        for name, figure in figures.items():
            for kind in ("png", "svg"):
                paths.append(folder / f"{name}.{kind}")
                save(figure, paths[-1])
    return paths


def _wait_figure(outcomes: Sequence[FleetOutcome], conditions: Sequence[str], num_workers: int) -> Figure:
    """Draw, for each arm, the share of requests that wait longer than so many seconds."""
    figure, drawn = panels((5.6 * len(conditions), 4.2), columns=len(conditions))
    left = 1.0 - np.linspace(0, 1, NUM_QUANTILES)
    shown = left >= 2e-3
    for panel, condition in zip(drawn, conditions, strict=True):
        for arm in _arms(outcomes, condition):
            curves = [
                one.ttft_quantiles_s for one in outcomes if (one.condition, one.arm) == (condition, arm)
            ]
            middle, width = np.median(np.array(curves), axis=0), 2.6 if arm == LATE else 1.5
            panel.plot(middle[shown], left[shown], color=_COLOURS[arm], linewidth=width, label=arm)
        panel.set(xscale="log", yscale="log", xlim=(0.1, None), ylim=(2e-3, 1.0))
        panel.axhline(0.01, color="black", linewidth=0.8, linestyle=":")
        panel.annotate("P99", (0.11, 0.0107), fontsize=8)
        log_axis(panel.xaxis)
        panel.yaxis.set_major_formatter(percent)
        panel.set_xlabel("seconds to the first token")
        panel.set_title(CONDITIONS[condition], fontsize=10)
        panel.legend(fontsize=9, loc="upper right")
    drawn[0].set_ylabel("share of requests that wait longer")
    figure.suptitle(f"Time to the first token, {num_workers} workers", fontweight="bold")
    return figure


def _prefix_figure(outcomes: Sequence[FleetOutcome]) -> Figure:
    figure, (panel,) = panels((5.6, 2.8))
    arms = _arms(outcomes, PREFIX)[::-1]
    rates = [_mean(outcomes, PREFIX, arm, lambda one: one.hit_rate) for arm in arms]
    spread = [0.0 if one.high is None else one.high - one.value for one in rates]
    colours = [_COLOURS[arm] for arm in arms]
    panel.barh(arms, [one.value for one in rates], xerr=spread, color=colours, height=0.6)
    for arm, rate in zip(arms, rates, strict=True):
        panel.annotate(f"{rate.value:.1%}", (0.004, arm), va="center", color="white", fontweight="bold")
    bound = _mean(outcomes, PREFIX, LATE, lambda one: one.bound_hit_rate).value
    panel.axvline(bound, color="black", linewidth=1.0, linestyle="--")
    place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "ha": "right"}
    panel.annotate(f"cache without bounds {bound:.1%} ", (bound, 1.02), **place)
    panel.grid(axis="y", visible=False)
    panel.xaxis.set_major_formatter(percent)
    panel.set_xlabel("share of prompt tokens found in a cache")
    return figure
