"""Sends traffic at a target when its time has come, whatever the target does, and records what happened.

One process, one event loop. It shares the machine with what it measures, so it does no more per token
than to read a clock; everything is computed after the run.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from octavo_lab.command import BenchError
from octavo_lab.load.arrivals import Arrivals, Closed, Process
from octavo_lab.load.records import (
    LATE_S,
    GeneratorRecord,
    Offered,
    Outcome,
    RequestMeasurement,
    RunRecord,
    TrafficRecord,
)
from octavo_lab.load.target import Answer, LoadTarget, PlannedRequest

_PROGRESS_S: Final = 0.5
CLIENT_TIMEOUT: Final = "CLIENT_TIMEOUT"
"""Reason of a request that the generator gave up on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What to send, and when."""

    requests: Sequence[PlannedRequest]
    """In the order in which they are sent; each once."""
    arrivals: Process
    seed: int = 0
    """Of the arrivals."""
    dataset: str = ""
    """For the record: where the requests come from."""
    warm_up_s: float = 0.0
    """Requests planned before this are sent and not measured."""
    duration_s: float | None = None
    """Length of the window after the warm-up. None: until the last request is sent, in a closed loop until
    the last is answered."""

    @property
    def end_s(self) -> float | None:
        """End of the window, where it is known before the run."""
        return None if self.duration_s is None else self.warm_up_s + self.duration_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """What ends a request, or the run, from our side."""

    timeout_s: float | None = None
    """Longest time from the planned start of a request to its end."""
    drain_s: float = 60.0
    """Longest wait for the requests that are under way when the window has ended."""


@dataclass(frozen=True, slots=True)
class RunProgress:
    """How far a run is."""

    elapsed_s: float
    sent: int
    running: int
    ended: int
    total: int
    """Requests that will be sent, at most."""
    end_s: float | None
    """End of the window, where it is known."""

    @property
    def fraction(self) -> float:
        """Between 0 and 1, by requests or by time, whichever is further."""
        by_count = self.ended / self.total if self.total else 0.0
        by_time = self.elapsed_s / self.end_s if self.end_s else 0.0
        return min(1.0, max(by_count, by_time))


def requests_needed(arrivals: Arrivals, seed: int, end_s: float) -> int:
    """Return how many requests an open loop sends until a time."""
    return sum(1 for _ in itertools.takewhile(lambda at: at < end_s, arrivals.times(seed)))


async def generate(
    target: LoadTarget,
    traffic: Traffic,
    limits: RunLimits = RunLimits(),
    *,
    stop: asyncio.Event | None = None,
    on_progress: Callable[[RunProgress], None] | None = None,
) -> RunRecord:
    """Run the traffic against a target that has been entered; return what happened.

    When `stop` is set, nothing more is sent, what is under way is cut off, and the record tells what there
    is, marked as interrupted. Cancelling cancels every request and returns nothing.

    Raises:
        BenchError: there is nothing to send.
    """
    if not traffic.requests:
        raise BenchError(
            "there is nothing to send: the window is too short for the rate, or the dataset empty"
        )
    run = _Run(target, traffic, limits, stop or asyncio.Event())
    with _undisturbed():
        try:
            return await run.go(on_progress)
        except ExceptionGroup as faults:
            raise faults.exceptions[0] from None


class _Tape:
    """When the output of one request came."""

    __slots__ = ("_now", "times")

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.times: list[float] = []

    def chunk(self) -> None:
        self.times.append(self._now())


class _Run:
    def __init__(self, target: LoadTarget, traffic: Traffic, limits: RunLimits, stop: asyncio.Event) -> None:
        self._target = target
        self._traffic = traffic
        self._limits = limits
        self._stop = stop
        self._now = asyncio.get_running_loop().time
        self._began = self._now()
        self._all_sent = asyncio.Event()
        self._idle = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._records: list[RequestMeasurement] = []
        self._sent = 0
        self._last_planned_s = 0.0
        self._window_covered = False
        """Whether there were requests for the whole window, so that it ends when it should."""

    async def go(self, on_progress: Callable[[RunProgress], None] | None) -> RunRecord:
        started_at = datetime.now(UTC).isoformat(timespec="milliseconds")
        cpu_s = time.process_time()
        async with asyncio.TaskGroup() as group:
            reporter = group.create_task(self._report(on_progress))
            if isinstance(self._traffic.arrivals, Closed):
                source = iter(enumerate(self._traffic.requests))
                for _ in range(min(self._traffic.arrivals.concurrency, len(self._traffic.requests))):
                    self._spawn(group, self._slot(source))
            else:
                self._spawn(group, self._send(group, self._traffic.arrivals))
            await self._sending()
            until_s = self._until_s()
            await self._unless_stopped(self._idle, self._limits.drain_s)
            for task in (*self._tasks, reporter):
                task.cancel()
        cpu_s = time.process_time() - cpu_s
        return self._record(started_at, self._last_answer_s() if until_s is None else until_s, cpu_s)

    # -- sending

    async def _sending(self) -> None:
        """Wait until nothing more will be sent. The window of a closed loop ends on time whoever answers."""
        end_s = self._traffic.end_s
        if end_s is None or not isinstance(self._traffic.arrivals, Closed):
            await self._unless_stopped(self._all_sent)
            return
        await self._unless_stopped(self._all_sent, end_s - self._elapsed_s())
        self._window_covered |= not self._all_sent.is_set()

    def _spawn(self, group: asyncio.TaskGroup, work: Coroutine[Any, Any, None]) -> None:
        task = group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            self._idle.set()

    async def _send(self, group: asyncio.TaskGroup, arrivals: Arrivals) -> None:
        """Start each request at its time; one that is overdue at once."""
        end_s, requests = self._traffic.end_s, enumerate(self._traffic.requests)
        for at_s in arrivals.times(self._traffic.seed):
            if end_s is not None and at_s >= end_s:
                break
            number, request = next(requests, (0, None))
            if request is None:
                self._all_sent.set()
                return
            await self._until(at_s)
            self._spawn(group, self._one(number, request, at_s))
        self._window_covered = True
        if end_s is not None:
            await self._until(end_s)
        self._all_sent.set()

    async def _slot(self, source: Iterator[tuple[int, PlannedRequest]]) -> None:
        """Send one request after the other."""
        end_s = self._traffic.end_s
        for number, request in source:
            at_s = self._elapsed_s()
            if end_s is not None and at_s >= end_s:
                self._window_covered = True
                break
            await self._one(number, request, at_s)
        self._all_sent.set()

    async def _one(self, number: int, request: PlannedRequest, planned_s: float) -> None:
        """Send a request, follow it to its end, and keep its record, whatever that end is."""
        tape = _Tape(self._now)
        timeout_s = self._limits.timeout_s
        sent_at = self._now()
        self._sent += 1
        self._last_planned_s = max(self._last_planned_s, planned_s)
        answer = Answer(outcome=Outcome.ABANDONED)  # If we are cancelled, that is what it was.
        try:
            async with asyncio.timeout_at(None if timeout_s is None else self._began + planned_s + timeout_s):
                answer = await self._target.ask(request, tape)
        except TimeoutError:
            answer = Answer(outcome=Outcome.TIMEOUT, reason=CLIENT_TIMEOUT)
        finally:
            ended_at, began = self._now(), self._began
            self._records.append(
                RequestMeasurement(
                    offered=Offered(
                        number=number,
                        planned_s=planned_s,
                        prompt_tokens=request.prompt_tokens,
                        output_tokens=request.output_tokens,
                        kind=request.kind,
                    ),
                    sent_s=sent_at - began,
                    outcome=answer.outcome,
                    ended_s=ended_at - began,
                    chunk_times_s=tuple(at - began for at in tape.times),
                    prompt_tokens=answer.prompt_tokens,
                    output_tokens=len(tape.times) if answer.output_tokens is None else answer.output_tokens,
                    cached_tokens=answer.cached_tokens,
                    queue_s=answer.queue_s,
                    preemptions=answer.preemptions,
                    reason=answer.reason,
                )
            )

    # -- waiting

    def _elapsed_s(self) -> float:
        return self._now() - self._began

    async def _until(self, at_s: float) -> None:
        delay_s = at_s - self._elapsed_s()
        if delay_s > 0:
            await asyncio.sleep(delay_s)

    async def _unless_stopped(self, event: asyncio.Event, timeout_s: float | None = None) -> None:
        """Wait for an event, but no longer than a time, and only until somebody says stop."""
        waits = [asyncio.ensure_future(one.wait()) for one in (event, self._stop)]
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _until_s(self) -> float | None:
        """Return the end of the window, now that the last request was sent; None: the last answer."""
        if self._stop.is_set():
            return self._elapsed_s()
        end_s = self._traffic.end_s
        if end_s is not None and self._window_covered:
            return end_s
        # A closed loop sends as many at once as it may: what is sent last says little of the time it took.
        return None if isinstance(self._traffic.arrivals, Closed) else self._last_planned_s

    def _last_answer_s(self) -> float:
        """Return when the last request ended that was not cut off."""
        ends = (one.ended_s for one in self._records if one.outcome is not Outcome.ABANDONED)
        return max(ends, default=self._last_planned_s)

    # -- telling

    async def _report(self, on_progress: Callable[[RunProgress], None] | None) -> None:
        while on_progress is not None:
            ended = len(self._records)
            on_progress(
                RunProgress(
                    elapsed_s=self._elapsed_s(),
                    sent=self._sent,
                    running=self._sent - ended,
                    ended=ended,
                    total=len(self._traffic.requests),
                    end_s=self._traffic.end_s,
                )
            )
            await asyncio.sleep(_PROGRESS_S)

    def _record(self, started_at: str, until_s: float, cpu_s: float) -> RunRecord:
        traffic, records = self._traffic, self._records
        arrivals = traffic.arrivals
        late_s = [one.lateness_s for one in records]
        return RunRecord(
            target=self._target.record,
            traffic=TrafficRecord(
                dataset=traffic.dataset,
                arrivals=str(arrivals),
                seed=traffic.seed,
                offered_rate_per_s=None if isinstance(arrivals, Closed) else arrivals.rate_per_s,
                concurrency=arrivals.concurrency if isinstance(arrivals, Closed) else None,
            ),
            started_at=started_at,
            warm_up_s=traffic.warm_up_s,
            until_s=until_s,
            ended_s=max((one.ended_s for one in records), default=0.0),
            generator=GeneratorRecord(
                late_sends=sum(lateness_s > LATE_S for lateness_s in late_s),
                max_lateness_s=max(late_s, default=0.0),
                cpu_s=cpu_s,
            ),
            requests=tuple(sorted(records, key=lambda one: one.offered.number)),
            interrupted=self._stop.is_set(),
        )


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Keep what is there already out of the garbage collector's full passes, which stop everything."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
