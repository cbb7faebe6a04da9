"""Tables and figures of fleet experiments."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from octavo.cli import output

from octavo_lab.fleet import CONDITIONS
from octavo_lab.fleet.arms import LATE
from octavo_lab.fleet.experiments import (
    ARMS_OF,
    DEGRADED,
    HEALTHY,
    NUM_QUANTILES,
    PREFIX,
    Outcome,
    Run,
    over_seeds,
    ratio,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS: Final = {
    LATE: "#00704a",
    "least tokens": "#3b6fb6",
    "least requests": "#8a63b3",
    "round robin": "#c8553d",
    "random": "#8c8c8c",
}
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""Header and rows."""


def tables(outcomes: Sequence[Outcome]) -> dict[str, Table]:
    """Return a table per condition, by its title."""
    present = {outcome.condition for outcome in outcomes}
    made = {}
    for condition, title in CONDITIONS.items():
        if condition in present:
            prefix = condition == PREFIX
            made[title] = _prefix_table(outcomes) if prefix else _wait_table(outcomes, condition)
    return made


def _arms(outcomes: Sequence[Outcome], condition: str) -> list[str]:
    ran = {outcome.arm for outcome in outcomes if outcome.condition == condition}
    return [arm for arm in ARMS_OF[condition] if arm in ran]


def _wait_table(outcomes: Sequence[Outcome], condition: str) -> Table:
    header = (
        *("binding", "TTFT P50 s", "P90 s", "P99 s", "mean s", "TPOT P99 s"),
        *("failed", "P99 of one queue to this"),
    )
    rows = []
    for arm in _arms(outcomes, condition):
        values = [
            over_seeds(outcomes, condition, arm, value)
            for value in (
                lambda o: o.ttft_p50_s,
                lambda o: o.ttft_p90_s,
                lambda o: o.ttft_p99_s,
                lambda o: o.ttft_mean_s,
                lambda o: o.tpot_p99_s,
                lambda o: float(o.failed),
            )
        ]
        compared = "" if arm == LATE else str(ratio(outcomes, condition, (LATE, arm), lambda o: o.ttft_p99_s))
        rows.append((arm, *map(str, values), compared))
    return header, rows


def _prefix_table(outcomes: Sequence[Outcome]) -> Table:
    header = ("binding", "hit rate", "share of an unbounded cache", "to round robin", "TTFT P50 s", "P99 s")
    rows: list[tuple[str, ...]] = []
    for arm in _arms(outcomes, PREFIX):
        rows.append(
            (
                arm,
                str(over_seeds(outcomes, PREFIX, arm, lambda o: o.hit_rate)),
                str(over_seeds(outcomes, PREFIX, arm, lambda o: o.hit_rate / o.bound_hit_rate)),
                str(ratio(outcomes, PREFIX, (arm, "round robin"), lambda o: o.hit_rate)),
                str(over_seeds(outcomes, PREFIX, arm, lambda o: o.ttft_p50_s)),
                str(over_seeds(outcomes, PREFIX, arm, lambda o: o.ttft_p99_s)),
            )
        )
    return header, rows


def as_text(outcomes: Sequence[Outcome]) -> str:
    """Return the tables for a terminal."""
    return "\n\n".join(
        f"{output.paint(title, 'cyan')}\n{output.table(header, rows, right=range(1, len(header)))}"
        for title, (header, rows) in tables(outcomes).items()
    )


