"""What goes wrong with simulated workers, by chance or on purpose."""

from __future__ import annotations

import enum
import random
from collections import Counter
from dataclasses import dataclass, fields

from octavo.protocol.steps import StepError

from octavo_lab.sim.host import WorkerHost
from octavo_lab.sim.worker import WorkerCrashedError


class Poison(enum.Enum):
    """What a poisonous request does to each step that computes it."""

    FAILS = "the step fails and nobody knows why"
    FAILS_NAMED = "the step fails and names it"
    KILLS = "the worker dies"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRates:
    """Chances per step of a worker."""

    crash: float = 0.0
    drop_stream: float = 0.0
    hang: float = 0.0
    slow: float = 0.0
    refuse: float = 0.0
    lose_report: float = 0.0
    drift: float = 0.0
    fail_step: float = 0.0
    drain: float = 0.0


class FaultInjector:
    """Injects faults before and in the steps of the hosts it is installed in; counts them by name."""

    def __init__(self, rates: FaultRates, rng: random.Random, hang_s: float = 60.0) -> None:
        self.counts: Counter[str] = Counter()
        self.poison: dict[int, Poison] = {}
        """By the seed of the request."""
        self.hang_s = hang_s
        """Longer than the scheduler's watchdog, or nobody notices."""
        self._rng = rng
        self._chances = [(field.name, getattr(rates, field.name)) for field in fields(rates)]
        self._total = sum(chance for _, chance in self._chances)
        self._fail_next: set[str] = set()

    def install(self, host: WorkerHost) -> None:
        """Watch over a host."""
        host.before_step = self.before_step
        host.machine.step_fault = lambda seeds: self._step_fault(host, seeds)

    def before_step(self, host: WorkerHost) -> None:
        """Perhaps let something go wrong."""
        draw = self._rng.random()
        if draw >= self._total:
            return
        for name, chance in self._chances:
            if draw < chance:
                self.inject(name, host)
                return
            draw -= chance

    def inject(self, name: str, host: WorkerHost) -> None:
        """Let one thing, by the name of its rate, go wrong with a host."""
        self.counts[name] += 1
        if name == "crash":
            host.crash()
        elif name == "drop_stream":
            host.drop_stream()
        elif name == "hang":
            host.hang(self.hang_s)
        elif name == "slow":
            host.slow_factor = 1.0 if host.slow_factor > 1.0 else 5.0
        elif name == "refuse":
            host.machine.refuse_next = self._rng.randint(1, 4)
        elif name == "lose_report":
            host.lose_reports = 1
        elif name == "drift":
            host.drift_reports = 1
        elif name == "fail_step":
            self._fail_next.add(host.worker_id)
        elif name == "drain":
            host.drain()

    def _step_fault(self, host: WorkerHost, seeds: frozenset[int]) -> tuple[StepError, ...]:
        if seeds and host.worker_id in self._fail_next:
            self._fail_next.discard(host.worker_id)
            return (StepError((), "EXCEPTION", "injected"),)
        poisonous = {seed: self.poison[seed] for seed in seeds if seed in self.poison} if self.poison else {}
        if Poison.KILLS in poisonous.values():
            self.counts["killed"] += 1
            raise WorkerCrashedError
        named = frozenset(seed for seed, poison in poisonous.items() if poison is Poison.FAILS_NAMED)
        if named:
            return (StepError(host.machine.handles_of(named), "INVALID_VALUE", "poison"),)
        return (StepError((), "EXCEPTION", "poison"),) if poisonous else ()
