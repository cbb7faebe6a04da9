"""The experiment from its first stack to its last cell; what has been measured survives an interrupt."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Protocol

from octavo.errors import OctavoError

from octavo_lab.command import BenchError
from octavo_lab.ladder.arms import ARMS, StaticSettings
from octavo_lab.ladder.cells import CellResult, CellStore, LoadDriver
from octavo_lab.ladder.config import LadderConfig
from octavo_lab.ladder.plan import DRAIN_S, CellPlan, LadderCell, Loads, loads_of, plan_cells
from octavo_lab.ladder.search import CapacitySearch, SearchResult
from octavo_lab.ladder.stacks import ArmStacks
from octavo_lab.ladder.workload import Workload
from octavo_lab.machine import environment, gpu_reader, served
from octavo_lab.stored import read_record, write_record

FORMAT: Final = 1
_REPORT_S: Final = 15.0
"""Kept for the report."""
_SEARCH_SHARE: Final = 0.25
"""Share of the budget that tuning and search take, about; for the time left until they are done."""


class Show(Protocol):
    """Tells how far an experiment is."""

    def __call__(self, what: str, fraction: float, left_s: float | None) -> None:
        """`what` begins; so much is done, and it will take so long until all is."""


@dataclass(slots=True, kw_only=True)
class LadderRecord:
    """What an experiment is, and how it went: `config.json`."""

    format: int = FORMAT
    started_at: str
    config: LadderConfig
    environments: list[dict[str, Any]] = field(default_factory=list)
    """One for each time that it was begun or gone on with."""
    dataset: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    """Attempts at cells that came to nothing, in words."""


@dataclass(frozen=True, slots=True)
class Measurements:
    """All that an experiment has measured, whole or in part."""

    head: LadderRecord
    found: SearchResult | None
    loads: Loads | None
    plan: CellPlan | None
    results: list[CellResult]

    @property
    def config(self) -> LadderConfig:
        """What was to be measured."""
        return self.head.config

    @property
    def partial(self) -> bool:
        """Whether cells are missing."""
        return self.plan is None or len(self.results) < len(self.plan.cells)


class Experiment:
    """One experiment and its folder.

    `config.json`, `search.json`, `plan.json` and `cells/` are written as soon as each is known.
    """

    def __init__(self, config: LadderConfig, folder: Path, workload: Workload, show: Show) -> None:
        self.config = config
        self.folder = folder
        self._workload = workload
        self._show = show
        self._store = CellStore(folder / "cells")
        self._driver = LoadDriver(config, workload, gpu_reader())
        self._found: SearchResult | None = None
        self._plan: CellPlan | None = None
        self._head = LadderRecord(started_at=datetime.now(UTC).isoformat(timespec="seconds"), config=config)
        if (folder / "config.json").exists():
            self._head = read_record(folder / "config.json", LadderRecord)
            self._workload.recall(self._head.dataset)
        if (folder / "search.json").exists():
            self._found = read_record(folder / "search.json", SearchResult)
        if (folder / "plan.json").exists():
            self._plan = read_record(folder / "plan.json", CellPlan)

    def run(self) -> None:
        """Measure everything that has not been measured yet.

        Raises:
            BenchError: a stack does not start or the search fails.
            KeyboardInterrupt: what was measured until then is in the folder.
        """
        began = time.monotonic()
        self._head.environments.append(environment())
        self._write_head()
        with (
            closing(self._driver),
            ArmStacks(
                self.config, self.folder / "logs", lambda event: self._show(event, 0.0, None)
            ) as stacks,
        ):
            self._prepare(stacks)
            found = self._found or self._search(stacks)
            plan = self._plan or self._make_plan(
                found, self.config.budget_s - _REPORT_S - time.monotonic() + began
            )
            self._cells(stacks, found, plan)

    def measured(self) -> Measurements:
        """Return what there is."""
        cells = () if self._plan is None else self._plan.cells
        results = [self._store.get(cell) for cell in cells if self._store.has(cell)]
        loads = None if self._found is None else self._loads(self._found)
        return Measurements(self._head, self._found, loads, self._plan, results)

    # -- parts

    def _prepare(self, stacks: ArmStacks) -> None:
        self._show("starting", 0.0, self.config.budget_s)
        first = ARMS[self.config.arms[0]]
        static = self._found.static if self._found is not None else {}
        stack = stacks.use(first, static.get(first.name, StaticSettings()))
        self._driver.prepare(stack)
        self._head.dataset = self._workload.to_json()
        self._head.environments[-1]["served"] = served(stack.endpoint)
        self._write_head()

    def _write_head(self) -> None:
        write_record(self.folder / "config.json", self._head)

    def _search(self, stacks: ArmStacks) -> SearchResult:
        began, steps = time.monotonic(), 0

        def on_step(what: str) -> None:
            nonlocal steps
            left_s = self.config.budget_s - (time.monotonic() - began)
            self._show(what, _SEARCH_SHARE * min(1.0, steps / search.num_steps), left_s)
            steps += 1

        search = CapacitySearch(self.config, stacks, self._driver, on_step)
        self._found = search.run()
        write_record(self.folder / "search.json", self._found)
        return self._found

    def _loads(self, found: SearchResult) -> Loads:
        return loads_of(self.config, found.capacities, found.longest_batch_s)

    def _make_plan(self, found: SearchResult, available_s: float) -> CellPlan:
        self._plan = plan_cells(self.config, self._loads(found), available_s)
        write_record(self.folder / "plan.json", self._plan)
        return self._plan

    def _cells(self, stacks: ArmStacks, found: SearchResult, plan: CellPlan) -> None:
        left = [cell for cell in plan.cells if not self._store.has(cell)]
        begun, done_s = time.monotonic(), 0.0
        total_s = sum(map(_expected_s, left))
        for number, cell in enumerate(left, len(plan.cells) - len(left)):
            # What the cells have taken so far, against what was expected of them, tells what is to come.
            pace = (time.monotonic() - begun) / done_s if done_s else 1.0
            what = f"{cell.rung}, {cell.rate_per_s:.2f}/s, repeat {cell.repeat + 1}: {ARMS[cell.arm].title}"
            done = _SEARCH_SHARE + (1 - _SEARCH_SHARE) * number / len(plan.cells)
            self._show(what, done, pace * (total_s - done_s) + _REPORT_S)
            self._run_cell(stacks, found, cell)
            done_s += _expected_s(cell)

    def _run_cell(self, stacks: ArmStacks, found: SearchResult, cell: LadderCell) -> None:
        """Run a cell and keep its result; a second time if it comes to nothing, and no more."""
        arm = ARMS[cell.arm]
        for _ in range(2):
            try:
                stack = stacks.use(arm, found.static.get(arm.name, StaticSettings()))
                result = self._driver.cell(cell, stack)
            except (OctavoError, BenchError) as error:
                # The stack cannot be reached: what the requests themselves run into is part of a result.
                self._head.failures.append(f"{cell.name}: {error}")
                self._write_head()
                stacks.drop(arm)
                continue
            if not all(child.alive for child in stack.children):
                # It is part of the result: the requests have failed. The next cell gets a new stack.
                stacks.drop(arm)
            self._store.put(result)
            return


def _expected_s(cell: LadderCell) -> float:
    return cell.warm_up_s + cell.window_s + DRAIN_S


def config_of(folder: Path) -> LadderConfig:
    """Return the settings of an experiment that was begun in a folder.

    Raises:
        BenchError: there is none, or it is of another version.
    """
    head = read_record(folder / "config.json", LadderRecord)
    if head.format != FORMAT:
        raise BenchError(f"{folder}: an experiment of format {head.format}, this version has {FORMAT}")
    return head.config
