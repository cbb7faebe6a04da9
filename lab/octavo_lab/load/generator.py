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
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from octavo_lab.command import BenchError
from octavo_lab.load.arrivals import Arrivals, Closed, Process
from octavo_lab.load.records import (
    LATE_S,
    Answer,
    GeneratorRecord,
    Offered,
    Outcome,
    RequestMeasurement,
    RunRecord,
    TrafficRecord,
)
from octavo_lab.load.target import LoadTarget, PlannedRequest

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
    ended: int
    fraction: float
    """Between 0 and 1, by requests or by time, whichever is further."""

    @property
    def running(self) -> int:
        """Requests under way."""
        return self.sent - self.ended


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
    # What is there already stays out of the garbage collector's full passes, which stop everything.
    gc.collect()
    gc.freeze()
    try:
        return await _Run(target, traffic, limits, stop or asyncio.Event()).go(on_progress)
    except ExceptionGroup as faults:
        raise faults.exceptions[0] from None
    finally:
        gc.unfreeze()


@dataclass(slots=True)
class _Tape:
    """When the output of one request came."""

    now: Callable[[], float]
    times: list[float] = field(default_factory=list)

    def chunk(self) -> None:
        self.times.append(self.now())


class _Run:
    def __init__(self, target: LoadTarget, traffic: Traffic, limits: RunLimits, stop: asyncio.Event) -> None:
        self._target = target
        self._traffic = traffic
        self._limits = limits
        self._stop = stop
        self._now = asyncio.get_running_loop().time
        self._began = self._now()
        self._tasks: set[asyncio.Task[Any]] = set()
        """Those that send, and in an open loop one for each request under way."""
        self._records: list[RequestMeasurement] = []
        self._sent = 0

    async def go(self, on_progress: Callable[[RunProgress], None] | None) -> RunRecord:
        started_at = datetime.now(UTC).isoformat(timespec="milliseconds")
        cpu_s = time.process_time()
        arrivals, requests, end_s = self._traffic.arrivals, self._traffic.requests, self._traffic.end_s
        left_s = None
        async with asyncio.TaskGroup() as group:
            stopped = group.create_task(self._stop.wait())
            reporter = group.create_task(self._report(on_progress))
            if isinstance(arrivals, Closed):
                source = iter(enumerate(requests))
                places = range(min(arrivals.concurrency, len(requests)))
                senders = {self._spawn(group, self._slot(source)) for _ in places}
                # Its window ends on time whoever answers; whoever sends on time sees to it.
                left_s = None if end_s is None else end_s - self._elapsed_s()
            else:
                senders = {self._spawn(group, self._send(group, arrivals))}
            sent, _ = await asyncio.wait(
                {stopped, *senders}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
            )
            until_s = end_s if not sent or any(task.result() for task in sent) else None
            if self._stop.is_set():
                until_s = self._elapsed_s()
            drained = group.create_task(asyncio.wait({*senders, *self._tasks}))
            await asyncio.wait(
                {stopped, drained}, timeout=self._limits.drain_s, return_when=asyncio.FIRST_COMPLETED
            )
            for task in (stopped, reporter, drained, *self._tasks):
                task.cancel()
        return self._record(started_at, until_s, time.process_time() - cpu_s)

    # -- sending

    def _spawn(self, group: asyncio.TaskGroup, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _send(self, group: asyncio.TaskGroup, arrivals: Arrivals) -> bool:
        """Start each request at its time, one that is overdue at once; tell if they last for the window."""
        end_s, requests = self._traffic.end_s, iter(enumerate(self._traffic.requests))
        for at_s in arrivals.times(self._traffic.seed):
            if end_s is not None and at_s >= end_s:
                break
            if (planned := next(requests, None)) is None:
                return False
            await asyncio.sleep(at_s - self._elapsed_s())
            self._spawn(group, self._one(*planned, at_s))
        if end_s is not None:
            await asyncio.sleep(end_s - self._elapsed_s())
        return True

    async def _slot(self, source: Iterator[tuple[int, PlannedRequest]]) -> bool:
        """Send one request after the other; tell if they last for the window."""
        end_s = self._traffic.end_s
        for number, request in source:
            at_s = self._elapsed_s()
            if end_s is not None and at_s >= end_s:
                return True
            await self._one(number, request, at_s)
        return False

    async def _one(self, number: int, request: PlannedRequest, planned_s: float) -> None:
        """Send a request, follow it to its end, and keep its record, whatever that end is."""
        tape, timeout_s, began = _Tape(self._now), self._limits.timeout_s, self._began
        sent_s = self._elapsed_s()
        self._sent += 1
        answer = Answer(outcome=Outcome.ABANDONED)  # If we are cancelled, that is what it was.
        try:
            async with asyncio.timeout_at(None if timeout_s is None else began + planned_s + timeout_s):
                answer = await self._target.ask(request, tape)
        except TimeoutError:
            answer = Answer(outcome=Outcome.TIMEOUT, reason=CLIENT_TIMEOUT)
        finally:
            ended_s, counted = self._elapsed_s(), answer.output_tokens
            offered = Offered(
                number=number,
                planned_s=planned_s,
                prompt_tokens=request.prompt_tokens,
                output_tokens=request.output_tokens,
                kind=request.kind,
            )
            said = asdict(answer) | {"output_tokens": len(tape.times) if counted is None else counted}
            times_s = tuple(at - began for at in tape.times)
            self._records.append(
                RequestMeasurement(
                    offered=offered, sent_s=sent_s, ended_s=ended_s, chunk_times_s=times_s, **said
                )
            )

    def _elapsed_s(self) -> float:
        return self._now() - self._began

    # -- telling

    async def _report(self, on_progress: Callable[[RunProgress], None] | None) -> None:
        end_s, total = self._traffic.end_s, len(self._traffic.requests)
        while on_progress is not None:
            elapsed_s, ended = self._elapsed_s(), len(self._records)
            fraction = min(1.0, max(ended / total, elapsed_s / end_s if end_s else 0.0))
            on_progress(RunProgress(elapsed_s, self._sent, ended, fraction))
            await asyncio.sleep(_PROGRESS_S)

    def _record(self, started_at: str, until_s: float | None, cpu_s: float) -> RunRecord:
        """Return the record; the window is until the last request was sent, if nothing else has ended it."""
        traffic, arrivals = self._traffic, self._traffic.arrivals
        records = sorted(self._records, key=lambda one: one.offered.number)
        late_s = [one.lateness_s for one in records]
        if until_s is None:
            until_s = max((one.offered.planned_s for one in records), default=0.0)
            if isinstance(arrivals, Closed):
                # It sends as many at once as it may: when it sent the last says little of the time it took.
                answered_s = (one.ended_s for one in records if one.outcome is not Outcome.ABANDONED)
                until_s = max(answered_s, default=until_s)
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
            requests=tuple(records),
            interrupted=self._stop.is_set(),
        )
