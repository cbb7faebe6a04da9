"""How figures are written in reports."""

from __future__ import annotations

from octavo_lab.ladder.figures import Latency, Quantile
from octavo_lab.load.statistics import Interval, needed

MISSING = "\N{EN DASH}"


def seconds(value: float) -> str:
    """Return a time span with three digits that matter."""
    if value < 1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"


def plain(interval: Interval | None, form: str = "{:.2f}") -> str:
    """Return an estimate with its interval."""
    if interval is None:
        return MISSING
    value = form.format(interval.value)
    if interval.low is None or interval.high is None:
        return value
    return f"{value} ({form.format(interval.low)} to {form.format(interval.high)})"


def rate(interval: Interval) -> str:
    """Return an estimate of a rate; its lower bound is never below nothing."""
    low = interval.low if interval.low is None else max(0.0, interval.low)
    return plain(Interval(interval.value, low, interval.high), "{:.1f}")


def quantile(one: Quantile) -> str:
    """Return a quantile with its interval, or why there is none."""
    if one.interval is None:
        return short(one)
    value = seconds(one.interval.value)
    low, high = one.interval.low, one.interval.high
    if low is None and high is None:
        return value
    ends = "?" if low is None else seconds(low), "?" if high is None else seconds(high)
    return f"{value} ({ends[0]} to {ends[1]})"


def short(one: Quantile) -> str:
    """Return a quantile without its interval."""
    if one.over_s is not None:
        return f"> {seconds(one.over_s)}" if one.over_s else "none answered"
    return MISSING if one.interval is None else seconds(one.interval.value)


def three(latency: Latency) -> str:
    """Return P50 / P90 / P99."""
    return " / ".join(short(one) for one in (latency.p50, latency.p90, latency.p99))


def share(value: float | None, digits: int = 1) -> str:
    """Return a share in percent."""
    return MISSING if value is None else f"{100 * value:.{digits}f}%"


def mib(value: int | None) -> str:
    """Return bytes in MiB."""
    return MISSING if value is None else f"{value / 2**20:,.0f} MiB"


LEGEND = (
    f"{MISSING}: too few requests (a P99 wants {needed(0.99)}, a P90 {needed(0.9)}, a P50 {needed(0.5)}). "
    "> x: the percentile lies among requests that were not answered, and is longer than any that was (x). "
    "In brackets: 95% confidence intervals, of percentiles from order statistics of all repeats together, of "
    "rates and of their ratios by Student's t over repeats (ratios: on logarithms, in pairs); a single "
    "repeat gives none."
)
