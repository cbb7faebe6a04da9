"""The report of an experiment: one record from which the pages are made, and which says all that they say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from octavo_lab.ladder.arms import ARMS, StaticSettings
from octavo_lab.ladder.cells import CellResult, write_whole
from octavo_lab.ladder.compare import Comparison, Step, compare, comparison_to_json, steps
from octavo_lab.ladder.config import RUNGS
from octavo_lab.ladder.experiment import Measured
from octavo_lab.ladder.figures import Figures, figures_of
from octavo_lab.ladder.plan import CellPlan, plan_to_json
from octavo_lab.ladder.search import Found, found_to_json

FORMAT: Final = 1
KIND: Final = "octavo-ladder"
_DIGITS: Final = 5


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that is told."""

    measured: Measured
    figures: dict[tuple[str, str], Figures]
    comparison: Comparison
    steps: list[Step]
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
            for arm in self.arms:
                if (arm, rung) in self.figures:
                    yield self.figures[arm, rung]


def make_report(measured: Measured) -> Report:
    """Compute the figures of an experiment, whole or partial."""
    groups: dict[tuple[str, str], list[CellResult]] = {}
    for result in sorted(measured.results, key=lambda one: one.cell.repeat):
        if result.run.measured:
            groups.setdefault((result.cell.arm, result.cell.rung), []).append(result)
    figures = {key: figures_of(results, measured.config) for key, results in groups.items()}
    loads = measured.loads
    reached = {
        rung: rate
        for rung, rate in (loads.rungs if loads else {}).items()
        if any(r == rung for _, r in figures)
    }
    comparison = compare(figures, reached, loads.control_rung if loads else None)
    ended_at = datetime.now(UTC).isoformat(timespec="seconds")
    return Report(measured, figures, comparison, steps(figures, comparison.saturated_rung), ended_at)


def to_json(report: Report) -> dict[str, Any]:
    """Return the whole report as plain values."""
    measured = report.measured
    return {
        "format": FORMAT,
        "kind": KIND,
        "partial": measured.partial,
        "started_at": measured.started_at,
        "ended_at": report.ended_at,
        "environments": measured.environments,
        "config": measured.config.to_json(),
        "dataset": measured.dataset,
        "arms": {name: _arm(name, measured) for name in measured.config.arms},
        "search": None if measured.found is None else found_to_json(measured.found),
        "loads": None if measured.loads is None else asdict(measured.loads),
        "rungs": {name: RUNGS[name] for name in report.rungs},
        "failures": list(measured.failures),
        "plan": None if measured.plan is None else _plan(measured.plan),
        "comparison": comparison_to_json(report.comparison),
        "steps": [asdict(step) for step in report.steps],
        "figures": [asdict(row) for row in report.rows()],
    }


def _arm(name: str, measured: Measured) -> dict[str, Any]:
    arm, config = ARMS[name], measured.config
    found: Found | None = measured.found
    static = found.static.get(name, StaticSettings()) if found else StaticSettings()
    return {
        "title": arm.title,
        "worker_args": [*config.worker_args(), *arm.worker_args(), *config.extra_worker_args],
        "scheduler_args": [
            *config.scheduler_args(),
            *arm.scheduler_args(static, config.bucket_bounds),
            *config.extra_scheduler_args,
        ],
    }


def _plan(plan: CellPlan) -> dict[str, Any]:
    record = plan_to_json(plan)
    del record["cells"]
    return record


def write(report: Report, folder: Path) -> list[Path]:
    """Write report.json, report.md and report.html; return their paths.

    Raises:
        OSError: the folder cannot be written.
    """
    from octavo_lab.ladder.html import as_html  # noqa: PLC0415 # matplotlib is slow to import
    from octavo_lab.ladder.markdown import as_markdown  # noqa: PLC0415 # matplotlib is slow to import

    folder.mkdir(parents=True, exist_ok=True)
    # JSON first: it needs nothing but the figures, and the pages can be made from the folder again.
    made: dict[str, Callable[[], str]] = {
        "report.json": lambda: json.dumps(_plain(to_json(report)), separators=(",", ":")) + "\n",
        "report.md": lambda: as_markdown(report),
        "report.html": lambda: as_html(report),
    }
    for name, make in made.items():
        write_whole(folder / name, make())
    return [folder / name for name in made]


def _plain(value: Any) -> Any:
    """Return plain values with numbers that have as many digits as they mean."""
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    return value
