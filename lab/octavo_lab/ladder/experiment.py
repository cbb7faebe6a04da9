"""The experiment from its first stack to its last cell; what has been measured survives an interrupt."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

from octavo.errors import OctavoError

from octavo_lab.command import BenchError
from octavo_lab.ladder.cells import ArmStacks, CellResult, CellStore, LoadDriver
from octavo_lab.ladder.config import ARMS, LadderConfig, StaticSettings
from octavo_lab.ladder.plan import CellPlan, LadderCell, Loads, loads_of, plan_cells
from octavo_lab.ladder.search import CapacitySearch, SearchResult
from octavo_lab.ladder.workload import Workload
from octavo_lab.machine import environment, gpu_reader, served
from octavo_lab.stored import RecordT, read_record, write_record

_REPORT_S: Final = 15.0
"""Kept for the report."""
_SEARCH_SHARE: Final = 0.25
"""Share of the budget that tuning and search take, about; for the time left until they are done."""
Show = Callable[[str, float, float | None], None]
"""Takes what begins, how much of the experiment is done, and the seconds that all of it will still take."""


@dataclass(slots=True, kw_only=True)
class LadderRecord:
    """What an experiment is, and how it went: `config.json`."""

    format: Literal[1] = 1
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
        self._found = self._read("search.json", SearchResult)
        self._plan = self._read("plan.json", CellPlan)
        head = self._read("config.json", LadderRecord)
        if head is not None:
            workload.record = dict(head.dataset)
        began = datetime.now(UTC).isoformat(timespec="seconds")
        self._head = head or LadderRecord(started_at=began, config=config)

    def run(self) -> None:
        """Measure what has not been measured yet; whatever ends it early, what there is is in the folder."""
        end_s = time.monotonic() + self.config.budget_s - _REPORT_S
        self._head.environments.append(environment())
        self._write_head()
        stacks = ArmStacks(self.config, self.folder / "logs", lambda event: self._show(event, 0.0, None))
        with closing(self._driver), closing(stacks):
            self._prepare(stacks)
            if self._found is None:
                self._found = self._search(stacks)
                write_record(self.folder / "search.json", self._found)
            if self._plan is None:
                loads = self._loads(self._found)
                self._plan = plan_cells(self.config, loads, end_s - time.monotonic())
                write_record(self.folder / "plan.json", self._plan)
            self._cells(stacks, self._found, self._plan)

    def measured(self) -> Measurements:
        """Return what there is."""
        cells = () if self._plan is None else self._plan.cells
        results = [self._store.get(cell) for cell in cells if self._store.has(cell)]
        loads = None if self._found is None else self._loads(self._found)
        return Measurements(self._head, self._found, loads, self._plan, results)

    # -- parts

    def _read(self, name: str, kind: type[RecordT]) -> RecordT | None:
        path = self.folder / name
        return read_record(path, kind) if path.exists() else None

    def _write_head(self) -> None:
        write_record(self.folder / "config.json", self._head)

    def _loads(self, found: SearchResult) -> Loads:
        return loads_of(self.config, found.capacities, found.longest_batch_s)

    def _prepare(self, stacks: ArmStacks) -> None:
        self._show("starting", 0.0, self.config.budget_s)
        first = ARMS[self.config.arms[0]]
        static = self._found.static if self._found is not None else {}
        stack = stacks.use(first, static.get(first.name, StaticSettings()))
        self._driver.prepare(stack)
        self._head.dataset = self._workload.record
        self._head.environments[-1]["served"] = served(stack.endpoint)
        self._write_head()

    def _search(self, stacks: ArmStacks) -> SearchResult:
        began, steps = time.monotonic(), 0

        def on_step(what: str) -> None:
            nonlocal steps
            left_s = self.config.budget_s - (time.monotonic() - began)
            self._show(what, _SEARCH_SHARE * min(1.0, steps / search.num_steps), left_s)
            steps += 1

        search = CapacitySearch(self.config, stacks, self._driver, on_step)
        return search.run()

    def _cells(self, stacks: ArmStacks, found: SearchResult, plan: CellPlan) -> None:
        left = [cell for cell in plan.cells if not self._store.has(cell)]
        begun, done_s = time.monotonic(), 0.0
        total_s = sum(cell.expected_s for cell in left)
        for number, cell in enumerate(left, len(plan.cells) - len(left)):
            # What the cells have taken so far, against what was expected of them, tells what is to come.
            pace = (time.monotonic() - begun) / done_s if done_s else 1.0
            what = f"{cell.rung}, {cell.rate_per_s:.2f}/s, repeat {cell.repeat + 1}: {ARMS[cell.arm].title}"
            done = _SEARCH_SHARE + (1 - _SEARCH_SHARE) * number / len(plan.cells)
            self._show(what, done, pace * (total_s - done_s) + _REPORT_S)
            # A second time if it comes to nothing, and no more.
            if not self._run_cell(stacks, found, cell):
                self._run_cell(stacks, found, cell)
            done_s += cell.expected_s

    def _run_cell(self, stacks: ArmStacks, found: SearchResult, cell: LadderCell) -> bool:
        """Run a cell and keep its result; return whether there is one."""
        try:
            stack = stacks.use(ARMS[cell.arm], found.static.get(cell.arm, StaticSettings()))
            result = self._driver.cell(cell, stack)
        except (OctavoError, BenchError) as error:
            # The stack cannot be reached: what the requests themselves run into is part of a result.
            self._head.failures.append(f"{cell.name}: {error}")
            self._write_head()
            stacks.drop(cell.arm)
            return False
        if not all(child.alive for child in stack.children):
            # It is part of the result: the requests have failed. The next cell gets a new stack.
            stacks.drop(cell.arm)
        self._store.put(result)
        return True
