"""The experiment from its first stack to its last cell; what has been measured survives an interrupt."""

from __future__ import annotations

import json
import time
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Protocol

from octavo.errors import OctavoError

from octavo_lab.command import BenchError
from octavo_lab.ladder.arms import ARMS, CONTROL, StaticSettings
from octavo_lab.ladder.cells import CellResult, CellStore, Driver, write_whole
from octavo_lab.ladder.config import LadderConfig
from octavo_lab.ladder.environment import environment, served
from octavo_lab.ladder.plan import (
    DRAIN_S,
    Cell,
    CellPlan,
    Loads,
    loads_of,
    plan_cells,
    plan_from_json,
    plan_to_json,
)
from octavo_lab.ladder.search import Found, Search, found_from_json, found_to_json
from octavo_lab.ladder.stacks import ArmStacks
from octavo_lab.ladder.watch import gpu_reader
from octavo_lab.ladder.workload import Workload

FORMAT: Final = 1
_REPORT_S: Final = 15.0
"""Kept for the report."""
_SEARCH_SHARE: Final = 0.25
"""Share of the budget that tuning and search take, about; for the time left until they are done."""


class Show(Protocol):
    """Tells how far an experiment is."""

    def __call__(self, what: str, fraction: float, left_s: float | None) -> None:
        """`what` begins; so much is done, and it will take so long until all is."""