def as_markdown(outcomes: Sequence[Outcome]) -> str:
    """Return the tables as Markdown."""
    parts = []
    for title, (header, rows) in tables(outcomes).items():
        lines = ["| " + " | ".join(row) + " |" for row in [header, *rows]]
        lines.insert(1, "|---|" + "---:|" * (len(header) - 1))
        parts.append(f"**{title[0].upper()}{title[1:]}**\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def as_record(outcomes: Sequence[Outcome], runs: Sequence[Run]) -> dict[str, Any]:
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


def write(outcomes: Sequence[Outcome], runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write record, tables and figures into a folder; return their paths.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ordered = sorted(outcomes, key=lambda o: (list(CONDITIONS).index(o.condition), o.seed, o.arm))
    record, text = folder / "fleet.json", folder / "fleet.md"
    record.write_text(json.dumps(as_record(ordered, runs), indent=1) + "\n")
    text.write_text(as_markdown(ordered) + "\n")
    paths = [record, text]
    for name, figure in figures(ordered, runs[0].fleet.num_workers).items():
        for kind in ("png", "svg"):
            path = folder / f"{name}.{kind}"
            figure.savefig(path, dpi=150, bbox_inches="tight")
            paths.append(path)
    return paths


def figures(outcomes: Sequence[Outcome], num_workers: int) -> dict[str, Figure]:
    """Return the figures by name."""
    import matplotlib as mpl  # noqa: PLC0415 # slow to import, and only needed here

    mpl.use("agg")
    mpl.rcParams.update({"svg.hashsalt": "octavo", "font.size": 10, "axes.spines.top": False})
    mpl.rcParams.update({"axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25})
    present = {outcome.condition for outcome in outcomes}
    made = {}
    if present - {PREFIX}:
        conditions = [c for c in (HEALTHY, DEGRADED) if c in present]
        made["fleet_ttft"] = _wait_figure(outcomes, conditions, num_workers)
    if PREFIX in present:
        made["fleet_prefix"] = _prefix_figure(outcomes)
    return made


def _wait_figure(outcomes: Sequence[Outcome], conditions: Sequence[str], num_workers: int) -> Figure:
    from matplotlib.figure import Figure  # noqa: PLC0415 # slow to import, and only needed here

    figure = Figure(figsize=(5.6 * len(conditions), 4.2), layout="constrained")
    panels = figure.subplots(1, len(conditions), squeeze=False)[0]
    for panel, condition in zip(panels, conditions, strict=True):
        _survival(panel, outcomes, condition)
    panels[0].set_ylabel("share of requests that wait longer")
    figure.suptitle(f"Time to the first token, {num_workers} workers", fontweight="bold")
    return figure


def _survival(panel: Axes, outcomes: Sequence[Outcome], condition: str) -> None:
    """Draw, for each arm, the share of requests that wait longer than so many seconds."""
    left = 1.0 - np.linspace(0, 1, NUM_QUANTILES)
    shown = left >= 2e-3
    for arm in _arms(outcomes, condition):
        quantiles = np.array(
            [o.ttft_quantiles_s for o in outcomes if (o.condition, o.arm) == (condition, arm)]
        )
        width = 2.6 if arm == LATE else 1.5
        middle = np.median(quantiles, axis=0)
        panel.plot(middle[shown], left[shown], color=_COLOURS[arm], linewidth=width, label=arm)
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlim(left=0.1)
    panel.set_ylim(2e-3, 1.0)
    panel.axhline(0.01, color="black", linewidth=0.8, linestyle=":")
    panel.annotate("P99", (0.11, 0.0107), fontsize=8)
    panel.xaxis.set_major_formatter("{x:g}")
    # Within a decade matplotlib names the minor ticks too, one over the other.
    panel.xaxis.set_minor_formatter(
        lambda value, _: f"{value:g}" if round(value * 10) in {2, 5, 20, 50} else ""
    )
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}" if value >= 0.01 else f"{value:.1%}")
    panel.set_xlabel("seconds to the first token")
    panel.set_title(CONDITIONS[condition], fontsize=10)
    panel.legend(frameon=False, fontsize=9, loc="upper right")


def _prefix_figure(outcomes: Sequence[Outcome]) -> Figure:
    from matplotlib.figure import Figure  # noqa: PLC0415 # slow to import, and only needed here

    figure = Figure(figsize=(5.6, 2.8), layout="constrained")
    panel = figure.subplots()
    arms = _arms(outcomes, PREFIX)[::-1]
    estimates = [over_seeds(outcomes, PREFIX, arm, lambda o: o.hit_rate) for arm in arms]
    panel.barh(
        arms,
        [one.mean for one in estimates],
        xerr=[one.half_width or 0.0 for one in estimates],
        color=[_COLOURS[arm] for arm in arms],
        height=0.6,
    )
    for arm, one in zip(arms, estimates, strict=True):
        panel.annotate(f"{one.mean:.1%}", (0.004, arm), va="center", color="white", fontweight="bold")
    bound = over_seeds(outcomes, PREFIX, LATE, lambda o: o.bound_hit_rate).mean
    panel.axvline(bound, color="black", linewidth=1.0, linestyle="--")
    panel.annotate(
        f"cache without bounds {bound:.1%} ", (bound, 1.02), xycoords=("data", "axes fraction"), ha="right"
    )
    panel.grid(axis="y", visible=False)
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    panel.set_xlabel("share of prompt tokens found in a cache")
    return figure
