"""Ways to run a fleet: one queue that binds late, or a router in front of engines that bind early.

The same scheduler core is behind all of them. In the early arms each worker has a core of its own, so
all that differs is when, and by whom, a request is bound to a worker.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from octavo.steptimes import StepTimes

from octavo_lab.sim import (
    EventLoop,
    FaultInjector,
    FaultRates,
    Recorder,
    SimCell,
    SimResult,
    SimWorkerConfig,
)
from scheduler_svc.core import CoreConfig, Effect, FinishChoice, NewRequest, Reject, SchedulerCore
from scheduler_svc.core.request import SequenceStatus

SLOW_FACTOR: Final = 3.0
"""How much slower the slow worker of a degraded fleet is."""
Job = tuple[float, NewRequest]
"""When (virtual seconds), and what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """The simulated fleet. All of its workers are alike; faults make them differ."""

    num_workers: int = 8
    worker: SimWorkerConfig = SimWorkerConfig(
        worker_id="w", step_times=StepTimes.builtin(), num_blocks=8192, prefix_caching=False
    )
    faults: FaultRates = FaultRates()
    """Chances per step of each worker, on top of what the condition brings."""


STANDARD_FLEET: Final = FleetConfig()


class RoutedEngine:
    """A core and its workers, as a router sees them; it follows the requests that the core has."""

    def __init__(self, cell: SimCell) -> None:
        self.cell = cell
        self.ended = 0
        self._outstanding: dict[str, None] = {}
        cell.observers.append(self)

    def submitted(self, spec: NewRequest, now: float) -> None:
        """A request has been sent."""
        self._outstanding[spec.request_id] = None

    def effects(self, effects: list[Effect], now: float) -> None:
        """Forget what has ended, and count it."""
        for effect in effects:
            if isinstance(effect, Reject) or (isinstance(effect, FinishChoice) and effect.last):
                self._outstanding.pop(effect.request_id, None)
                self.ended += 1

    @property
    def num_requests(self) -> int:
        """Requests that it has taken and not ended."""
        return len(self._outstanding)

    @property
    def num_tokens(self) -> int:
        """Tokens that it still has to compute, exactly: the rest of each prompt, and of each answer."""
        total = 0
        for request_id in self._outstanding:
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


LATE: Final = "one queue"
"""The name of the arm that binds late: all workers are behind one core."""
ARMS: Final[dict[str, Callable[[random.Random], Router]]] = {
    LATE: lambda rng: lambda engines: engines[0],
    "round robin": _round_robin,
    "random": lambda rng: rng.choice,
    # Among equals, any.
    "least requests": lambda rng: (
        lambda engines: min(engines, key=lambda one: (one.num_requests, rng.random()))
    ),
    # It sees every engine at every moment, and knows how long each answer will become.
    "least tokens": lambda rng: lambda engines: min(engines, key=lambda one: (one.num_tokens, rng.random())),
}


def simulate(
    arm: str,
    jobs: Sequence[Job],
    fleet: FleetConfig,
    config: CoreConfig,
    *,
    seed: int = 0,
    degraded: bool = False,
) -> list[SimResult]:
    """Run jobs on a fleet until all have ended; return what their clients saw.

    In a degraded fleet one worker is slow, and another drains at half time: it finishes what it has. A core
    is told, as by a worker that drains; a router just offers it nothing any more.
    """
    loop, recorder, router = EventLoop(), Recorder(), ARMS[arm](random.Random(seed))
    workers = [replace(fleet.worker, worker_id=f"w{index}") for index in range(fleet.num_workers)]
    parts = [workers] if arm == LATE else [[worker] for worker in workers]
    engines = [RoutedEngine(SimCell(SchedulerCore(config), part, loop, [recorder])) for part in parts]
    hosts = [host for engine in engines for host in engine.cell.hosts.values()]
    for index, host in enumerate(hosts if fleet.faults != FaultRates() else ()):
        # One each: what goes wrong in a worker's n-th step does not depend on the others, nor on the arm.
        FaultInjector(fleet.faults, random.Random(f"{seed} {index}")).install(host)
    taking = list(engines)

    def submit(spec: NewRequest) -> None:
        router(taking).cell.submit(spec)

    def drain() -> None:
        if arm == LATE:
            cell = engines[0].cell
            cell.perform(cell.core.worker_draining(hosts[1].worker_id, loop.now))
        else:
            del taking[1]

    for at, spec in jobs:
        loop.at(at, partial(submit, spec))
    if degraded:
        hosts[0].slow_factor = SLOW_FACTOR
        loop.at((jobs[0][0] + jobs[-1][0]) / 2, drain)
    loop.run(stop=lambda: sum(engine.ended for engine in engines) == len(jobs))
    return list(recorder.results.values())
