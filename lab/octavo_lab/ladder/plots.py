"""The plots of the report, as SVG that stands in a page."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from octavo_lab.ladder import words
from octavo_lab.ladder.arms import ARMS, CONTROL, SUBJECT
from octavo_lab.ladder.figures import CDF_POINTS, Figures, Latency, Quantile
from octavo_lab.ladder.report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS: Final = {
    "static": "#b3261e",
    "static-buckets": "#e07b39",
    "static-nowaste": "#b3261e",
    "static-buckets-nowaste": "#e07b39",
    "continuous": "#5b8def",
    "continuous-prefix": "#5b8def",
    "continuous-chunked": "#0b6e4f",
    "continuous-chunked-prefix": "#0b6e4f",
}
_INK: Final = "#1f2328"
_LONG: Final = re.compile(r"(-?\d+\.\d{2})\d+")
"""A number of a path with more digits than anybody sees."""


def dashes(arm: str) -> str:
    """Return the line style: dashed for what is the same, without waste or with a prefix cache."""
    return "--" if ARMS[arm].prefix or (ARMS[arm].static and not ARMS[arm].wasteful) else "-"


def plots(report: Report) -> Iterator[tuple[str, str, str]]:
    """Yield (title, what is seen, SVG) of each plot that there is data for."""
    mpl.use("agg")
    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "octavo",
        "font.family": "sans-serif",
        "font.size": 9.5,
        "text.color": _INK,
        "axes.labelcolor": _INK,
        "axes.edgecolor": "#8b949e",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.22,
        "xtick.color": "#57606a",
        "ytick.color": "#57606a",
        "legend.frameon": False,
    }
    if not report.figures:
        return
    with mpl.rc_context(style):
        if len(report.rungs) > 1:
            yield (
                "Latency against load",
                (
                    "End to end, of all requests; the bars are 95% intervals. An arrow: the percentile "
                    "lies among requests that were not answered while the cell lasted."
                ),
                _svg(_latency(report)),
            )
            yield (
                "Throughput against load",
                "Output tokens per second within the window. The grey line is what is offered.",
                _svg(_throughput(report)),
            )
        yield (
            "KV memory over time",
            (
                "The highest rung, first repeat, from its beginning with a backlog. Written: slots that "
                "hold keys and values. Taken: slots of blocks that a sequence has. The line is external "
                "fragmentation, which matters only where a run is needed."
            ),
            _svg(_memory(report)),
        )
        rung = _shown_rung(report)
        rate = report.rungs[rung]
        yield (
            "Distributions at the control's capacity",
            (
                f"All requests at {rate:.2f} per second; a curve that ends below 100% has requests "
                "without an answer."
            ),
            _svg(_distributions(report, rung)),
        )
        yield (
            "Time in the queue by prompt length",
            (
                f"At {rate:.2f} requests per second: P50 as a bar, P90 as a mark where there are enough "
                "requests."
            ),
            _svg(_queues(report, rung)),
        )


def _shown_rung(report: Report) -> str:
    control = report.comparison.control_rung
    measured = {rung for _, rung in report.figures}
    if control in measured:
        return str(control)
    return next(rung for rung in report.rungs if rung in measured)


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # As wide as the page lets it, and with the page's fonts.
    text = re.sub(r'(<svg [^>]*?)width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg [^>]*?)height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return re.sub(r' d="[^"]*"', lambda path: _LONG.sub(r"\1", path[0]), text)


def _series(report: Report, arm: str) -> list[Figures]:
    return [report.figures[arm, rung] for rung in report.rungs if (arm, rung) in report.figures]


def _legend(figure: Figure, panel: Axes, columns: int = 2) -> None:
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=9)


def _latency(report: Report) -> Figure:
    figure = Figure(figsize=(10.5, 4.6), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    for panel, name in zip(panels, ("p50", "p90", "p99"), strict=True):
        shown = False
        for arm in report.arms:
            shown |= _quantile_line(panel, _series(report, arm), arm, name)
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if _first_digit(value) in "25" else "")
        panel.set_title(f"P{name[1:]}", loc="left", fontweight="bold")
        panel.set_xlabel("requests per second offered")
        if not shown:
            panel.annotate(
                "too few requests", (0.5, 0.5), xycoords="axes fraction", ha="center", color="#8b949e"
            )
    panels[0].set_ylabel("seconds, end to end")
    for panel in panels:
        panel.set_xlim(0, 1.04 * max(report.rungs.values()))
    _legend(figure, panels[0])
    return figure


def _quantile_line(panel: Axes, rows: Sequence[Figures], arm: str, name: str) -> bool:
    """Draw one percentile of one arm over the rungs; return whether there was any."""
    known: list[tuple[float, float, float, float]] = []
    beyond: list[tuple[float, float]] = []
    for row in rows:
        one: Quantile = getattr(row.e2e, name)
        if one.interval is not None:
            value = one.interval.value
            low = value if one.interval.low is None else one.interval.low
            high = value if one.interval.high is None else one.interval.high
            known.append((row.rate_per_s, value, max(0.0, value - low), max(0.0, high - value)))
        elif one.over_s:
            beyond.append((row.rate_per_s, one.over_s))
    width = 2.4 if arm in (CONTROL, SUBJECT) else 1.3
    colour = COLOURS[arm]
    x, y, below, above = zip(*known, strict=True) if known else ((), (), (), ())
    panel.errorbar(
        x, y, yerr=[below, above], color=colour, linewidth=width, linestyle=dashes(arm), marker="o",
        markersize=3.5, capsize=2, elinewidth=0.9, label=ARMS[arm].title,
    )  # fmt: skip
    for at, over in beyond:
        panel.plot([at], [over], marker="^", color=colour, markersize=7, markerfacecolor="none", linestyle="")
    if known and beyond:
        panel.plot([x[-1], beyond[0][0]], [y[-1], beyond[0][1]], color=colour, linewidth=width, linestyle=":")
    return bool(known or beyond)


def _first_digit(value: float) -> str:
    return f"{value:e}"[0]


def _throughput(report: Report) -> Figure:
    figure = Figure(figsize=(9.6, 4.4), layout="constrained")
    panel = figure.subplots()
    most = 0.0
    for arm in report.arms:
        rows = _series(report, arm)
        values = [row.tokens_per_s for row in rows]
        most = max([most, *(one.value for one in values)])
        error = [0.0 if one.high is None else min(one.high - one.value, 0.5 * one.value) for one in values]
        panel.errorbar(
            [row.rate_per_s for row in rows],
            [one.value for one in values],
            yerr=error,
            color=COLOURS[arm],
            linestyle=dashes(arm),
            linewidth=2.4 if arm in (CONTROL, SUBJECT) else 1.3,
            marker="o",
            markersize=3.5,
            capsize=2,
            elinewidth=0.9,
            label=ARMS[arm].title,
        )
    requests = [
        one.offered.output_tokens for result in report.measured.results for one in result.run.measured
    ]
    rates = np.array([0.0, max(report.rungs.values())])
    panel.plot(rates, rates * float(np.mean(requests)), color="#8b949e", linewidth=1, linestyle=":")
    panel.set_ylim(0, 1.35 * most)
    panel.set_xlim(left=0)
    panel.set_xlabel("requests per second offered")
    panel.set_ylabel("output tokens per second")
    _legend(figure, panel)
    return figure


def _memory(report: Report) -> Figure:
    top = report.comparison.saturated_rung or next(iter(report.rungs))
    arms = [arm for arm in (CONTROL, "static-nowaste", SUBJECT) if (arm, top) in report.figures]
    arms = arms or [arm for arm in report.arms if (arm, top) in report.figures][:3]
    figure = Figure(figsize=(3.5 * max(1, len(arms)), 3.3), layout="constrained")
    panels = figure.subplots(1, max(1, len(arms)), sharey=True, squeeze=False)[0]
    for panel, arm in zip(panels, arms, strict=False):
        row = report.figures[arm, top]
        series, colour = row.series, COLOURS[arm]
        at = series["at_s"]
        panel.fill_between(at, series["written"], color=colour, alpha=0.75, linewidth=0, label="written")
        panel.fill_between(
            at,
            series["written"],
            series["active"],
            color=colour,
            alpha=0.25,
            linewidth=0,
            label="taken, not written",
        )
        if ARMS[arm].static:
            panel.plot(at, series["external"], color=_INK, linewidth=1.0, label="external fragmentation")
        panel.set_title(
            f"{ARMS[arm].title}\n{words.share(row.kv_written_waited, 0)} written while others wait",
            loc="left",
            fontsize=9.5,
        )
        panel.set_ylim(0, 1)
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        panel.set_xlabel("seconds")
    panels[0].set_ylabel("share of all slots")
    _legend(figure, panels[0], columns=3)
    return figure


def _distributions(report: Report, rung: str) -> Figure:
    figure = Figure(figsize=(9.6, 4.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, kind, title in zip(panels, ("e2e", "ttft"), ("end to end", "to the first token"), strict=True):
        for arm in report.arms:
            row = report.figures.get((arm, rung))
            if row is None:
                continue
            latency: Latency = getattr(row, kind)
            shares = np.arange(len(latency.cdf_s)) / CDF_POINTS
            width = 2.4 if arm in (CONTROL, SUBJECT) else 1.3
            panel.plot(
                latency.cdf_s,
                shares,
                color=COLOURS[arm],
                linestyle=dashes(arm),
                linewidth=width,
                label=ARMS[arm].title,
            )
        panel.set_xscale("log")
        panel.xaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        panel.set_xlabel(f"seconds {title}")
        panel.set_ylim(0, 1.01)
    panels[0].set_ylabel("share of requests")
    _legend(figure, panels[0])
    return figure


def _queues(report: Report, rung: str) -> Figure:
    rows = [report.figures[arm, rung] for arm in report.arms if (arm, rung) in report.figures]
    names = list(rows[0].queue_by_bucket)
    figure = Figure(figsize=(9.6, 3.9), layout="constrained")
    panel = figure.subplots()
    width = 0.84 / len(rows)
    for number, row in enumerate(rows):
        at = np.arange(len(names)) - 0.42 + width * (number + 0.5)
        parts = list(row.queue_by_bucket.values())
        middle = [part.p50.interval.value if part.p50.interval else float("nan") for part in parts]
        tail = [part.p90.interval.value if part.p90.interval else float("nan") for part in parts]
        hatch = "////" if dashes(row.arm) == "--" else None
        panel.bar(
            at, middle, width * 0.92, color=COLOURS[row.arm], hatch=hatch, edgecolor="white", linewidth=0,
            label=ARMS[row.arm].title,
        )  # fmt: skip
        panel.plot(at, tail, marker="_", markersize=7, color=_INK, linestyle="")
    panel.set_xticks(range(len(names)), [f"{name} tokens" for name in names])
    panel.set_ylabel("seconds in the queue")
    panel.grid(axis="x", visible=False)
    _legend(figure, panel)
    return figure
