"""The report of an experiment: one record from which the pages are made, and which says all that they say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final

from octavo_lab.ladder.arms import ARMS, CONTROL, SUBJECT, StaticSettings
from octavo_lab.ladder.cells import CellResult
from octavo_lab.ladder.compare import ARTICLES, Change, LadderComparison, changes, compare
from octavo_lab.ladder.config import RUNGS
from octavo_lab.ladder.experiment import Measurements
from octavo_lab.ladder.figures import Figures, figures_of

FORMAT: Final = 1
KIND: Final = "octavo-ladder"
_DIGITS: Final = 5


@dataclass(frozen=True, slots=True)
class LadderReport:
    """Everything that is told."""

    measured: Measurements
    figures: dict[tuple[str, str], Figures]
    """By arm and rung."""
    comparison: LadderComparison
    changes: list[Change]
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
    ended_at = datetime.now(UTC).isoformat(timespec="seconds")
    return LadderReport(measured, figures, comparison, changes(figures, comparison.saturated_rung), ended_at)


def to_json(report: LadderReport) -> dict[str, Any]:
    """Return the whole report as plain values, with as many digits as numbers mean."""
    measured, head = report.measured, report.measured.head
    plan = None if measured.plan is None else asdict(measured.plan)
    if plan is not None:
        del plan["cells"]
    record: dict[str, Any] = _rounded(
        {
            "format": FORMAT,
            "kind": KIND,
            "partial": measured.partial,
            "started_at": head.started_at,
            "ended_at": report.ended_at,
            "environments": head.environments,
            "config": asdict(head.config),
            "dataset": head.dataset,
            "arms": {name: _arm(name, measured) for name in head.config.arms},
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


def _arm(name: str, measured: Measurements) -> dict[str, Any]:
    static = measured.found.static.get(name) if measured.found else None
    return {
        "title": ARMS[name].title,
        "worker_args": measured.config.worker_args(ARMS[name]),
        "scheduler_args": measured.config.scheduler_args(ARMS[name], static or StaticSettings()),
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
