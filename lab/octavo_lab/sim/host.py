"""Runs one worker on the event loop: its steps, its link to the scheduler, and what goes wrong with both."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from octavo.protocol.steps import Plan, Report

from octavo_lab.sim.clock import EventLoop
from octavo_lab.sim.worker import StepFault, WorkerCrashedError
from scheduler_svc.core import Effect, SchedulerCore, WorkerInfo

Event = Callable[[SchedulerCore, float], list[Effect]]
"""What a message of a worker does to a core, now."""


class StepMachine(Protocol):
    """What a host runs: a simulated worker, or a real engine over a runner without a model."""

    draining: bool
    step_fault: StepFault
    """Called before each step."""
    refuse_next: int
    """Admissions that are refused although there is room."""

    def welcome(self) -> WorkerInfo:
        """Begin a session."""

    def restart(self) -> None:
        """Start anew, with an empty cache."""

    def cancel(self, handles: tuple[int, ...]) -> None:
        """Drop sequences at the next step boundary."""

    def run(self, plan: Plan, bubble_us: int = 0) -> Report:
        """Apply a plan."""

    @property
    def num_seqs(self) -> int:
        """Live sequences."""

    def has(self, seed: int, choice: int) -> bool:
        """Return whether a choice of the request with this seed is here."""

    def handles_of(self, seeds: frozenset[int]) -> tuple[int, ...]:
        """Return the handles of the sequences with these seeds."""

    @property
    def quiet(self) -> bool:
        """Nothing is held for anybody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimings:
    """Times around a simulated worker, in seconds."""

    delay_s: float = 0.0002
    """One way between scheduler and worker."""
    reattach_s: float = 0.1
    """From the end of a stream to the next attempt."""
    restart_s: float = 5.0
    """From a crash to a new process that is ready."""