@dataclass(frozen=True, slots=True)
class Measured:
    """All that an experiment has measured, whole or in part."""

    config: LadderConfig
    environments: list[dict[str, Any]]
    """One for each time that it was begun or gone on with."""
    started_at: str
    found: Found | None
    loads: Loads | None
    plan: CellPlan | None
    results: list[CellResult]
    dataset: dict[str, Any]
    failures: tuple[str, ...] = ()
    """Attempts at cells that came to nothing, in words."""

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
        folder.mkdir(parents=True, exist_ok=True)
        self._store = CellStore(folder / "cells")
        self._driver = Driver(config, workload, gpu_reader())
        self._found: Found | None = None
        self._plan: CellPlan | None = None
        self._loads: Loads | None = None
        self._head = self._begin()

    def run(self) -> None:
        """Measure everything that has not been measured yet.

        Raises:
            BenchError: a stack does not start or the search fails.
            KeyboardInterrupt: what was measured until then is in the folder.
        """
        began = time.monotonic()
        self._head["environments"].append(environment())
        self._write_head()
        with (
            closing(self._driver),
            ArmStacks(
                self.config, self.folder / "logs", lambda event: self._show(event, 0.0, None)
            ) as stacks,
        ):
            self._prepare(stacks)
            found = self._found or self._search(stacks)
            plan = self._plan or self._make_plan(found, began)
            self._cells(stacks, found, plan)

    def measured(self) -> Measured:
        """Return what there is."""
        results = (
            []
            if self._plan is None
            else [self._store.get(cell) for cell in self._plan.cells if self._store.has(cell)]
        )
        return Measured(
            config=self.config,
            environments=self._head["environments"],
            started_at=self._head["started_at"],
            found=self._found,
            loads=self._loads,
            plan=self._plan,
            results=results,
            dataset=self._head.get("dataset", {}),
            failures=tuple(self._head.get("failures", ())),
        )

    # -- parts

    def _begin(self) -> dict[str, Any]:
        """Write down what is going to be done, or read what was begun."""
        path = self.folder / "config.json"
        if path.exists():
            head: dict[str, Any] = read_json(path)
            self._workload.recall(head.get("dataset", {}))
            self._read_on()
        else:
            head = {
                "format": FORMAT,
                "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
                "config": self.config.to_json(),
                "environments": [],
            }
        return head

    def _prepare(self, stacks: ArmStacks) -> None:
        self._show("starting", 0.0, self.config.budget_s)
        first = ARMS[self.config.arms[0]]
        static = self._found.static if self._found is not None else {}
        stack = stacks.use(first, static.get(first.name, StaticSettings()))
        self._driver.prepare(stack)
        self._head["dataset"] = self._workload.to_json()
        self._head["environments"][-1]["served"] = served(stack.endpoint)
        self._write_head()

    def _write_head(self) -> None:
        write_whole(self.folder / "config.json", json.dumps(self._head, indent=1))

    def _read_on(self) -> None:
        if (self.folder / "search.json").exists():
            self._found = found_from_json(read_json(self.folder / "search.json"))
            self._loads = self._loads_of(self._found)
        if (self.folder / "plan.json").exists():
            self._plan = plan_from_json(read_json(self.folder / "plan.json"))

    def _search(self, stacks: ArmStacks) -> Found:
        budget_s, began, steps = self.config.budget_s, time.monotonic(), 0

        def on_step(what: str) -> None:
            nonlocal steps
            elapsed = time.monotonic() - began
            self._show(what, _SEARCH_SHARE * min(1.0, steps / search.num_steps), budget_s - elapsed)
            steps += 1

        search = Search(self.config, stacks, self._driver, on_step)
        self._found = search.run()
        write_whole(self.folder / "search.json", json.dumps(found_to_json(self._found), indent=1))
        self._loads = self._loads_of(self._found)
        return self._found

    def _loads_of(self, found: Found) -> Loads:
        static = [name for name in self.config.arms if ARMS[name].static]
        return loads_of(self.config, found.capacities, static, CONTROL, found.longest_batch_s)

    def _make_plan(self, found: Found, began: float) -> CellPlan:
        loads = self._loads or self._loads_of(found)
        available = self.config.budget_s - (time.monotonic() - began) - _REPORT_S
        self._plan = plan_cells(self.config, loads, available)
        write_whole(self.folder / "plan.json", json.dumps(plan_to_json(self._plan), indent=1))
        return self._plan

    def _cells(self, stacks: ArmStacks, found: Found, plan: CellPlan) -> None:
        left = [cell for cell in plan.cells if not self._store.has(cell)]
        done_s = 0.0
        total_s = sum(cell.window_s + cell.warm_up_s + DRAIN_S for cell in left)
        began = time.monotonic()
        for number, cell in enumerate(left):
            # What the cells have taken so far, against what was expected of them, tells what is to come.
            pace = (time.monotonic() - began) / done_s if done_s else 1.0
            what = f"{cell.rung}, {cell.rate_per_s:.2f}/s, repeat {cell.repeat + 1}: {ARMS[cell.arm].title}"
            done = _SEARCH_SHARE + (1 - _SEARCH_SHARE) * (len(plan.cells) - len(left) + number) / len(
                plan.cells
            )
            self._show(what, done, pace * (total_s - done_s) + _REPORT_S)
            result = self._run_cell(stacks, found, cell)
            if result is not None:
                self._store.put(result)
            done_s += cell.window_s + cell.warm_up_s + DRAIN_S

    def _run_cell(self, stacks: ArmStacks, found: Found, cell: Cell) -> CellResult | None:
        """Run a cell, a second time if it comes to nothing; None when it does so again."""
        arm = ARMS[cell.arm]
        for _ in range(2):
            try:
                stack = stacks.use(arm, found.static.get(arm.name, StaticSettings()))
                result = self._driver.cell(cell, stack)
            except (OctavoError, BenchError) as error:
                # The stack cannot be reached: what the requests themselves run into is part of a result.
                self._head.setdefault("failures", []).append(f"{cell.name}: {error}")
                self._write_head()
                stacks.drop(arm)
                continue
            if not all(child.alive for child in stack.children):
                # It is part of the result: the requests have failed. The next cell gets a new stack.
                stacks.drop(arm)
            return result
        return None


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file.

    Raises:
        BenchError: there is none.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BenchError(f"{path}: {error}") from error
    if not isinstance(record, dict):
        raise BenchError(f"{path}: not an object")
    return record


def config_of(folder: Path) -> LadderConfig:
    """Return the settings of an experiment that was begun in a folder.

    Raises:
        BenchError: there is none, or it is of another version.
    """
    head = read_json(folder / "config.json")
    try:
        if head["format"] != FORMAT:
            raise BenchError(f"{folder}: an experiment of format {head['format']}, this version has {FORMAT}")
        return LadderConfig.from_json(head["config"])
    except (KeyError, TypeError) as error:
        raise BenchError(f"{folder}: not an experiment of this version ({error})") from error
