"""The control loop on a terminal: what the figures are and how they went, in characters that any has."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Final

from octavo.cli import output
from octavo.status import HistoryPoint, Status

LEVELS: Final = ("normal", "trim", "shed batch", "shed standard", "open")
LEVEL_COLOURS: Final = ("green", "yellow", "yellow", "red", "red")
_BARS: Final = "▁▂▃▄▅▆▇█"
_ASCII_BARS: Final = "_.-=+*#@"
_SPAN_S: Final = 600.0
_LABEL_CELLS: Final = 16
_VALUE_CELLS: Final = 10
_MIN_CELLS: Final = 20
_MAX_CELLS: Final = 120


def _count(value: float) -> str:
    return f"{value:.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def _cost(value: float) -> str:
    return f"{value:.4f}"


def _time(value: float) -> str:
    return output.duration(value) if value else "-"


# Label, value of a point, how it is written, colour of its line.
Row = tuple[str, Callable[[HistoryPoint], float], Callable[[float], str], str]
_GROUPS: Final[tuple[tuple[Row, ...], ...]] = (
    (
        ("first token P50", lambda point: point.rates.ttft_p50_s, _time, "cyan"),
        ("first token P99", lambda point: point.rates.ttft_p99_s, _time, "cyan"),
        ("queue P50", lambda point: point.rates.queue_p50_s, _time, "cyan"),
        ("queue P99", lambda point: point.rates.queue_p99_s, _time, "cyan"),
        ("per token P50", lambda point: point.rates.itl_p50_s, _time, "cyan"),
        ("per token P99", lambda point: point.rates.itl_p99_s, _time, "cyan"),
    ),
    (
        ("requests/s", lambda point: point.rates.requests_per_s, _count, "green"),
        ("refused/s", lambda point: point.rates.refused_per_s, _count, "red"),
        ("tokens in/s", lambda point: point.rates.prompt_tokens_per_s, _count, "green"),
        ("tokens out/s", lambda point: point.rates.output_tokens_per_s, _count, "green"),
        ("running", lambda point: point.running, _count, "green"),
        ("waiting", lambda point: point.waiting, _count, "yellow"),
    ),
)
_COST: Final[Row] = ("cost/1000 tokens", lambda point: point.rates.cost_per_1k_tokens or 0.0, _cost, "green")
_LEVEL: Final[Row] = ("level", lambda point: point.level, _count, "yellow")


def sparkline(values: Sequence[float], cells: int, top: float, bars: str = _BARS) -> str:
    """Return values as a line of bars, newest on the right; each cell shows the highest of its share.

    Args:
        values: one per slot of time, oldest first.
        top: the value of a full bar.
        bars: characters from the lowest to the highest.
    """
    cells = min(cells, len(values))
    line = []
    for cell in range(cells):
        share = values[cell * len(values) // cells : (cell + 1) * len(values) // cells]
        value = max(share)
        height = min(len(bars) - 1, int(value / top * (len(bars) - 1) + 0.5)) if top > 0 else 0
        # What is not zero is told from what is.
        line.append(bars[max(height, 1)] if value > 0 else bars[0])
    return "".join(line)


def control_loop(status: Status, points: Sequence[HistoryPoint], width: int | None = None) -> str:
    """Return latency, throughput, cost and level, now and over the last ten minutes."""
    width = shutil.get_terminal_size((100, 24)).columns if width is None else width
    cells = max(_MIN_CELLS, min(_MAX_CELLS, width - _LABEL_CELLS - 2 * _VALUE_CELLS - 4))
    now = HistoryPoint(
        status.uptime_s,
        status.level,
        status.live_requests,
        sum(queue.waiting for queue in status.queues),
        sum(worker.running for worker in status.workers),
        status.rates,
    )
    spaced = _spaced(points, now)
    span = min(_SPAN_S, spaced[-1].uptime_s - spaced[0].uptime_s)
    past = f"last {span / 60:.0f} min" if span >= 60 else f"last {span:.0f} s" if span >= 1 else ""
    header = f"{'':{_LABEL_CELLS}}{'NOW':>{_VALUE_CELLS}}{'PEAK':>{_VALUE_CELLS}}  {past}"
    lines = [output.paint(header.rstrip(), "bold")]
    for rows in _GROUPS:
        lines += [_line(row, now, spaced, cells) for row in rows]
        lines.append("")
    if any(point.rates.cost_per_1k_tokens is not None for point in spaced):
        lines.append(_line(_COST, now, spaced, cells))
    lines.append(_line(_LEVEL, now, spaced, cells, top=float(len(LEVELS) - 1)))
    return "\n".join(lines)


def _line(
    row: Row, now: HistoryPoint, points: Sequence[HistoryPoint], cells: int, top: float | None = None
) -> str:
    label, value_of, write, colour = row
    values = [value_of(point) for point in points]
    peak = max(values)
    bars = _BARS if _can_show(_BARS) else _ASCII_BARS
    drawn = output.paint(sparkline(values, cells, peak if top is None else top, bars), colour)
    return (
        f"{label:<{_LABEL_CELLS}}{write(value_of(now)):>{_VALUE_CELLS}}{write(peak):>{_VALUE_CELLS}}  {drawn}"
    )


def _spaced(points: Sequence[HistoryPoint], now: HistoryPoint) -> list[HistoryPoint]:
    """Return the points of the span that is shown, and the present one."""
    return [*(point for point in points if now.uptime_s - _SPAN_S <= point.uptime_s < now.uptime_s), now]


def _can_show(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
