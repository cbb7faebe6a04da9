"""Ways to run a fleet: one queue that binds late, or a router in front of engines that bind early.

The same scheduler core is behind all of them. In the early arms each worker has a core of its own, so
all that differs is when, and by whom, a request is bound to a worker.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, TypeGuard

from octavo_lab.fleet.workload import FleetConfig, Job
from octavo_lab.sim import (
    EventLoop,
    FaultInjector,
    FaultRates,
    Recorder,
    SimCell,
    SimObserver,
    SimResult,
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


class Arm(Protocol):
    """A way to run a fleet."""

    hosts: Sequence[WorkerHost]

    def submit(self, spec: NewRequest) -> None:
        """A request has come."""

    def drain(self, index: int) -> None:
        """A worker is to take nothing new; what it has accepted it finishes."""


class _Outstanding:
    """The requests that one core has taken and not ended."""

    def __init__(self) -> None:
        self.request_ids: dict[str, None] = {}

    def submitted(self, spec: NewRequest, now: float) -> None:
        """A request has been sent."""
        self.request_ids[spec.request_id] = None

    def effects(self, effects: list[Effect], now: float) -> None:
        """Forget what has ended."""
        for effect in filter(_is_end, effects):
            self.request_ids.pop(effect.request_id, None)


def _is_end(effect: Effect) -> TypeGuard[Reject | FinishChoice]:
    """Return whether a request has ended with an effect."""
    return isinstance(effect, Reject) or (isinstance(effect, FinishChoice) and effect.last)


class Engine:
    """One worker with a core of its own, as a router sees it."""

    def __init__(self, cell: SimCell) -> None:
        self.cell = cell
        self._outstanding = _Outstanding()
        cell.observers.append(self._outstanding)

    @property
    def num_requests(self) -> int:
        """Requests that it has taken and not ended."""
        return len(self._outstanding.request_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens that it still has to compute, exactly: the rest of each prompt, and of each answer."""
        total = 0
        for request_id in self._outstanding.request_ids:
            request = self.cell.core.find(request_id)
            for sequence in request.sequences if request is not None else ():
                if sequence.status is SequenceStatus.RUNNING:
                    total += sequence.binding.num_admitted_tokens - sequence.binding.num_computed_tokens
                else:
                    total += sequence.num_tokens
                total += sequence.request.max_total_tokens - sequence.num_tokens
        return total


Router = Callable[[Sequence[Engine]], Engine]
"""Chooses among the engines that take requests."""


def round_robin(rng: random.Random) -> Router:
    """Each in its turn."""
    count = 0

    def choose(engines: Sequence[Engine]) -> Engine:
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
        self, fleet: FleetConfig, config: CoreConfig, loop: EventLoop, observers: Sequence[SimObserver]
    ) -> None:
        workers = [fleet.worker(index) for index in range(fleet.num_workers)]
        self._cell = SimCell(SchedulerCore(config), workers, loop, observers)
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
        observers: Sequence[SimObserver],
        router: Router,
    ) -> None:
        self._engines = [
            Engine(SimCell(SchedulerCore(config), [fleet.worker(index)], loop, observers))
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


class _Ends:
    """Counts the requests that have ended."""

    def __init__(self) -> None:
        self.count = 0

    def submitted(self, spec: NewRequest, now: float) -> None:
        """Ends are counted, not beginnings."""

    def effects(self, effects: list[Effect], now: float) -> None:
        """Count what has ended."""
        self.count += sum(map(_is_end, effects))


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
    loop, recorder, ends = EventLoop(), Recorder(), _Ends()
    running: Arm
    if arm == LATE:
        running = LateBinding(fleet, config, loop, [recorder, ends])
    else:
        router = ROUTERS[arm](random.Random(seed))
        running = EarlyBinding(fleet, config, loop, [recorder, ends], router)
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
    loop.run(stop=lambda: ends.count == len(jobs))
    return list(recorder.results.values())
