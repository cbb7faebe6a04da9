"""An overload as people read it: a table of its phases, and a picture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.axes import Axes

from octavo_lab.load.records import Outcome
from octavo_lab.load.statistics import needed
from octavo_lab.overload.timeline import QUANTILES, Timeline
from octavo_lab.plots import BLUE, GREEN, GREY, INK, RED, panels, save, styled
from octavo_lab.report import milliseconds, table

LEVELS: Final = ("normal", "trim", "shed batch", "shed standard", "open")
_BUCKET_S: Final = 2.0


def as_text(timeline: Timeline) -> str:
    """Return a table of the phases, and how long the way back took."""
    record, measured = timeline.as_record(), timeline.calibration
    rows = []
    for name in ("baseline", "overload", "recovery"):
        one = record[name]
        ended = ", ".join(f"{count} {reason}" for reason, count in one["outcomes"].items())
        rates = (f"{one['offered_per_s']:.2f}", f"{one['goodput_per_s']:.2f}")
        ttfts = map(milliseconds, (one["ttft_p50_s"], one["ttft_p99_s"]))
        rows.append((name, *rates, *ttfts, one["highest_level"], ended))
    ttft_ms, tpot_ms = measured.unloaded_ttft_s * 1000, measured.unloaded_tpot_s * 1000
    unloaded = f"unloaded TTFT {ttft_ms:.0f} ms and TPOT {tpot_ms:.1f} ms"
    header = ("phase", "offered/s", "good/s", "TTFT P50 ms", "TTFT P99 ms", "level", "ended")
    back = f"level 0 again {timeline.level_zero_s:.1f} s after the overload"
    return (
        f"capacity {measured.capacity_per_s:.2f} requests/s, {unloaded}\ngood: {timeline.slo}\n\n"
        f"{table(header, rows)}\n\n{back}, {_latency_told(timeline)}"
    )


def _latency_told(timeline: Timeline) -> str:
    at, back_s = timeline.latency_quantile, timeline.latency_back_s
    if at is None:
        return f"TTFT of the baseline unknown: it wants {needed(QUANTILES[-1])} answered requests"
    what = f"TTFT within 20% of the baseline's P{100 * at:g}"
    return f"{what} not before the end" if back_s is None else f"{what} after {back_s:.1f} s"


def plot(timeline: Timeline, path: Path) -> None:
    """Draw the timeline into a file.

    Raises:
        OSError: it cannot be written.
    """
    with styled():
        figure, (rates, latency, levels) = panels((10, 8), rows=3, sharex=True)
        _draw_rates(timeline, rates)
        _draw_latency(timeline, latency)
        at = [look.at_s for look in timeline.looks]
        levels.step(at, [look.level for look in timeline.looks], where="post", color=RED)
        levels.set_yticks(range(len(LEVELS)), LEVELS)
        levels.set_ylim(-0.3, 4.3)
        levels.set_xlabel("seconds")
        queue = levels.twinx()
        queue.plot(at, [look.waiting for look in timeline.looks], color=GREY, linewidth=0.8)
        queue.grid(visible=False)
        queue.set_ylabel("waiting")
        for panel in (rates, latency, levels):
            panel.axvspan(timeline.overload_from_s, timeline.overload_to_s, color="#f0e0d0", zorder=0)
        capacity = timeline.calibration.capacity_per_s
        rates.set_title(f"Overload and recovery: capacity {capacity:.1f} requests/s, good is {timeline.slo}")
        save(figure, path)


def _draw_rates(timeline: Timeline, panel: Axes) -> None:
    starts = [index * _BUCKET_S for index in range(math.ceil(timeline.run.until_s / _BUCKET_S))]
    buckets = [timeline.between(start, start + _BUCKET_S) for start in starts]
    refused = [sum(one.outcome is Outcome.REFUSED for one in bucket) for bucket in buckets]
    for label, counts, colour in (
        ("offered", [len(bucket) for bucket in buckets], INK),
        ("good", [sum(map(timeline.slo.met_by, bucket)) for bucket in buckets], GREEN),
        ("refused", refused, RED),
    ):
        panel.step(starts, np.array(counts) / _BUCKET_S, where="post", label=label, color=colour)
    panel.set_ylabel("requests/s")
    panel.legend(loc="upper right")


def _draw_latency(timeline: Timeline, panel: Axes) -> None:
    drawn = [(one.offered.planned_s, one.ttft_s) for one in timeline.run.requests if one.ttft_s is not None]
    if drawn:
        at, ttfts = zip(*drawn, strict=True)
        panel.scatter(at, ttfts, s=5, color=BLUE)
    if timeline.slo.ttft_s is not None:
        panel.axhline(timeline.slo.ttft_s, color=INK, linewidth=0.8, linestyle="--")
    panel.set_ylabel("TTFT, s")
