"""The generator in virtual time, against services made for the occasion."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

import pytest
from octavo_lab.command import BenchError
from octavo_lab.load.arrivals import Closed, Even, Phase, Phases, Poisson, Process, Replay
from octavo_lab.load.generator import (
    RunLimits,
    RunProgress,
    Traffic,
    generate,
    requests_needed,
)
from octavo_lab.load.records import Answer, Outcome, RunRecord, TargetRecord
from octavo_lab.load.summary import summarize
from octavo_lab.load.target import PlannedRequest, Sink

from tests.unit.lab.virtual import run_virtual, virtual_loop

PATIENT = RunLimits()
Serve = Callable[[PlannedRequest, Sink], Awaitable[Answer]]


class Service:
    """A target that does what a function says."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self.running = 0
        self.most = 0

    @property
    def record(self) -> TargetRecord:
        return TargetRecord(kind="test", address="here")

    async def ask(self, request: PlannedRequest, sink: Sink) -> Answer:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await self._serve(request, sink)
        finally:
            self.running -= 1

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


async def steady(request: PlannedRequest, sink: Sink) -> Answer:
    """A first token after a second, then one each half second."""
    for number in range(request.output_tokens):
        await asyncio.sleep(0.5 if number else 1.0)
        sink.chunk()
    return Answer(prompt_tokens=7, output_tokens=request.output_tokens, cached_tokens=2, queue_s=0.25)


async def stuck(request: PlannedRequest, sink: Sink) -> Answer:
    await asyncio.sleep(1e6)
    return Answer()


def requests(count: int) -> list[PlannedRequest]:
    return [
        PlannedRequest(prompt="Hello", prompt_tokens=7, output_tokens=3, kind="greeting")
        for _ in range(count)
    ]


def drive(
    serve: Serve, arrivals: Process, count: int, limits: RunLimits = PATIENT, **traffic: Any
) -> RunRecord:
    service = Service(serve)
    plan = Traffic(requests=requests(count), arrivals=arrivals, **traffic)

    async def run() -> RunRecord:
        async with service as target:
            record = await generate(target, plan, limits)
        assert service.running == 0
        return record

    return run_virtual(run())


def test_a_request_is_recorded_as_it_happened() -> None:
    run = drive(steady, Replay((0.0, 2.0)), 2, dataset="greetings", seed=3)
    first, second = run.requests
    assert first.offered.kind == "greeting"
    assert (first.outcome, first.prompt_tokens, first.output_tokens) == (Outcome.OK, 7, 3)
    assert (first.cached_tokens, first.queue_s) == (2, 0.25)
    assert first.chunk_times_s == pytest.approx((1.0, 1.5, 2.0))
    assert second.offered.planned_s == second.sent_s == 2.0
    assert second.ttft_s == pytest.approx(1.0)
    assert second.tpot_s == pytest.approx(0.5)
    assert run.traffic.dataset == "greetings"
    assert run.traffic.offered_rate_per_s == 0.5
    assert run.ended_s == pytest.approx(4.0)
    assert not run.interrupted


def test_open_loop_sends_on_time_however_slow_the_service() -> None:
    run = drive(stuck, Poisson(10.0), 200, RunLimits(drain_s=5.0), seed=1)
    planned = [at for at, _ in zip(Poisson(10.0).times(1), range(200), strict=False)]
    assert [one.sent_s for one in run.requests] == pytest.approx(planned)
    assert run.generator.late_sends == 0
    assert {one.outcome for one in run.requests} == {Outcome.ABANDONED}
    assert run.ended_s == pytest.approx(planned[-1] + 5.0)


