"""What a stack looks like while it is under load: its status and its memory, several times a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Self

from octavo.aio import AsyncClient
from octavo.errors import OctavoError
from octavo.stack import Stack
from octavo.status import Status

from octavo_lab.ladder.stacks import tree_bytes, worker_pids

INTERVAL_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment. Slots are places for the keys and values of one token."""

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


def sample_of(status: Status, at_s: float, memory: tuple[int, int | None]) -> Sample | None:
    """Return a status as a sample; None when no worker is there."""
    workers = [worker for worker in status.workers if worker.pool.total]
    if not workers:
        return None
    blocks = sum(worker.pool.total for worker in workers)
    active = sum(worker.pool.active for worker in workers)
    written = sum(worker.pool.active * (1 - worker.pool.internal_fragmentation) for worker in workers)
    step_active = sum(worker.pool.step_active for worker in workers)
    step_written = sum(
        worker.pool.step_active * (1 - worker.pool.step_internal_fragmentation) for worker in workers
    )
    free = sum(worker.pool.free for worker in workers)
    runs = sum(worker.pool.free * (1 - worker.pool.external_fragmentation) for worker in workers)
    return Sample(
        at_s=at_s,
        steps=sum(worker.steps for worker in workers),
        running=sum(worker.running for worker in workers),
        waiting=sum(queue.waiting for queue in status.queues),
        written=written / blocks,
        active=active / blocks,
        cached=sum(worker.pool.evictable for worker in workers) / blocks,
        internal=1 - written / active if active else 0.0,
        external=1 - runs / free if free else 0.0,
        host_bytes=memory[0],
        device_bytes=memory[1],
        step_written=step_written / blocks,
        step_active=step_active / blocks,
    )


def settled(samples: Sequence[Sample]) -> list[Sample]:
    """Return samples in which what a step takes and writes counts for as long as the step runs.

    A status tells the books after the last step, which is no news while a long one runs: a batch whose
    prompts are being computed would seem to hold nothing, and what a step finishes, of which there is
    much when answers are short, would seem to be free while it is still being computed.
    """
    made: list[Sample] = []
    later: Sample | None = None
    """The first of the samples after this one that tells of more steps."""
    following: Sample | None = None
    for one in reversed(samples):
        if following is not None and following.steps > one.steps:
            later = following
        if one.running and later is not None:
            made.append(
                replace(
                    one,
                    written=later.step_written,
                    active=later.step_active,
                    internal=1 - later.step_written / later.step_active if later.step_active else 0.0,
                    external=later.external,
                )
            )
        else:
            made.append(one)
        following = one
    return made[::-1]


class Watch:
    """Samples a stack for as long as an `async with` lasts."""

    def __init__(self, stack: Stack, gpu: Callable[[Sequence[int]], int | None]) -> None:
        self.samples: list[Sample] = []
        self._stack = stack
        self._gpu = gpu
        self._task: asyncio.Task[None] | None = None
        self._began = 0.0

    async def __aenter__(self) -> Self:
        self._began = time.monotonic()
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        pids = list(worker_pids(self._stack))
        async with AsyncClient(self._stack.endpoint) as client:
            try:
                async for status in client.watch_status(INTERVAL_S):
                    memory = (sum(map(tree_bytes, pids)), self._gpu(pids))
                    sample = sample_of(status, time.monotonic() - self._began, memory)
                    if sample is not None:
                        self.samples.append(sample)
            except OctavoError:
                return  # The scheduler is gone: the requests tell.


def gpu_reader() -> Callable[[Sequence[int]], int | None]:
    """Return what reads the GPU memory of processes through NVML; it returns None where there is none."""
    try:
        import pynvml  # noqa: PLC0415 # only where there is a GPU

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except Exception:  # noqa: BLE001 # the library, its driver or the device may be missing, each in its own way
        return lambda pids: None

    def read(pids: Sequence[int]) -> int | None:
        found = [
            process for handle in handles for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        ]
        return sum(process.usedGpuMemory or 0 for process in found if process.pid in pids)

    return read


_DIGITS: Final = 4


def series_to_json(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Return samples by column."""
    return {
        item.name: [
            round(value, _DIGITS) if isinstance(value := getattr(one, item.name), float) else value
            for one in samples
        ]
        for item in fields(Sample)
    }


def series_from_json(columns: Mapping[str, Sequence[Any]]) -> list[Sample]:
    """Return the samples of their columns."""
    names = [item.name for item in fields(Sample)]
    return [Sample(*row) for row in zip(*(columns[name] for name in names), strict=True)]
