"""Runs cells while it looks at their stack several times a second, and keeps what came of them.

The stacks, one per arm, are kept up while others are measured, as many as memory allows. A stack that has
nothing to do costs memory and no time, so that arms can take turns every few seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import psutil
from octavo.aio import AsyncClient
from octavo.stack import Stack, StackConfig, StackError
from octavo.status import Status

from octavo_lab.command import BenchError
from octavo_lab.ladder.config import Arm, LadderConfig, StaticSettings
from octavo_lab.ladder.plan import LadderCell
from octavo_lab.ladder.workload import Workload
from octavo_lab.load.arrivals import Closed, Process
from octavo_lab.load.generator import RunLimits, Traffic, generate, requests_needed
from octavo_lab.load.records import RunRecord, from_json, to_json
from octavo_lab.load.targets.octavo import OctavoTarget
from octavo_lab.load.watch import status_told
from octavo_lab.machine import tree_bytes
from octavo_lab.stored import write_whole

_SPARE_BYTES: Final = 1 << 30
"""Memory that is left to the rest of the machine."""
_GROWTH: Final = 1.3
"""What a stack may take under load, as a multiple of what it takes when it is ready."""
_INTERVAL_S: Final = 0.25
_DIGITS: Final = 4
_PATIENCE_S: Final = 900.0
"""How long requests of the search wait, and are waited for: it wants to know who is how fast."""
GpuReader = Callable[[Sequence[int]], int | None]
"""Returns the GPU memory of processes in bytes; None where there is no GPU."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment of a stack under load. Slots are places for the keys and values of one token."""

    at_s: float
    """Since the load began."""
    steps: int
    """Steps of the workers until now."""
    running: int
    waiting: int
    written: float
    """Slots that hold keys and values of a sequence that lives, over all slots."""
    active: float
    """Slots of blocks that sequences have taken, over all."""
    cached: float
    """Slots of blocks that nobody has and whose contents may be used again, over all."""
    internal: float
    """Internal fragmentation: slots taken and not written, over those taken."""
    external: float
    """External fragmentation: 1 - longest run of free blocks / free blocks."""
    host_bytes: int
    """Resident memory of the worker."""
    device_bytes: int | None
    """Memory of the GPU that the worker's processes have; None where there is no GPU."""
    step_written: float
    """As `written`, while the last step ran: with what it finished, which is free since."""
    step_active: float


@dataclass(frozen=True, slots=True)
class CellResult:
    """A cell that has been run."""

    cell: LadderCell
    run: RunRecord
    samples: tuple[Sample, ...]

    def within_window(self) -> list[Sample]:
        """Return the samples of the window that counts."""
        return [one for one in self.samples if self.run.in_window(one.at_s)]


@asynccontextmanager
async def _watching(stack: Stack, gpu: GpuReader) -> AsyncIterator[list[Sample]]:
    """Sample a stack for as long as the block lasts."""
    # They own the model and the KV memory.
    pids = [child.process.pid for child in stack.workers]
    samples: list[Sample] = []

    def note(status: Status, at_s: float) -> None:
        workers = [worker for worker in status.workers if worker.pool.total]
        if not workers:
            return
        pools = [worker.pool for worker in workers]
        blocks, active = sum(pool.total for pool in pools), sum(pool.active for pool in pools)
        written = sum(pool.active * (1 - pool.internal_fragmentation) for pool in pools)
        step_written = sum(pool.step_active * (1 - pool.step_internal_fragmentation) for pool in pools)
        free = sum(pool.free for pool in pools)
        runs = sum(pool.free * (1 - pool.external_fragmentation) for pool in pools)
        samples.append(
            Sample(
                at_s=at_s,
                steps=sum(worker.steps for worker in workers),
                running=sum(worker.running for worker in workers),
                waiting=sum(queue.waiting for queue in status.queues),
                written=written / blocks,
                active=active / blocks,
                cached=sum(pool.evictable for pool in pools) / blocks,
                internal=1 - written / active if active else 0.0,
                external=1 - runs / free if free else 0.0,
                host_bytes=sum(map(tree_bytes, pids)),
                device_bytes=gpu(pids),
                step_written=step_written / blocks,
                step_active=sum(pool.step_active for pool in pools) / blocks,
            )
        )

    async with AsyncClient(stack.endpoint) as client, status_told(client, _INTERVAL_S, note):
        yield samples