def test_late_sends_are_counted_and_their_latency_is_not_flattered() -> None:
    async def hogs(request: PlannedRequest, sink: Sink) -> Answer:
        # The third request keeps the whole process busy, as a generator that cannot keep up would.
        hogs.count += 1  # type: ignore[attr-defined]
        if hogs.count == 3:  # type: ignore[attr-defined]
            virtual_loop().block(0.35)
        sink.chunk()
        return Answer()

    hogs.count = 0  # type: ignore[attr-defined]
    run = drive(hogs, Even(10.0), 10)
    lateness = [round(one.lateness_s, 6) for one in run.requests]
    assert lateness == [0, 0, 0, 0.25, 0.15, 0.05, 0, 0, 0, 0]
    assert run.generator.late_sends == 3
    assert run.generator.max_lateness_s == pytest.approx(0.25)
    # The fourth was served the moment it was sent, and yet its client waited.
    assert run.requests[3].ttft_s == pytest.approx(0.25)


def test_the_window_ends_on_time_and_the_drain_follows() -> None:
    arrivals = Poisson(5.0)
    count = requests_needed(arrivals, 4, 30.0)
    run = drive(steady, arrivals, count, seed=4, warm_up_s=10.0, duration_s=20.0)
    assert len(run.requests) == count
    assert (run.warm_up_s, run.until_s, run.window_s) == (10.0, 30.0, 20.0)
    assert run.ended_s > 30.0
    assert {one.outcome for one in run.requests} == {Outcome.OK}
    assert len(run.measured) == sum(one.offered.planned_s >= 10.0 for one in run.requests) < count
    # Each brings three tokens, five come per second.
    assert summarize(run).output_tokens_per_s == pytest.approx(15.0, rel=0.2)


def test_a_window_longer_than_the_requests_ends_with_the_last() -> None:
    run = drive(steady, Even(1.0), 5, duration_s=100.0)
    assert run.until_s == 5.0


def test_silence_at_the_end_belongs_to_the_window() -> None:
    phases = Phases((Phase(10.0, 2.0), Phase(20.0, 0.0)))
    run = drive(steady, phases, requests_needed(phases, 0, 30.0), duration_s=30.0)
    assert run.until_s == 30.0
    assert run.requests[-1].offered.planned_s < 10.0


