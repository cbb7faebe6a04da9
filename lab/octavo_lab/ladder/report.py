"""The report of an experiment: one record from which the pages are made, and which says all that they say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final

from octavo_lab.ladder.cells import CellResult
from octavo_lab.ladder.config import ARMS, CONTROL, RUNGS, SUBJECT, StaticSettings
from octavo_lab.ladder.experiment import Measurements
from octavo_lab.ladder.figures import Figures, figures_of
from octavo_lab.load.statistics import Interval, ratio_interval

FORMAT: Final = 1
KIND: Final = "octavo-ladder"
_DIGITS: Final = 5
ARTICLES: Final = {
    "throughput_ratio": 2.13,
    "p50_ratio": 0.32,
    "p99_ratio": 0.24,
    "kv_use_static": 0.46,
    "kv_use_paged": 0.93,
}
"""The source articles' figures: Llama-2-13B on two A10 GPUs, ShareGPT; 856 against 1824 tokens per second,
P50 1200 against 380 ms, P99 8900 against 2100 ms."""
_CHANGES: Final = (
    ("no padding, and finished rows are free", "static", "static-nowaste"),
    ("length buckets, with the waste", "static", "static-buckets"),
    ("length buckets, without it", "static-nowaste", "static-buckets-nowaste"),
    ("rows leave and join at every step, paged memory", "static-nowaste", "continuous"),
    ("chunked prefill", "continuous", "continuous-chunked"),
    ("prefix cache", "continuous-chunked", "continuous-chunked-prefix"),
)
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


@dataclass(frozen=True, slots=True)
class Change:
    """What one change does to the throughput of a saturated arm."""

    what: str
    before: str
    after: str
    ratio: Interval


@dataclass(frozen=True, slots=True)
class LadderReport:
    """Everything that is told."""

    measured: Measurements
    figures: AllFigures
    comparison: LadderComparison
    changes: list[Change]
    """What each change is worth at the highest rung, where every arm is saturated."""
    ended_at: str

    @property
    def rungs(self) -> dict[str, float]:
        """Requests per second by rung, from the lightest."""
        loads = self.measured.loads
        return {} if loads is None else dict(sorted(loads.rungs.items(), key=lambda item: item[1]))

    @property
    def arms(self) -> list[str]:
        """The arms that have been measured, in the order of the ladder."""
        there = {arm for arm, _ in self.figures}
        return [name for name in ARMS if name in there]

    def rows(self) -> Iterator[Figures]:
        """Yield the figures by rung, then by arm."""
        for rung in self.rungs:
            yield from self.at(rung)

    def at(self, rung: str | None) -> list[Figures]:
        """Return the figures at a rung, by arm."""
        return [self.figures[arm, rung] for arm in self.arms if rung and (arm, rung) in self.figures]

    def compared(self, rung: str | None) -> tuple[Figures | None, Figures | None]:
        """Return the figures of control and subject at a rung."""
        return self.figures.get((CONTROL, rung or "")), self.figures.get((SUBJECT, rung or ""))


def make_report(measured: Measurements) -> LadderReport:
    """Compute the figures of an experiment, whole or partial."""
    groups: dict[tuple[str, str], list[CellResult]] = {}
    for result in sorted(measured.results, key=lambda one: one.cell.repeat):
        if result.run.measured:
            groups.setdefault((result.cell.arm, result.cell.rung), []).append(result)
    figures = {key: figures_of(results, measured.config) for key, results in groups.items()}
    loads, measured_rungs = measured.loads, {rung for _, rung in figures}
    reached = {rung: rate for rung, rate in (loads.rungs if loads else {}).items() if rung in measured_rungs}
    comparison = compare(figures, reached, loads.control_rung if loads else None)
    ratios = (
        (one, _throughput_ratio(figures, comparison.saturated_rung, one[2], one[1])) for one in _CHANGES
    )
    changes = [Change(*one, ratio) for one, ratio in ratios if ratio is not None]
    ended_at = datetime.now(UTC).isoformat(timespec="seconds")
    return LadderReport(measured, figures, comparison, changes, ended_at)


def compare(figures: AllFigures, rungs: Mapping[str, float], control_rung: str | None) -> LadderComparison:
    """Return the subject against the control."""
    top = max(rungs, key=rungs.__getitem__, default=None)
    at_top = {arm: one for (arm, rung), one in figures.items() if rung == top}
    static = {arm: one.tokens_per_s.value for arm, one in at_top.items() if ARMS[arm].static}
    best_static = max(static, key=static.__getitem__, default=None)
    return LadderComparison(
        subject=SUBJECT,
        control=CONTROL,
        control_rung=control_rung,
        saturated_rung=top,
        throughput_ratio=_throughput_ratio(figures, top, SUBJECT, CONTROL),
        p50_ratio=_latency_ratio(figures, control_rung, "p50"),
        p99_ratio=_latency_ratio(figures, control_rung, "p99"),
        kv_use_paged=at_top[SUBJECT].kv_written_waited if SUBJECT in at_top else None,
        kv_use_static=at_top[CONTROL].kv_written_waited if CONTROL in at_top else None,
        throughput_of_best_static=_throughput_ratio(figures, top, SUBJECT, best_static),
        best_static_over_control=_throughput_ratio(figures, top, best_static, CONTROL),
        best_static=best_static,
    )


def _throughput_ratio(
    figures: AllFigures, rung: str | None, over: str | None, under: str | None
) -> Interval | None:
    one, other = (figures.get((arm or "", rung or "")) for arm in (over, under))
    if one is None or other is None:
        return None
    return ratio_by_repeat(one.tokens_per_s_by_repeat, other.tokens_per_s_by_repeat)


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


def _latency_ratio(figures: AllFigures, rung: str | None, name: str) -> Interval | None:
    """Return the ratio of a quantile of the subject to the control's, end to end."""
    both = (figures.get((arm, rung or "")) for arm in (SUBJECT, CONTROL))
    one, other = (None if found is None else getattr(found.e2e, name).interval for found in both)
    if one is None or other is None:
        return None
    low = one.low / other.high if one.low is not None and other.high is not None else None
    high = one.high / other.low if one.high is not None and other.low else None
    return Interval(one.value / other.value, low, high)


def to_json(report: LadderReport) -> dict[str, Any]:
    """Return the whole report as plain values, with as many digits as numbers mean."""
    measured, head = report.measured, report.measured.head
    config, static = head.config, measured.found.static if measured.found else {}
    plan = None if measured.plan is None else asdict(measured.plan)
    if plan is not None:
        del plan["cells"]
    arms = {
        name: {
            "title": ARMS[name].title,
            "worker_args": config.worker_args(ARMS[name]),
            "scheduler_args": config.scheduler_args(ARMS[name], static.get(name, StaticSettings())),
        }
        for name in config.arms
    }
    record: dict[str, Any] = _rounded(
        {
            "format": FORMAT,
            "kind": KIND,
            "partial": measured.partial,
            "started_at": head.started_at,
            "ended_at": report.ended_at,
            "environments": head.environments,
            "config": asdict(config),
            "dataset": head.dataset,
            "arms": arms,
            "search": None if measured.found is None else asdict(measured.found),
            "loads": None if measured.loads is None else asdict(measured.loads),
            "rungs": {name: RUNGS[name] for name in report.rungs},
            "failures": head.failures,
            "plan": plan,
            "comparison": {**asdict(report.comparison), "articles": ARTICLES},
            "steps": [asdict(one) for one in report.changes],
            "figures": [asdict(row) for row in report.rows()],
        }
    )
    return record


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
