"""Tables and figures of fleet experiments."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from octavo_lab.fleet.arms import LATE
from octavo_lab.fleet.experiments import (
    ARMS_OF,
    CONDITIONS,
    NUM_QUANTILES,
    PREFIX,
    FleetOutcome,
    Run,
    by_seed,
    plus_minus,
    ratio,
)
from octavo_lab.load.statistics import Interval, mean_interval
from octavo_lab.plots import BLUE, GREEN, GREY, RED, log_axis, panels, percent, save, styled
from octavo_lab.report import table

_COLOURS: Final = {
    LATE: GREEN,
    "least tokens": BLUE,
    "least requests": "#8a63b3",
    "round robin": RED,
    "random": GREY,
}
_Value = Callable[[FleetOutcome], float]
_WAITS: Final[dict[str, _Value]] = {
    "TTFT P50 s": lambda one: one.ttft_p50_s,
    "P90 s": lambda one: one.ttft_p90_s,
    "P99 s": lambda one: one.ttft_p99_s,
    "mean s": lambda one: one.ttft_mean_s,
    "TPOT P99 s": lambda one: one.tpot_p99_s,
    "failed": lambda one: float(one.failed),
}
_HITS: Final[dict[str, _Value]] = {
    "hit rate": lambda one: one.hit_rate,
    "share of an unbounded cache": lambda one: one.hit_rate / one.bound_hit_rate,
    "TTFT P50 s": lambda one: one.ttft_p50_s,
    "P99 s": lambda one: one.ttft_p99_s,
}


def as_text(outcomes: Sequence[FleetOutcome]) -> str:
    """Return a table per condition, as Markdown."""
    titles = {name: f"**{CONDITIONS[name][0].upper()}{CONDITIONS[name][1:]}**" for name in _ran(outcomes)}
    return "\n\n".join(f"{title}\n\n{_table(outcomes, name)}" for name, title in titles.items())


def _ran(outcomes: Sequence[FleetOutcome]) -> list[str]:
    return [condition for condition in CONDITIONS if _arms(outcomes, condition)]


def _arms(outcomes: Sequence[FleetOutcome], condition: str) -> list[str]:
    ran = {outcome.arm for outcome in outcomes if outcome.condition == condition}
    return [arm for arm in ARMS_OF[condition] if arm in ran]


def _mean(outcomes: Sequence[FleetOutcome], condition: str, arm: str, value: _Value) -> Interval:
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
    """Write record, tables and figures into a folder; return their paths.

    Raises:
        OSError: the folder cannot be written.
    """
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
    figure, drawn = panels((5.6 * len(conditions), 4.2), columns=len(conditions))
    for panel, condition in zip(drawn, conditions, strict=True):
        _survival(panel, outcomes, condition)
    drawn[0].set_ylabel("share of requests that wait longer")
    figure.suptitle(f"Time to the first token, {num_workers} workers", fontweight="bold")
    return figure


def _survival(panel: Axes, outcomes: Sequence[FleetOutcome], condition: str) -> None:
    """Draw, for each arm, the share of requests that wait longer than so many seconds."""
    left = 1.0 - np.linspace(0, 1, NUM_QUANTILES)
    shown = left >= 2e-3
    for arm in _arms(outcomes, condition):
        drawn = [one.ttft_quantiles_s for one in outcomes if (one.condition, one.arm) == (condition, arm)]
        middle = np.median(np.array(drawn), axis=0)
        width = 2.6 if arm == LATE else 1.5
        panel.plot(middle[shown], left[shown], color=_COLOURS[arm], linewidth=width, label=arm)
    panel.set(
        xscale="log", yscale="log", xlim=(0.1, None), ylim=(2e-3, 1), xlabel="seconds to the first token"
    )
    panel.axhline(0.01, color="black", linewidth=0.8, linestyle=":")
    panel.annotate("P99", (0.11, 0.0107), fontsize=8)
    log_axis(panel.xaxis)
    panel.yaxis.set_major_formatter(percent)
    panel.set_title(CONDITIONS[condition], fontsize=10)
    panel.legend(fontsize=9, loc="upper right")


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