def test_closed_loop_keeps_so_many_under_way() -> None:
    service = Service(steady)

    async def run() -> RunRecord:
        return await generate(service, Traffic(requests=requests(20), arrivals=Closed(4)))

    record = run_virtual(run())
    assert service.most == 4
    # Five rounds of two seconds each.
    assert [one.sent_s for one in record.requests] == pytest.approx([2.0 * (n // 4) for n in range(20)])
    assert record.ended_s == pytest.approx(10.0)
    assert (record.traffic.concurrency, record.traffic.offered_rate_per_s) == (4, None)
    assert record.generator.late_sends == 0


def test_closed_loop_ends_with_its_window() -> None:
    record = drive(steady, Closed(4), 1000, warm_up_s=2.0, duration_s=20.0)
    assert record.until_s == 22.0
    assert len(record.requests) == 44
    assert summarize(record).output_tokens_per_s == pytest.approx(6.0, rel=0.15)


def places(count: int, each_s: float) -> Serve:
    """A service with so many places."""
    free = asyncio.Semaphore(count)

    async def serve(request: PlannedRequest, sink: Sink) -> Answer:
        async with free:
            await asyncio.sleep(each_s)
        sink.chunk()
        return Answer(output_tokens=1)

    return serve


@pytest.mark.parametrize("count", [32, 33, 40, 320])
def test_closed_loop_without_a_duration_is_not_faster_than_the_service(count: int) -> None:
    summary = summarize(drive(places(8, 0.1), Closed(32), count))
    assert (summary.requests, summary.outcomes["ok"]) == (count, count)
    assert 60 < summary.requests_per_s < 80.001
    assert summary.goodput_per_s < 80.001
    assert summary.output_tokens_per_s < 80.001


@pytest.mark.parametrize("duration_s", [None, 10.0])
def test_overloaded_open_loop_is_not_faster_than_the_service(duration_s: float | None) -> None:
    run = drive(places(8, 0.1), Even(160.0), 1600, duration_s=duration_s)
    assert all(one.outcome is Outcome.OK for one in run.requests)
    assert summarize(run).requests_per_s == pytest.approx(80.0, rel=0.02)
    assert summarize(run).goodput_per_s == pytest.approx(80.0, rel=0.02)


def test_closed_loop_ends_with_its_window_when_nobody_answers() -> None:
    run = drive(stuck, Closed(4), 1000, RunLimits(drain_s=7.0), duration_s=20.0)
    assert (run.until_s, run.ended_s) == (20.0, pytest.approx(27.0))
    assert [one.outcome for one in run.requests] == [Outcome.ABANDONED] * 4


def test_closed_loop_in_which_one_hangs_is_measured_until_the_last_answer() -> None:
    answers = iter([True] * 10 + [False] + [True] * 9)

    async def serve(request: PlannedRequest, sink: Sink) -> Answer:
        return await (steady if next(answers) else stuck)(request, sink)

    run = drive(serve, Closed(4), 20, RunLimits(drain_s=100.0))
    assert run.until_s == pytest.approx(12.0)
    assert run.ended_s > 100.0


def test_a_request_that_takes_too_long_is_a_timeout_from_its_planned_start() -> None:
    run = drive(steady, Even(1.0), 2, RunLimits(timeout_s=1.7))
    assert [one.outcome for one in run.requests] == [Outcome.TIMEOUT] * 2
    assert [one.reason for one in run.requests] == ["CLIENT_TIMEOUT"] * 2
    assert run.requests[0].output_tokens == 2
    assert run.requests[0].e2e_s == pytest.approx(1.7)


def test_a_stop_keeps_what_there_is() -> None:
    async def run() -> RunRecord:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(5.1, stop.set)
        traffic = Traffic(requests=requests(100), arrivals=Even(1.0), duration_s=100.0)
        return await generate(Service(steady), traffic, stop=stop)

    record = run_virtual(run())
    assert record.interrupted
    assert [one.outcome for one in record.requests] == [Outcome.OK] * 3 + [Outcome.ABANDONED] * 2
    assert record.requests[3].output_tokens == 1
    assert record.until_s == record.ended_s == pytest.approx(5.1)


def test_a_stop_ends_a_drain() -> None:
    async def run() -> RunRecord:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(20.0, stop.set)
        traffic = Traffic(requests=requests(3), arrivals=Even(1.0))
        return await generate(Service(stuck), traffic, RunLimits(drain_s=1e5), stop=stop)

    record = run_virtual(run())
    assert record.interrupted
    assert record.ended_s == pytest.approx(20.0)


def test_cancelling_cancels_every_request() -> None:
    service = Service(stuck)

    async def run() -> None:
        work = asyncio.create_task(generate(service, Traffic(requests=requests(9), arrivals=Closed(3))))
        await asyncio.sleep(1.0)
        assert service.running == 3
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert service.running == 0

    run_virtual(run())


def test_a_fault_of_the_target_itself_ends_the_run_as_it_is() -> None:
    async def breaks(request: PlannedRequest, sink: Sink) -> Answer:
        raise BenchError("a chat takes text or messages")

    with pytest.raises(BenchError, match="a chat takes"):
        drive(breaks, Even(1.0), 3)


def test_nothing_to_send_is_said() -> None:
    with pytest.raises(BenchError, match="nothing to send"):
        drive(steady, Even(1.0), 0)


def test_progress_is_told_and_reaches_the_end() -> None:
    told: list[RunProgress] = []

    async def run() -> None:
        traffic = Traffic(requests=requests(10), arrivals=Even(1.0))
        await generate(Service(steady), traffic, on_progress=told.append)

    run_virtual(run())
    assert told[0].ended == 0
    assert 0.8 < told[-1].fraction <= 1.0
    assert all(one.running == one.sent - one.ended for one in told)
