"""Runs cells, and keeps what came of them."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from octavo.stack import Stack

from octavo_lab.ladder.config import LadderConfig
from octavo_lab.ladder.plan import Cell
from octavo_lab.ladder.watch import Sample, Watch, series_from_json, series_to_json, settled
from octavo_lab.ladder.workload import Workload
from octavo_lab.load.arrivals import Closed, Process
from octavo_lab.load.generator import RunLimits, Traffic, generate, requests_needed
from octavo_lab.load.records import RunRecord, from_json, to_json
from octavo_lab.load.target import PlannedRequest
from octavo_lab.load.targets.octavo import OctavoTarget

_PATIENCE_S: Final = 900.0
Gpu = Callable[[Sequence[int]], int | None]


@dataclass(frozen=True, slots=True)
class CellResult:
    """A cell that has been run."""

    cell: Cell
    run: RunRecord
    samples: tuple[Sample, ...]

    def within_window(self) -> list[Sample]:
        """Return the samples of the window that counts."""
        return [one for one in self.samples if self.run.warm_up_s <= one.at_s <= self.run.until_s]


class Driver:
    """Puts load on a stack."""

    def __init__(self, config: LadderConfig, workload: Workload, gpu: Gpu) -> None:
        self._config = config
        self._workload = workload
        self._gpu = gpu
        # One loop for all runs: gRPC hands late events to the loop of a call, which must not be closed then.
        self._runner = asyncio.Runner()
        self._runs = 0

    def close(self) -> None:
        """Close the loop that runs are driven from."""
        self._runner.close()

    def prepare(self, stack: Stack) -> None:
        """Let the workload be made for what a stack serves.

        Raises:
            BenchError: there is no such dataset, or it does not fit.
        """
        self._runner.run(self._workload.prepare(stack.endpoint))

    def cell(self, cell: Cell, stack: Stack) -> CellResult:
        """Run a cell to its end."""
        config = self._config
        process = config.process(cell.rate_per_s, config.backlog_of(cell.rung))
        end_s = cell.warm_up_s + cell.window_s
        count = max(1, requests_needed(process, cell.seed, end_s))
        traffic = Traffic(
            requests=self._workload.requests(cell.seed, count),
            arrivals=process,
            seed=cell.seed,
            dataset=self._workload.description,
            warm_up_s=cell.warm_up_s,
            duration_s=cell.window_s,
        )
        run, samples = self._drive(stack, traffic, RunLimits(drain_s=cell.drain_s))
        return CellResult(cell, replace(run, name=cell.arm), tuple(samples))

    def saturate(self, stack: Stack, count: int, concurrency: int, seed: int) -> RunRecord:
        """Serve `count` requests, so many of them under way at any time."""
        traffic = Traffic(
            requests=self._patient(seed, count),
            arrivals=Closed(concurrency),
            seed=seed,
            dataset=self._workload.description,
        )
        return self._drive(stack, traffic, RunLimits(drain_s=_PATIENCE_S))[0]

    def offer(self, stack: Stack, process: Process, count: int, seed: int) -> RunRecord:
        """Send `count` requests in an open loop, and wait for their answers."""
        traffic = Traffic(
            requests=self._patient(seed, count),
            arrivals=process,
            seed=seed,
            dataset=self._workload.description,
        )
        return self._drive(stack, traffic, RunLimits(drain_s=_PATIENCE_S))[0]

    def _patient(self, seed: int, count: int) -> list[PlannedRequest]:
        """Return requests that wait for as long as it takes: a search wants to know who is how fast."""
        return [
            replace(one, options={**one.options, "queue_timeout": _PATIENCE_S})
            for one in self._workload.requests(seed, count)
        ]

    def warm(self, stack: Stack) -> None:
        """Have a stack do everything once, so that nothing is done for the first time in a measurement."""
        self.saturate(stack, 8, 8, seed=self._config.seed)

    def _drive(self, stack: Stack, traffic: Traffic, limits: RunLimits) -> tuple[RunRecord, list[Sample]]:
        # What an earlier run has left in a cache is of no use to this one: each cell begins cold.
        self._runs += 1
        salt = f"ladder-{os.getpid()}-{self._runs}"
        salted = replace(traffic, requests=[_with_salt(one, salt) for one in traffic.requests])
        return self._runner.run(self._go(stack, salted, limits))

    async def _go(self, stack: Stack, traffic: Traffic, limits: RunLimits) -> tuple[RunRecord, list[Sample]]:
        async with OctavoTarget(stack.endpoint) as target, Watch(stack, self._gpu) as watch:
            run = await generate(target, traffic, limits)
        return run, settled(watch.samples)


def _with_salt(request: PlannedRequest, salt: str) -> PlannedRequest:
    return replace(request, options={**request.options, "cache_salt": salt})


class CellStore:
    """Results in a folder, one file each, so that an experiment can be gone on with."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def has(self, cell: Cell) -> bool:
        """Return whether a cell has been run."""
        return self._path(cell).exists()

    def put(self, result: CellResult) -> None:
        """Keep a result: whole or not at all, even if the machine stops now."""
        record: dict[str, Any] = {
            "cell": asdict(result.cell),
            "run": to_json(result.run),
            "samples": series_to_json(result.samples),
        }
        write_whole(self._path(result.cell), json.dumps(record, separators=(",", ":")))

    def get(self, cell: Cell) -> CellResult:
        """Return the result of a cell.

        Raises:
            ValueError: the file holds none.
        """
        record = json.loads(self._path(cell).read_text(encoding="utf-8"))
        return CellResult(
            Cell(**record["cell"]), from_json(record["run"]), tuple(series_from_json(record["samples"]))
        )

    def _path(self, cell: Cell) -> Path:
        return self._folder / f"{cell.name}.json"


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there as a whole or as it was."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
