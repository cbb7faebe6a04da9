"""Ways to run a fleet: one queue that binds late, or a router in front of engines that bind early.

The same scheduler core is behind all of them. In the early arms each worker has a core of its own, so
all that differs is when, and by whom, a request is bound to a worker.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from octavo_lab.fleet.workload import FleetConfig, Job
from octavo_lab.sim import (
    Cell,
    EventLoop,
    FaultInjector,
    FaultRates,
    Observer,
    Recorder,
    Result,
    WorkerHost,
)
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


class Binding(Protocol):
    """A way to run a fleet."""

    hosts: Sequence[WorkerHost]

    def submit(self, spec: NewRequest) -> None:
        """A request has come."""

    def drain(self, index: int) -> None:
        """A worker is to take nothing new; what it has accepted it finishes."""


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

    def __init__(self, cell: Cell) -> None:
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


def round_robin(rng: random.Random) -> Router:
    """Each in its turn."""
    count = 0

    def choose(engines: Sequence[RoutedEngine]) -> RoutedEngine:
        nonlocal count
        count += 1
        return engines[count % len(engines)]

    return choose


def at_random(rng: random.Random) -> Router:
    """Any."""
    return rng.choice


def least_requests(rng: random.Random) -> Router:
    """The one with the fewest requests; among equals, any."""
    return lambda engines: min(engines, key=lambda engine: (engine.num_requests, rng.random()))


def least_tokens(rng: random.Random) -> Router:
    """The one with the fewest tokens to compute.

    It sees every engine at every moment, and knows how long each answer will become.
    """
    return lambda engines: min(engines, key=lambda engine: (engine.num_tokens, rng.random()))


ROUTERS: Final[dict[str, Callable[[random.Random], Router]]] = {
    "round robin": round_robin,
    "random": at_random,
    "least requests": least_requests,
    "least tokens": least_tokens,
}
LATE: Final = "one queue"
"""The name of the arm that binds late."""
ARMS: Final = (LATE, *ROUTERS)


class LateBinding:
    """One core over all workers."""

    def __init__(
        self, fleet: FleetConfig, config: CoreConfig, loop: EventLoop, observers: Sequence[Observer]
    ) -> None:
        workers = [fleet.worker(index) for index in range(fleet.num_workers)]
        self._cell = Cell(SchedulerCore(config), workers, loop, observers)
        self.hosts: Sequence[WorkerHost] = list(self._cell.hosts.values())

    def submit(self, spec: NewRequest) -> None:
        """Put it into the queue."""
        self._cell.submit(spec)

    def drain(self, index: int) -> None:
        """Tell the core, as a worker that drains does."""
        cell = self._cell
        cell.perform(cell.core.worker_draining(self.hosts[index].worker_id, cell.loop.now))


class EarlyBinding:
    """A router, and a core for each worker.

    An engine that drains gets nothing new from the router, and works off all that it has accepted.
    """

    def __init__(
        self,
        fleet: FleetConfig,
        config: CoreConfig,
        loop: EventLoop,
        observers: Sequence[Observer],
        router: Router,
    ) -> None:
        self._engines = [
            RoutedEngine(Cell(SchedulerCore(config), [fleet.worker(index)], loop, observers))
            for index in range(fleet.num_workers)
        ]
        self._open = list(self._engines)
        self._router = router
        self.hosts: Sequence[WorkerHost] = [
            host for engine in self._engines for host in engine.cell.hosts.values()
        ]

    def submit(self, spec: NewRequest) -> None:
        """Bind it to an engine, for good."""
        self._router(self._open).cell.submit(spec)

    def drain(self, index: int) -> None:
        """Tell the router."""
        self._open.remove(self._engines[index])


def simulate(
    arm: str,
    jobs: Sequence[Job],
    fleet: FleetConfig,
    config: CoreConfig,
    *,
    seed: int = 0,
    trouble: Trouble = NO_TROUBLE,
) -> list[Result]:
    """Run jobs on a fleet until all have ended; return what their clients saw."""
    loop, recorder, requests = EventLoop(), Recorder(), _Requests()
    running: Binding
    if arm == LATE:
        running = LateBinding(fleet, config, loop, [recorder, requests])
    else:
        router = ROUTERS[arm](random.Random(seed))
        running = EarlyBinding(fleet, config, loop, [recorder, requests], router)
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
