"""Runs cells, and keeps what came of them."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from octavo.stack import Stack

from octavo_lab.ladder.config import LadderConfig
from octavo_lab.ladder.plan import LadderCell
from octavo_lab.ladder.watch import GpuReader, Sample, series_from_json, series_to_json, settled, watching
from octavo_lab.ladder.workload import Workload
from octavo_lab.load.arrivals import Closed, Process
from octavo_lab.load.generator import RunLimits, Traffic, generate, requests_needed
from octavo_lab.load.records import RunRecord, from_json, to_json
from octavo_lab.load.targets.octavo import OctavoTarget
from octavo_lab.stored import write_whole

_PATIENCE_S: Final = 900.0
"""How long requests of the search wait, and are waited for: it wants to know who is how fast."""


@dataclass(frozen=True, slots=True)
class CellResult:
    """A cell that has been run."""

    cell: LadderCell
    run: RunRecord
    samples: tuple[Sample, ...]

    def within_window(self) -> list[Sample]:
        """Return the samples of the window that counts."""
        return [one for one in self.samples if self.run.in_window(one.at_s)]


class LoadDriver:
    """Puts load on a stack."""

    def __init__(self, config: LadderConfig, workload: Workload, gpu: GpuReader) -> None:
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

    def cell(self, cell: LadderCell, stack: Stack) -> CellResult:
        """Run a cell to its end."""
        process = self._config.process(cell.rate_per_s, self._config.backlog_of(cell.rung))
        count = max(1, requests_needed(process, cell.seed, cell.warm_up_s + cell.window_s))
        traffic = replace(
            self._traffic(process, count, cell.seed), warm_up_s=cell.warm_up_s, duration_s=cell.window_s
        )
        run, samples = self._drive(stack, traffic, {}, cell.drain_s)
        return CellResult(cell, replace(run, name=cell.arm), tuple(samples))

    def saturate(self, stack: Stack, count: int, concurrency: int, seed: int) -> RunRecord:
        """Keep `concurrency` requests under way until `count` are answered."""
        return self.offer(stack, Closed(concurrency), count, seed)

    def offer(self, stack: Stack, process: Process, count: int, seed: int) -> RunRecord:
        """Send `count` patient requests, and wait for their answers."""
        options = {"queue_timeout": _PATIENCE_S}
        return self._drive(stack, self._traffic(process, count, seed), options, _PATIENCE_S)[0]

    def warm(self, stack: Stack) -> None:
        """Have a stack do everything once, so that nothing is done for the first time in a measurement."""
        self.saturate(stack, 8, 8, seed=self._config.seed)

    def _traffic(self, arrivals: Process, count: int, seed: int) -> Traffic:
        requests = self._workload.requests(seed, count)
        return Traffic(requests=requests, arrivals=arrivals, seed=seed, dataset=self._workload.description)

    def _drive(
        self, stack: Stack, traffic: Traffic, options: Mapping[str, Any], drain_s: float
    ) -> tuple[RunRecord, list[Sample]]:
        # What an earlier run has left in a cache is of no use to this one: each cell begins cold.
        self._runs += 1
        options = {**options, "cache_salt": f"ladder-{os.getpid()}-{self._runs}"}
        asked = [replace(one, options={**one.options, **options}) for one in traffic.requests]

        async def go() -> tuple[RunRecord, list[Sample]]:
            async with OctavoTarget(stack.endpoint) as target, watching(stack, self._gpu) as samples:
                run = await generate(target, replace(traffic, requests=asked), RunLimits(drain_s=drain_s))
            return run, settled(samples)

        return self._runner.run(go())


class CellStore:
    """Results in a folder, one file each, so that an experiment can be gone on with."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def has(self, cell: LadderCell) -> bool:
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

    def get(self, cell: LadderCell) -> CellResult:
        """Return the result of a cell.

        Raises:
            ValueError: the file holds none.
        """
        record = json.loads(self._path(cell).read_text(encoding="utf-8"))
        samples = tuple(series_from_json(record["samples"]))
        return CellResult(LadderCell(**record["cell"]), from_json(record["run"]), samples)

    def _path(self, cell: LadderCell) -> Path:
        return self._folder / f"{cell.name}.json"
