"""The engine's thread: plans in, reports out, and no wait for the event loop between two steps."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from octavo.protocol.steps import Geometry, Plan, PoolReport, Report

from worker_svc.engine.faults import Faults
from worker_svc.engine.limits import Limits
from worker_svc.engine.watchdog import StepWatch
from worker_svc.grammar.guide import Grammars
from worker_svc.kv.memory import PinOutcome
from worker_svc.runner.base import LoadedModel

T = TypeVar("T")
_US_PER_S = 1_000_000
_MAX_U32 = 2**32 - 1


class StepEngine(Protocol):
    """What the shell wants of the engine. Everything is called from the engine's thread."""

    @property
    def num_live(self) -> int:
        """Sequences that live."""

    def run_step(self, plan: Plan, clock: Callable[[], float]) -> Report:
        """Do what the plan says; raises only when the process cannot go on."""

    def cancel(self, handles: Iterable[int]) -> None:
        """Drop sequences, and those that a plan still on its way would admit."""

    def pin(self, name: str, keys: tuple[bytes, ...]) -> PinOutcome:
        """Keep these blocks on the device; replaces the pin of that name."""

    def unpin(self, name: str) -> int:
        """Let a pin go; return how many blocks it held alone."""

    def drop_all(self) -> None:
        """Drop all sequences and pins and keep the cache; handles start anew."""

    def take_cached_keys(self) -> tuple[Iterable[bytes], Iterable[bytes]]:
        """Return the keys in the device cache and in the host tier."""

    def pool_report(self) -> PoolReport:
        """Return the state of the pool."""

    def check_integrity(self) -> None:
        """Verify every invariant from scratch; raises IntegrityError, which names the broken one."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine over a loaded model."""

    engine: StepEngine
    info: LoadedModel
    geometry: Geometry
    max_model_len: int
    """The longest sequence that model and pool can hold."""
    limits: Limits
    faults: Faults | None = None
    """Where faults are injected; None unless that was enabled."""
    grammars: Grammars | None = None
    """None where output cannot be constrained."""


Deliver = Callable[[Report], None]


@dataclass(frozen=True, slots=True)
class _Step:
    plan: Plan
    deliver: Deliver


class EngineLoop:
    """One thread that builds the engine and is the only one to touch it.

    Two queues feed it: calls, which are made at the next step boundary, and plans, which run in order
    between calls. Whoever submits plans bounds them (the session's window). Results come back on the
    event loop that started the thread.
    """

    def __init__(
        self,
        build: Callable[[], Loaded],
        clock: Callable[[], float] = time.perf_counter,
        watch: StepWatch | None = None,
    ) -> None:
        self._build = build
        self._watch = watch or StepWatch(math.inf, math.inf)
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._calls: deque[Callable[[StepEngine], None]] = deque()
        self._plans: deque[_Step] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.ready: asyncio.Future[Loaded] = self._loop.create_future()
        """What was built. The engine may be touched only from within `call`."""
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Done when the thread has ended; holds the exception that ended it, `build`'s included."""

    def start(self) -> None:
        """Start to build the engine."""
        self._thread.start()

    def submit(self, plan: Plan, deliver: Deliver) -> None:
        """Queue a plan; `deliver` gets the report on the event loop."""
        with self._wake:
            self._plans.append(_Step(plan, deliver))
            self._wake.notify()

    def call(self, function: Callable[[StepEngine], T]) -> asyncio.Future[T]:
        """Call `function` with the engine at the next step boundary, before queued plans."""
        result: asyncio.Future[T] = self._loop.create_future()

        def call(engine: StepEngine) -> None:
            value = function(engine)
            self._post(lambda: None if result.done() else result.set_result(value))

        with self._wake:
            self._calls.append(call)
            self._wake.notify()
        return result

    def discard_plans(self) -> None:
        """Forget the plans that have not started."""
        with self._wake:
            self._plans.clear()

    def stop(self, timeout_s: float) -> bool:
        """End the thread at the next step boundary; return whether it has ended in time."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            loaded = self._build()
            self._post(lambda: self.ready.set_result(loaded))
            self._work(loaded.engine)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the process must learn of it
            failure = error
        self._post(lambda: self._end(failure))

    def _end(self, failure: BaseException | None) -> None:
        if failure is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(failure)

    def _work(self, engine: StepEngine) -> None:
        idle_since: float | None = None
        while True:
            step = self._next(engine)
            if step is None:
                return
            bubble_s = 0.0 if idle_since is None else self._clock() - idle_since
            self._watch.begin(engine.num_live + len(step.plan.admit), sum(n for _, n in step.plan.prefill))
            try:
                report = engine.run_step(step.plan, self._clock)
            finally:
                self._watch.end()
            # Time without live sequences is nobody's loss.
            idle_since = self._clock() if engine.num_live else None
            bubble_us = min(int(bubble_s * _US_PER_S), _MAX_U32)
            report = replace(report, timing=replace(report.timing, bubble_us=bubble_us))
            self._post(lambda deliver=step.deliver, report=report: deliver(report))  # type: ignore[misc]

    def _next(self, engine: StepEngine) -> _Step | None:
        """Make the calls that are due and return the next plan; None to stop."""
        while True:
            with self._wake:
                while not (self._calls or self._plans or self._stopping):
                    self._wake.wait()
                if self._stopping:
                    return None
                if not self._calls:
                    return self._plans.popleft()
                call = self._calls.popleft()
            call(engine)

    def _post(self, callback: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            # The event loop is closed: the process is ending and nobody wants the result.
            self._stopping = True
