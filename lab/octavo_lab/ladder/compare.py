"""The subject against the control, and what the difference is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from octavo_lab.ladder.arms import ARMS, CONTROL, SUBJECT
from octavo_lab.ladder.figures import Figures
from octavo_lab.load.statistics import Interval, ratio_interval

ARTICLES: Final = {
    "throughput_ratio": 2.13,
    "p50_ratio": 0.32,
    "p99_ratio": 0.24,
    "kv_use_static": 0.46,
    "kv_use_paged": 0.93,
}
"""The source articles' figures: Llama-2-13B on two A10 GPUs, ShareGPT; 856 against 1824 tokens per second,
P50 1200 against 380 ms, P99 8900 against 2100 ms."""

AllFigures = Mapping[tuple[str, str], Figures]
"""By arm and rung."""


@dataclass(frozen=True, slots=True)
class LadderComparison:
    """Ratios of the subject to the control. None: not measured, or too few requests."""

    subject: str
    control: str
    control_rung: str | None
    saturated_rung: str | None
    throughput_ratio: Interval | None
    """Tokens per second at the highest rung, where both are saturated: the geometric mean over repeats."""
    p50_ratio: Interval | None
    """End to end, at the control's capacity. The bounds are the farthest apart that either side has."""
    p99_ratio: Interval | None
    kv_use_paged: float | None
    """Written slots over all slots, over the time in which requests waited, when saturated."""
    kv_use_static: float | None
    throughput_of_best_static: Interval | None
    """The subject to the best static arm, which wastes nothing."""
    best_static_over_control: Interval | None
    best_static: str | None


def compare(figures: AllFigures, rungs: Mapping[str, float], control_rung: str | None) -> LadderComparison:
    """Return the subject against the control."""
    top = max(rungs, key=rungs.__getitem__, default=None)
    of_control, of_subject = (figures.get((arm, control_rung or "")) for arm in (CONTROL, SUBJECT))
    control, subject = (figures.get((arm, top or "")) for arm in (CONTROL, SUBJECT))
    best_static = max(
        (one for (arm, rung), one in figures.items() if rung == top and ARMS[arm].static),
        key=lambda one: one.tokens_per_s.value,
        default=None,
    )
    return LadderComparison(
        subject=SUBJECT,
        control=CONTROL,
        control_rung=control_rung,
        saturated_rung=top,
        throughput_ratio=_throughput_ratio(subject, control),
        p50_ratio=_latency_ratio(of_subject, of_control, "p50"),
        p99_ratio=_latency_ratio(of_subject, of_control, "p99"),
        kv_use_paged=None if subject is None else subject.kv_written_waited,
        kv_use_static=None if control is None else control.kv_written_waited,
        throughput_of_best_static=_throughput_ratio(subject, best_static),
        best_static_over_control=_throughput_ratio(best_static, control),
        best_static=None if best_static is None else best_static.arm,
    )


def _throughput_ratio(over: Figures | None, under: Figures | None) -> Interval | None:
    if over is None or under is None:
        return None
    return ratio_by_repeat(over.tokens_per_s_by_repeat, under.tokens_per_s_by_repeat)


def ratio_by_repeat(over: Mapping[int, float], under: Mapping[int, float]) -> Interval | None:
    """Return the ratio of two rates from the repeats that both have; None when there is none, or no output.

    The arms of a repeat take turns within minutes, so a pair shares what the machine did then.
    """
    both = sorted(over.keys() & under.keys())
    pairs = [over[repeat] for repeat in both], [under[repeat] for repeat in both]
    return ratio_interval(*pairs) if both and min(*pairs[0], *pairs[1]) > 0 else None


def differs(ratio: Interval) -> bool:
    """Return whether a ratio is other than 1 as far as its interval tells; without one, nothing is told."""
    return ratio.low is not None and ratio.high is not None and not ratio.low <= 1 <= ratio.high


def _latency_ratio(over: Figures | None, under: Figures | None, name: str) -> Interval | None:
    one, other = (
        None if figures is None else getattr(figures.e2e, name).interval for figures in (over, under)
    )
    if one is None or other is None:
        return None
    low = one.low / other.high if one.low is not None and other.high is not None else None
    high = one.high / other.low if one.high is not None and other.low else None
    return Interval(one.value / other.value, low, high)


@dataclass(frozen=True, slots=True)
class Change:
    """What one change does to the throughput of a saturated arm."""

    what: str
    before: str
    after: str
    ratio: Interval


_CHANGES: Final = (
    ("no padding, and finished rows are free", "static", "static-nowaste"),
    ("length buckets, with the waste", "static", "static-buckets"),
    ("length buckets, without it", "static-nowaste", "static-buckets-nowaste"),
    ("rows leave and join at every step, paged memory", "static-nowaste", "continuous"),
    ("chunked prefill", "continuous", "continuous-chunked"),
    ("prefix cache", "continuous-chunked", "continuous-chunked-prefix"),
)


def changes(figures: AllFigures, top: str | None) -> list[Change]:
    """Return what each change is worth at the highest rung, where every arm is saturated."""
    ratios = (
        (one, _throughput_ratio(figures.get((one[2], top or "")), figures.get((one[1], top or ""))))
        for one in _CHANGES
    )
    return [Change(*one, ratio) for one, ratio in ratios if ratio is not None]