@dataclass(slots=True, eq=False)
class WorkerHost:
    """One simulated worker and its stream. Messages of a stream that has ended go nowhere."""

    worker_id: str
    machine: StepMachine
    loop: EventLoop
    tell: Callable[[Event], None]
    """Lets the scheduler take an event in."""
    timings: LinkTimings = LinkTimings()
    session: int = 0
    """Number of the stream that is open; 0 while none is, and then no plan is here either."""
    slow_factor: float = 1.0
    lose_reports: int = 0
    drift_reports: int = 0
    num_steps: int = 0
    before_step: Callable[[WorkerHost], None] = lambda host: None
    """Called before each step: the place to inject faults."""
    _sessions: int = 0
    _plans: deque[Plan] = field(default_factory=deque)
    _running: bool = False
    _idle_since: float = 0.0
    _hung_until: float = 0.0
    _process: int = 0
    """Counts restarts: a step of a process that has died ends nowhere."""
    _wanted: bool = False
    _leaves_at: float = math.inf

    def attach(self) -> None:
        """Open a stream once the running step has ended and the process answers."""
        if self.session:
            return
        self._wanted = self._running or self._hangs()
        if self._wanted:
            return
        self._sessions += 1
        self.session = self._sessions
        self._idle_since = self.loop.now
        info = self.machine.welcome()
        self._up(lambda core, now: core.worker_up(info, now))
        if self.machine.draining:
            self._say_draining()

    def close_stream(self) -> None:
        """End the stream, from either side; attach anew a little later."""
        if self.session:
            self.session = 0
            self._plans.clear()
            self._if_alive(self.loop.now + self.timings.reattach_s, self.attach)

    def send_plan(self, plan: Plan) -> None:
        """Send a plan down the open stream."""
        self._over_the_stream(partial(self._plan_arrived, plan))

    def send_cancel(self, handles: tuple[int, ...]) -> None:
        """Send a cancel down the open stream; it overtakes plans that have not run."""
        self._over_the_stream(partial(self.machine.cancel, handles))

    def _up(self, event: Event) -> None:
        self._over_the_stream(partial(self.tell, event))

    def _say_draining(self) -> None:
        self._up(lambda core, now: core.worker_draining(self.worker_id, now))

    def _over_the_stream(self, deliver: Callable[[], None]) -> None:
        """Deliver a message, in either direction, unless the stream ends first."""
        session = self.session

        def arrive() -> None:
            if session and self.session == session:
                deliver()

        self.loop.after(self.timings.delay_s, arrive)

    def _if_alive(self, when: float, callback: Callable[[], None]) -> None:
        """Do something at a time, unless the process dies first."""
        process = self._process

        def due() -> None:
            if self._process == process:
                callback()

        self.loop.at(when, due)

    # Steps ---------------------------------------------------------------------------------------

    def _plan_arrived(self, plan: Plan) -> None:
        self._plans.append(plan)
        self._step_boundary()

    def _step_boundary(self) -> None:
        """Begin the next step, if there is a plan for it and nothing is in the way."""
        if self._running or self._hangs():
            return
        if self._wanted:
            self.attach()
        if self._plans:
            self.before_step(self)
        # A fault may have come in between.
        if not self._plans or self._hangs():
            return
        waited = self.loop.now - self._idle_since if self.machine.num_seqs else 0.0
        self.num_steps += 1
        try:
            report = self.machine.run(self._plans.popleft(), round(waited * 1e6))
        except WorkerCrashedError:
            self.crash()
            return
        seconds = report.timing.execute_us * 1e-6 * self.slow_factor
        if self.slow_factor != 1.0:
            timing = replace(report.timing, execute_us=round(seconds * 1e6))
            report = replace(report, timing=timing)
        self._running = True
        self._if_alive(self.loop.now + seconds, partial(self._step_end, report, self.session))

    def _step_end(self, report: Report, session: int) -> None:
        if self.loop.now < self._hung_until:
            self._if_alive(self._hung_until, partial(self._step_end, report, session))
            return
        self._running = False
        self._idle_since = self.loop.now
        if self.session == session and session:
            self._send_report(report)
        self._step_boundary()
        self._leave_if_done()

    def _send_report(self, report: Report) -> None:
        if self.lose_reports > 0:
            self.lose_reports -= 1
            return
        if self.drift_reports > 0:
            self.drift_reports -= 1
            # Books that have drifted: now in its sequences, now in its blocks.
            if report.step % 2:
                report = replace(report, live_count=report.live_count + 1)
            else:
                report = replace(report, pool=replace(report.pool, free=report.pool.free + 1))
        self._up(lambda core, now: core.report(self.worker_id, report, now))

    def _hangs(self) -> bool:
        """Return whether the process answers nothing now; then what is next is looked at later."""
        hangs = self.loop.now < self._hung_until
        if hangs:
            self.loop.at(self._hung_until, self._step_boundary)
        return hangs

    # Faults --------------------------------------------------------------------------------------

    def crash(self) -> None:
        """Kill the process: its step, its stream and its cache are gone; a new one comes up later."""
        self.drop_stream()
        self._process += 1
        self._running = self._wanted = False
        self._hung_until = 0.0
        self._leaves_at = math.inf
        self._if_alive(self.loop.now + self.timings.restart_s, self._restart)

    def _restart(self) -> None:
        self.machine.restart()
        self.attach()

    def drop_stream(self) -> None:
        """Break the stream: the worker lives, its sequences are gone, its cache stays."""
        if self.session:
            self.close_stream()
            self.tell(lambda core, now: core.worker_down(self.worker_id, now))

    def hang(self, seconds: float) -> None:
        """Answer nothing for so long; the port still looks healthy."""
        self._hung_until = max(self._hung_until, self.loop.now + seconds)

    def drain(self) -> None:
        """Take nothing new, and restart once the sequences are gone (a rolling restart)."""
        if self.session and not self.machine.draining:
            self.machine.draining = True
            self._leaves_at = self.loop.now + 10 * self.timings.delay_s
            self._say_draining()
            self.loop.at(self._leaves_at, self._leave_if_done)

    def _leave_if_done(self) -> None:
        due = self.loop.now >= self._leaves_at and not (self._running or self._plans)
        if due and not (self.session and self.machine.num_seqs):
            self.crash()
