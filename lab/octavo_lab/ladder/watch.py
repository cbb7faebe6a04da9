"""What a stack looks like while it is under load: its status and its memory, several times a second."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from octavo.aio import AsyncClient
from octavo.stack import Stack
from octavo.status import Status

from octavo_lab.load.watch import status_told
from octavo_lab.machine import tree_bytes

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
    pools = [worker.pool for worker in workers]
    blocks = sum(pool.total for pool in pools)
    active = sum(pool.active for pool in pools)
    written = sum(pool.active * (1 - pool.internal_fragmentation) for pool in pools)
    step_written = sum(pool.step_active * (1 - pool.step_internal_fragmentation) for pool in pools)
    free = sum(pool.free for pool in pools)
    runs = sum(pool.free * (1 - pool.external_fragmentation) for pool in pools)
    return Sample(
        at_s=at_s,
        steps=sum(worker.steps for worker in workers),
        running=sum(worker.running for worker in workers),
        waiting=sum(queue.waiting for queue in status.queues),
        written=written / blocks,
        active=active / blocks,
        cached=sum(pool.evictable for pool in pools) / blocks,
        internal=1 - written / active if active else 0.0,
        external=1 - runs / free if free else 0.0,
        host_bytes=memory[0],
        device_bytes=memory[1],
        step_written=step_written / blocks,
        step_active=sum(pool.step_active for pool in pools) / blocks,
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
        following = one
        made.append(one if later is None or not one.running else _while_it_runs(one, later))
    return made[::-1]


def _while_it_runs(one: Sample, later: Sample) -> Sample:
    written, active = later.step_written, later.step_active
    internal = 1 - written / active if active else 0.0
    return replace(one, written=written, active=active, internal=internal, external=later.external)


GpuReader = Callable[[Sequence[int]], int | None]
"""Returns the GPU memory of processes in bytes; None where there is no GPU."""


@asynccontextmanager
async def watching(stack: Stack, gpu: GpuReader) -> AsyncIterator[list[Sample]]:
    """Sample a stack for as long as the block lasts."""
    # They own the model and the KV memory.
    pids = [child.process.pid for child in stack.workers]
    samples: list[Sample] = []

    def note(status: Status, at_s: float) -> None:
        sample = sample_of(status, at_s, (sum(map(tree_bytes, pids)), gpu(pids)))
        if sample is not None:
            samples.append(sample)

    async with AsyncClient(stack.endpoint) as client, status_told(client, INTERVAL_S, note):
        yield samples


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
