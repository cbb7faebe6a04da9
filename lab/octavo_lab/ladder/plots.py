"""The plots of the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from octavo_lab.ladder.config import ARMS, CONTROL, SUBJECT
from octavo_lab.ladder.figures import CDF_POINTS, Figures, Quantile
from octavo_lab.ladder.report import LadderReport
from octavo_lab.plots import GREEN, GREY, INK, RED, legend, log_axis, panels, percent, styled, svg
from octavo_lab.report import share

_ORANGE: Final = "#e07b39"
_BLUE: Final = "#5b8def"


def plots(report: LadderReport) -> Iterator[tuple[str, float, str]]:
    """Yield each plot that there is data for: its name, the rate that it is of, and itself as SVG."""
    if not report.figures:
        return
    measured = {rung for _, rung in report.figures}
    rung = next(one for one in (report.comparison.control_rung, *report.rungs) if one in measured)
    rows = report.at(rung)
    with styled():
        if len(report.rungs) > 1:
            yield "latency", 0.0, svg(_latency(report))
            yield "throughput", 0.0, svg(_throughput(report))
        yield "memory", 0.0, svg(_memory(report))
        yield "distributions", report.rungs[rung], svg(_distributions(rows))
        yield "queue", report.rungs[rung], svg(_queues(rows))


def _dashed(arm: str) -> bool:
    """Return whether an arm is another one without waste or with a prefix cache: they share a colour."""
    return ARMS[arm].prefix or (ARMS[arm].static and not ARMS[arm].wasteful)


def _colour(arm: str) -> str:
    one = ARMS[arm]
    return (_ORANGE if one.buckets else RED) if one.static else GREEN if one.chunked else _BLUE


def _line(arm: str) -> dict[str, Any]:
    """Return how the line of an arm looks: those that are compared are the thick ones."""
    width = 2.4 if arm in (CONTROL, SUBJECT) else 1.3
    style = "--" if _dashed(arm) else "-"
    return {"color": _colour(arm), "linestyle": style, "linewidth": width, "label": ARMS[arm].title}


_POINTS: Final[dict[str, Any]] = {"marker": "o", "markersize": 3.5, "capsize": 2, "elinewidth": 0.9}


def _series(report: LadderReport, arm: str) -> list[Figures]:
    return [report.figures[arm, rung] for rung in report.rungs if (arm, rung) in report.figures]


def _latency(report: LadderReport) -> Figure:
    figure, (p50, p90, p99) = panels((10.5, 4.6), columns=3, sharey=True)
    for panel, name in ((p50, "p50"), (p90, "p90"), (p99, "p99")):
        shown = [_quantile_line(panel, _series(report, arm), arm, name) for arm in report.arms]
        most = max(report.rungs.values())
        panel.set(yscale="log", xlabel="requests per second offered", xlim=(0, 1.04 * most))
        log_axis(panel.yaxis)
        panel.set_title(f"P{name[1:]}", loc="left", fontweight="bold")
        if not any(shown):
            panel.annotate("too few requests", (0.5, 0.5), xycoords="axes fraction", ha="center", color=GREY)
    p50.set_ylabel("seconds, end to end")
    legend(figure, p50)
    return figure


def _quantile_line(panel: Axes, rows: Sequence[Figures], arm: str, name: str) -> bool:
    """Draw one percentile of one arm over the rungs; return whether there was any."""
    told: list[tuple[float, Quantile]] = [(row.rate_per_s, getattr(row.e2e, name)) for row in rows]
    known = [(rate, one.interval) for rate, one in told if one.interval is not None]
    beyond = [(rate, one.over_s) for rate, one in told if one.over_s]
    values = [one.value for _, one in known]
    below = [one.value - min(one.value, one.low or one.value) for _, one in known]
    above = [max(one.value, one.high or one.value) - one.value for _, one in known]
    look = _line(arm)
    panel.errorbar([rate for rate, _ in known], values, yerr=(below, above), **look, **_POINTS)
    hollow = {**look, "label": None, "linestyle": "", "markerfacecolor": "none"}
    if beyond:
        panel.plot(*zip(*beyond, strict=True), marker="^", markersize=7, **hollow)
    if known and beyond:
        ends = (known[-1][0], beyond[0][0]), (values[-1], beyond[0][1])
        panel.plot(*ends, **{**look, "label": None, "linestyle": ":"})
    return bool(known or beyond)


def _throughput(report: LadderReport) -> Figure:
    figure, (panel,) = panels((9.6, 4.4))
    for arm in report.arms:
        rows = _series(report, arm)
        values = [row.tokens_per_s for row in rows]
        error = [0.0 if one.high is None else min(one.high - one.value, 0.5 * one.value) for one in values]
        at = [row.rate_per_s for row in rows]
        panel.errorbar(at, [one.value for one in values], yerr=error, **_line(arm), **_POINTS)
    requests = [one for result in report.measured.results for one in result.run.measured]
    most = max(report.rungs.values())
    offered = most * float(np.mean([one.offered.output_tokens for one in requests]))
    panel.plot([0, most], [0, offered], color=GREY, linewidth=1, linestyle=":")
    highest = max(row.tokens_per_s.value for row in report.rows())
    panel.set(ylim=(0, 1.35 * highest), xlim=(0, None))
    panel.set(xlabel="requests per second offered", ylabel="output tokens per second")
    legend(figure, panel)
    return figure


def _memory(report: LadderReport) -> Figure:
    rows = report.at(report.comparison.saturated_rung)
    rows = [row for row in rows if row.arm in (CONTROL, "static-nowaste", SUBJECT)] or rows[:3]
    figure, drawn = panels((3.5 * max(1, len(rows)), 3.3), columns=max(1, len(rows)), sharey=True)
    for panel, row in zip(drawn, rows, strict=False):
        series = row.series
        look: dict[str, Any] = {"color": _colour(row.arm), "linewidth": 0}
        at, written, taken = series["at_s"], series["written"], series["active"]
        panel.fill_between(at, written, alpha=0.75, label="written", **look)
        panel.fill_between(at, written, taken, alpha=0.25, label="taken, not written", **look)
        if ARMS[row.arm].static:
            panel.plot(at, series["external"], color=INK, linewidth=1.0, label="external fragmentation")
        told = f"{ARMS[row.arm].title}\n{share(row.kv_written_waited, 0)} written while others wait"
        panel.set_title(told, loc="left", fontsize=9.5)
        panel.set(ylim=(0, 1), xlabel="seconds")
        panel.yaxis.set_major_formatter(percent)
    drawn[0].set_ylabel("share of all slots")
    legend(figure, drawn[0], columns=3)
    return figure


def _distributions(rows: Sequence[Figures]) -> Figure:
    figure, drawn = panels((9.6, 4.6), columns=2, sharey=True)
    for panel, kind, title in zip(drawn, ("e2e", "ttft"), ("end to end", "to the first token"), strict=True):
        for row in rows:
            times = getattr(row, kind).cdf_s
            panel.plot(times, np.arange(len(times)) / CDF_POINTS, **_line(row.arm))
        panel.set(xscale="log", xlabel=f"seconds {title}", ylim=(0, 1.01))
        log_axis(panel.xaxis)
        panel.yaxis.set_major_formatter(percent)
    drawn[0].set_ylabel("share of requests")
    legend(figure, drawn[0])
    return figure


def _queues(rows: Sequence[Figures]) -> Figure:
    figure, (panel,) = panels((9.6, 3.9))
    names = list(rows[0].queue_by_bucket)
    width = 0.84 / len(rows)
    for number, row in enumerate(rows):
        at = np.arange(len(names)) - 0.42 + width * (number + 0.5)
        look: dict[str, Any] = {"color": _colour(row.arm), "hatch": "////" if _dashed(row.arm) else None}
        middle, tail = (
            [one.interval.value if (one := getattr(part, name)).interval else float("nan") for part in parts]
            for parts, name in ((row.queue_by_bucket.values(), "p50"), (row.queue_by_bucket.values(), "p90"))
        )
        panel.bar(at, middle, width * 0.92, edgecolor="white", linewidth=0, label=ARMS[row.arm].title, **look)
        panel.plot(at, tail, marker="_", markersize=7, color=INK, linestyle="")
    panel.set_xticks(range(len(names)), [f"{name} tokens" for name in names])
    panel.set(ylabel="seconds in the queue", xlim=(-0.5, len(names) - 0.5))
    panel.grid(axis="x", visible=False)
    legend(figure, panel)
    return figure
