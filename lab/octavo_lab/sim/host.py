"""Runs one worker on the event loop: its steps, its link to the scheduler, and what goes wrong with both."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from octavo.protocol.steps import Plan, Report

from octavo_lab.sim.clock import EventLoop
from octavo_lab.sim.worker import StepFault, WorkerCrashedError
from scheduler_svc.core.events import WorkerInfo


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

    @property
    def lengths(self) -> dict[int, int]:
        """Tokens known of each live sequence, by handle."""

    def has(self, seed: int, choice: int) -> bool:
        """Return whether a choice of the request with this seed is here."""

    def handles_of(self, seeds: frozenset[int]) -> tuple[int, ...]:
        """Return the handles of the sequences with these seeds."""

    @property
    def quiet(self) -> bool:
        """Nothing is held for anybody."""


class Upward(Protocol):
    """Where a host's messages go."""

    def on_up(self, host: WorkerHost, info: WorkerInfo) -> None:
        """A session has begun."""

    def on_down(self, host: WorkerHost) -> None:
        """The stream has ended."""

    def on_draining(self, host: WorkerHost) -> None:
        """The worker takes nothing new."""

    def on_report(self, host: WorkerHost, report: Report) -> None:
        """A report has arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimings:
    """Times around a simulated worker, in seconds."""

    delay_s: float = 0.0002
    """One way between scheduler and worker."""
    reattach_s: float = 0.1
    """From the end of a stream to the next attempt."""
    restart_s: float = 5.0
    """From a crash to a new process that is ready."""


class WorkerHost:
    """One simulated worker and its stream. Messages of a stream that has ended go nowhere."""

    def __init__(
        self, worker_id: str, machine: StepMachine, loop: EventLoop, timings: LinkTimings | None = None
    ) -> None:
        self.worker_id = worker_id
        self.machine = machine
        self.timings = timings or LinkTimings()
        self.session = 0
        """Number of the stream that is open; 0 while none is."""
        self.slow_factor = 1.0
        self.lose_reports = 0
        self.drift_reports = 0
        self.num_steps = 0
        self.before_step: Callable[[WorkerHost], None] = lambda host: None
        """Called before each step: the place to inject faults."""
        self._loop = loop
        self._upward: Upward | None = None
        self._sessions = 0
        self._plans: deque[Plan] = deque()
        self._running = False
        self._idle_since = 0.0
        self._hung_until = 0.0
        self._process = 0
        """Counts restarts: a step of a process that has died ends nowhere."""
        self._wanted = False
        self._leaving: float | None = None

    # Streams -------------------------------------------------------------------------------------

    def start(self, upward: Upward) -> None:
        """Attach to a scheduler."""
        self._upward = upward
        self._attach()

    def _attach(self) -> None:
        """Open a stream once the running step has ended and the process answers."""
        if self.session:
            return
        if self._running or self._loop.now < self._hung_until:
            self._wanted = True
            if not self._running:
                self._loop.at(self._hung_until, self._step_boundary)
            return
        self._wanted = False
        self._sessions += 1
        self.session = self._sessions
        self._plans.clear()
        self._idle_since = self._loop.now
        info = self.machine.welcome()
        self._up(lambda upward: upward.on_up(self, info))
        if self.machine.draining:
            self._up(lambda upward: upward.on_draining(self))

    def _up(self, message: Callable[[Upward], None]) -> None:
        """Deliver a message to the scheduler unless the stream ends first."""
        upward, session = self._upward, self.session
        assert upward is not None

        def arrive() -> None:
            if self.session == session:
                message(upward)

        self._loop.after(self.timings.delay_s, arrive)

    def close_stream(self, reattach_s: float | None = None) -> None:
        """End the stream, from either side; attach anew a little later."""
        if self.session:
            self.session = 0
            self._plans.clear()
            delay = self.timings.reattach_s if reattach_s is None else reattach_s
            self._loop.after(delay, self._attach_if_alive(self._process))

    def _attach_if_alive(self, process: int) -> Callable[[], None]:
        def attach() -> None:
            if self._process == process:
                self._attach()

        return attach

    # Messages from the scheduler -----------------------------------------------------------------

    def send_plan(self, plan: Plan) -> None:
        """Send a plan down the open stream."""
        self._down(lambda: self._plan_arrived(plan))

    def send_cancel(self, handles: tuple[int, ...]) -> None:
        """Send a cancel down the open stream; it overtakes plans that have not run."""
        self._down(lambda: self.machine.cancel(handles))

    def _down(self, deliver: Callable[[], None]) -> None:
        session = self.session

        def arrive() -> None:
            if session and self.session == session:
                deliver()

        self._loop.after(self.timings.delay_s, arrive)

    def _plan_arrived(self, plan: Plan) -> None:
        self._plans.append(plan)
        if not self._running:
            self._step_boundary()

    # Steps ---------------------------------------------------------------------------------------

    def _step_boundary(self) -> None:
        """Begin the next step, if there is a plan for it and nothing is in the way."""
        if self._running:
            return
        if self._loop.now < self._hung_until:
            self._loop.at(self._hung_until, self._step_boundary)
            return
        if self._wanted:
            self._attach()
        if not self._plans:
            return
        self.before_step(self)
        if not self.session or not self._plans or self._loop.now < self._hung_until:
            # A fault came in between.
            if self._plans:
                self._loop.at(self._hung_until, self._step_boundary)
            return
        waited = self._loop.now - self._idle_since if self.machine.num_seqs else 0.0
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
        self._loop.after(seconds, self._step_end(report, self.session, self._process))

    def _step_end(self, report: Report, session: int, process: int) -> Callable[[], None]:
        def end() -> None:
            if self._process != process:
                return
            if self._loop.now < self._hung_until:
                self._loop.at(self._hung_until, end)
                return
            self._running = False
            self._idle_since = self._loop.now
            if self.session == session and session:
                self._send_report(report)
            self._step_boundary()
            self._leave_if_done()

        return end

    def _send_report(self, report: Report) -> None:
        if self.lose_reports > 0:
            self.lose_reports -= 1
            return
        if self.drift_reports > 0:
            self.drift_reports -= 1
            report = _drifted(report)
        self._up(lambda upward: upward.on_report(self, report))

    # Faults --------------------------------------------------------------------------------------

    def crash(self) -> None:
        """Kill the process: its step, its stream and its cache are gone; a new one comes up later."""
        self._process += 1
        self._running = False
        self._wanted = False
        self._hung_until = 0.0
        self._leaving = None
        self._end_stream()
        process = self._process

        def restart() -> None:
            if self._process == process:
                self.machine.restart()
                self._attach()

        self._loop.after(self.timings.restart_s, restart)

    def drop_stream(self) -> None:
        """Break the stream: the worker lives, its sequences are gone, its cache stays."""
        if self.session:
            self._end_stream()
            self._loop.after(self.timings.reattach_s, self._attach_if_alive(self._process))

    def _end_stream(self) -> None:
        """End the stream from this side; the scheduler sees it a moment later."""
        if self.session:
            self.session = 0
            self._plans.clear()
            upward = self._upward
            assert upward is not None
            upward.on_down(self)

    def hang(self, seconds: float) -> None:
        """Answer nothing for so long; the port still looks healthy."""
        self._hung_until = max(self._hung_until, self._loop.now + seconds)

    def drain(self) -> None:
        """Take nothing new, and restart once the sequences are gone (a rolling restart)."""
        if self.session and not self.machine.draining:
            self.machine.draining = True
            self._leaving = self._loop.now
            self._up(lambda upward: upward.on_draining(self))
            self._loop.after(10 * self.timings.delay_s, self._leave_if_done)

    def _leave_if_done(self) -> None:
        if self._leaving is None or self._running or self._plans:
            return
        gone = not self.session or not self.machine.num_seqs
        if gone and self._loop.now >= self._leaving + 10 * self.timings.delay_s:
            self.crash()


def _drifted(report: Report) -> Report:
    """Return a report of books that have drifted: now in its sequences, now in its blocks."""
    if report.step % 2:
        return replace(report, live_count=report.live_count + 1)
    return replace(report, pool=replace(report.pool, free=report.pool.free + 1))
