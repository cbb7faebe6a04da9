"""A scheduler core and its simulated workers on one event loop: the shell of a simulated system."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Protocol

from octavo_lab.sim.clock import EventLoop
from octavo_lab.sim.host import Event, LinkTimings, StepMachine, WorkerHost
from octavo_lab.sim.worker import SimWorker, SimWorkerConfig
from scheduler_svc.core import DetachWorker, Effect, NewRequest, SchedulerCore, SendCancel, SendPlan


class SimObserver(Protocol):
    """Sees everything that goes into a core and comes out of it."""

    def submitted(self, spec: NewRequest, now: float) -> None:
        """A request is about to be submitted."""

    def effects(self, effects: list[Effect], now: float) -> None:
        """An event has had these effects; they are performed next."""


class SimCell:
    """Performs the effects of one scheduler core. Several cells may share an event loop."""

    def __init__(
        self,
        core: SchedulerCore,
        workers: Iterable[SimWorkerConfig],
        loop: EventLoop | None = None,
        observers: Iterable[SimObserver] = (),
        timings: LinkTimings | None = None,
        machine: Callable[[SimWorkerConfig], StepMachine] = SimWorker,
    ) -> None:
        self.core = core
        self.loop = loop or EventLoop()
        self.hosts: dict[str, WorkerHost] = {}
        self.observers = list(observers)
        self._tick_at = math.inf
        for config in workers:
            name = config.worker_id
            self.hosts[name] = WorkerHost(
                name, machine(config), self.loop, self._take, timings or LinkTimings()
            )
            self.hosts[name].attach()

    def submit(self, spec: NewRequest) -> None:
        """Submit a request now."""
        for observer in self.observers:
            observer.submitted(spec, self.loop.now)
        self.perform(self.core.submit(spec, self.loop.now))

    def submit_at(self, when: float, spec: NewRequest) -> None:
        """Submit a request later."""
        self.loop.at(when, lambda: self.submit(spec))

    def cancel(self, request_id: str) -> None:
        """Cancel a request now."""
        self.perform(self.core.cancel(request_id, self.loop.now))

    def stop_choice(self, request_id: str, choice: int) -> None:
        """End a choice now, as a stop string does."""
        self.perform(self.core.stop_choice(request_id, choice, self.loop.now))

    def perform(self, effects: list[Effect]) -> None:
        """Do what the core wants done, and see to it that it is woken in time."""
        for observer in self.observers:
            observer.effects(effects, self.loop.now)
        for effect in effects:
            if isinstance(effect, SendPlan):
                self.hosts[effect.worker_id].send_plan(effect.plan)
            elif isinstance(effect, SendCancel):
                self.hosts[effect.worker_id].send_cancel(effect.handles)
            elif isinstance(effect, DetachWorker):
                self.hosts[effect.worker_id].close_stream()
        wake = self.core.next_wakeup()
        if wake is not None and wake < self._tick_at:
            self._tick_at = wake
            self.loop.at(wake, self._tick)

    def _take(self, event: Event) -> None:
        self.perform(event(self.core, self.loop.now))

    def _tick(self) -> None:
        if self.loop.now >= self._tick_at:
            self._tick_at = math.inf
            self.perform(self.core.tick(self.loop.now))
