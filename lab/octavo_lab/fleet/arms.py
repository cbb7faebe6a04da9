"""Ways to run a fleet: one queue that binds late, or a router in front of engines that bind early.

The same scheduler core is behind all of them. In the early arms each worker has a core of its own, so
all that differs is when, and by whom, a request is bound to a worker.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from octavo_lab.fleet.workload import FleetConfig, Job
from octavo_lab.sim import EventLoop, FaultInjector, FaultRates, Recorder, SimCell, SimResult
from octavo_lab.sim.host import WorkerHost
from scheduler_svc.core import CoreConfig, Effect, FinishChoice, NewRequest, Reject, SchedulerCore
from scheduler_svc.core.request import SequenceStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """What goes wrong with the fleet, and when (virtual seconds)."""

    slow_workers: tuple[int, ...] = ()
    slow_factor: float = 3.0
    draining_worker: int | None = None
    drains_at_s: float = 0.0


NO_TROUBLE: Final = Trouble()


class _Requests:
    """Watches the requests of one core, or of several: which have not ended, and how many have."""

    def __init__(self) -> None:
        self.outstanding: dict[str, None] = {}
        self.ended = 0

    def submitted(self, spec: NewRequest, now: float) -> None:
        """A request has been sent."""
        self.outstanding[spec.request_id] = None

    def effects(self, effects: list[Effect], now: float) -> None:
        """Forget what has ended, and count it."""
        for effect in effects:
            if isinstance(effect, Reject) or (isinstance(effect, FinishChoice) and effect.last):
                self.outstanding.pop(effect.request_id, None)
                self.ended += 1


class RoutedEngine:
    """One worker with a core of its own, as a router sees it."""

    def __init__(self, cell: SimCell) -> None:
        self.cell = cell
        self._requests = _Requests()
        cell.observers.append(self._requests)

    @property
    def num_requests(self) -> int:
        """Requests that it has taken and not ended."""
        return len(self._requests.outstanding)

    @property
    def num_tokens(self) -> int:
        """Tokens that it still has to compute, exactly: the rest of each prompt, and of each answer."""
        total = 0
        for request_id in self._requests.outstanding:
            request = self.cell.core.find(request_id)
            for sequence in request.sequences if request is not None else ():
                if sequence.status is SequenceStatus.RUNNING:
                    total += sequence.binding.num_admitted_tokens - sequence.binding.num_computed_tokens
                else:
                    total += sequence.num_tokens
                total += sequence.request.max_total_tokens - sequence.num_tokens
        return total


Router = Callable[[Sequence[RoutedEngine]], RoutedEngine]
"""Chooses among the engines that take requests."""


def _round_robin(rng: random.Random) -> Router:
    turns = itertools.count(1)
    return lambda engines: engines[next(turns) % len(engines)]


ROUTERS: Final[dict[str, Callable[[random.Random], Router]]] = {
    "round robin": _round_robin,
    "random": lambda rng: rng.choice,
    # Among equals, any.
    "least requests": lambda rng: (
        lambda engines: min(engines, key=lambda one: (one.num_requests, rng.random()))
    ),
    # It sees every engine at every moment, and knows how long each answer will become.
    "least tokens": lambda rng: lambda engines: min(engines, key=lambda one: (one.num_tokens, rng.random())),
}
LATE: Final = "one queue"
"""The name of the arm that binds late."""
ARMS: Final = (LATE, *ROUTERS)


class SimulatedFleet:
    """Workers behind one core, which binds late, or behind a router and a core for each, which bind early."""

    def __init__(self, cells: Sequence[SimCell], router: Router | None) -> None:
        self.hosts: list[WorkerHost] = [host for cell in cells for host in cell.hosts.values()]
        self._engines = [RoutedEngine(cell) for cell in cells]
        self._open = list(self._engines)
        self._router = router

    def submit(self, spec: NewRequest) -> None:
        """Put it into the queue, or bind it to an engine, for good."""
        engine = self._open[0] if self._router is None else self._router(self._open)
        engine.cell.submit(spec)

    def drain(self, index: int) -> None:
        """Let a worker take nothing new; what it has accepted it finishes.

        The core is told, as by a worker that drains; a router just offers it nothing any more.
        """
        if self._router is None:
            cell = self._engines[0].cell
            cell.perform(cell.core.worker_draining(self.hosts[index].worker_id, cell.loop.now))
        else:
            self._open.remove(self._engines[index])


def simulate(
    arm: str,
    jobs: Sequence[Job],
    fleet: FleetConfig,
    config: CoreConfig,
    *,
    seed: int = 0,
    trouble: Trouble = NO_TROUBLE,
) -> list[SimResult]:
    """Run jobs on a fleet until all have ended; return what their clients saw."""
    loop, recorder, requests = EventLoop(), Recorder(), _Requests()
    router = None if arm == LATE else ROUTERS[arm](random.Random(seed))
    workers = [fleet.worker(index) for index in range(fleet.num_workers)]
    parts = [workers] if router is None else [[worker] for worker in workers]
    cells = [SimCell(SchedulerCore(config), part, loop, [recorder, requests]) for part in parts]
    running = SimulatedFleet(cells, router)
    if fleet.faults != FaultRates():
        for index, host in enumerate(running.hosts):
            # One each: what goes wrong in a worker's n-th step does not depend on the others, nor on the arm.
            FaultInjector(fleet.faults, random.Random(f"{seed} {index}")).install(host)
    for at, spec in jobs:
        loop.at(at, partial(running.submit, spec))
    for index in trouble.slow_workers:
        running.hosts[index].slow_factor = trouble.slow_factor
    if trouble.draining_worker is not None:
        loop.at(trouble.drains_at_s, partial(running.drain, trouble.draining_worker))
    loop.run(stop=lambda: requests.ended == len(jobs))
    return list(recorder.results.values())