def settled(samples: Sequence[Sample]) -> list[Sample]:
    """Return samples in which what a step takes and writes counts for as long as the step runs.

    A status tells the books after the last step, which is no news while a long one runs: a batch whose
    prompts are being computed would seem to hold nothing, and what a step finishes, of which there is
    much when answers are short, would seem to be free while it is still being computed.
    """
    made: list[Sample] = []
    later: Sample | None = None
    """The first of the samples after this one that tells of more steps."""
    for one, following in zip(reversed(samples), [None, *reversed(samples)], strict=False):
        if following is not None and following.steps > one.steps:
            later = following
        now = one
        if later is not None and one.running:
            written, active = later.step_written, later.step_active
            internal = 1 - written / active if active else 0.0
            now = replace(one, written=written, active=active, internal=internal, external=later.external)
        made.append(now)
    return made[::-1]


def series_to_json(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Return samples by column."""
    columns = {item.name: [getattr(one, item.name) for one in samples] for item in fields(Sample)}
    return {
        name: [round(value, _DIGITS) if isinstance(value, float) else value for value in column]
        for name, column in columns.items()
    }


class ArmStacks:
    """Starts stacks when they are first asked for, and ends the least recently used when memory is short."""

    def __init__(self, config: LadderConfig, logs: Path, on_event: Callable[[str], None]) -> None:
        self._config = config
        self._logs = logs
        self._on_event = on_event
        self._stacks: dict[str, tuple[Stack, tuple[str, ...]]] = {}
        self._stack_bytes = 0

    def use(self, arm: Arm, static: StaticSettings) -> Stack:
        """Return the stack of an arm, ready; BenchError: it does not start, for the reason that it gives."""
        wanted = self._config.scheduler_args(arm, static)
        stack, current = self._stacks.get(arm.name, (None, ()))
        if stack is not None and not all(child.alive for child in stack.children):
            self._on_event(f"{arm.name}: a process had ended and is started again")
            self.drop(arm.name)
            stack = None
        try:
            if stack is None:
                stack = self._start(arm, wanted)
            elif current != wanted:
                stack.restart_scheduler(wanted)
                stack.wait_ready(self._config.ready_timeout_s)
        except StackError as error:
            self.drop(arm.name)
            raise BenchError(f"{arm.title}: {error} (logs are in {self._logs})") from None
        self._stacks.pop(arm.name, None)
        self._stacks[arm.name] = (stack, wanted)
        return stack

    def drop(self, name: str) -> None:
        """End the stack of an arm, if there is one: what it is asked next begins with a new one."""
        if name in self._stacks:
            self._stacks.pop(name)[0].stop()

    def close(self) -> None:
        """End all."""
        for name in list(self._stacks):
            self.drop(name)

    def _start(self, arm: Arm, scheduler_args: tuple[str, ...]) -> Stack:
        """Start a stack; the least recently used are ended first until another one fits into memory."""
        wanted = _GROWTH * self._stack_bytes + _SPARE_BYTES
        while self._stacks and psutil.virtual_memory().available < wanted:
            name = next(iter(self._stacks))
            self.drop(name)
            self._on_event(f"{name}: ended to make room in memory; it is started again when its turn comes")
        config = self._config
        stack = Stack(
            StackConfig(
                model=config.model,
                scheduler_args=scheduler_args,
                worker_args=config.worker_args(arm),
                folder=self._logs / arm.name,
            )
        )
        try:
            stack.start()
            stack.wait_ready(config.ready_timeout_s)
        except BaseException:
            stack.stop()
            raise
        resident_bytes = sum(tree_bytes(child.process.pid) for child in stack.children)
        self._stack_bytes = max(self._stack_bytes, resident_bytes)
        return stack


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
        """Let the workload be made for what a stack serves; see `Workload.prepare`."""
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
            async with OctavoTarget(stack.endpoint) as target, _watching(stack, self._gpu) as samples:
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
        record = {
            "cell": asdict(result.cell),
            "run": to_json(result.run),
            "samples": series_to_json(result.samples),
        }
        write_whole(self._path(result.cell), json.dumps(record, separators=(",", ":")))

    def get(self, cell: LadderCell) -> CellResult:
        """Return the result of a cell; a ValueError tells that its file holds none."""
        record = json.loads(self._path(cell).read_text(encoding="utf-8"))
        rows = zip(*(record["samples"][item.name] for item in fields(Sample)), strict=True)
        samples = tuple(Sample(*row) for row in rows)
        return CellResult(LadderCell(**record["cell"]), from_json(record["run"]), samples)

    def _path(self, cell: LadderCell) -> Path:
        return self._folder / f"{cell.name}.json"
