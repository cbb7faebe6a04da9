"""When a trial of the tuner is over, in virtual time."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from octavo_lab.load.arrivals import Even
from octavo_lab.load.generator import RunLimits, Traffic, generate
from octavo_lab.load.records import Answer, Outcome, RunRecord, TargetRecord
from octavo_lab.load.target import PlannedRequest, Sink
from octavo_lab.tune.served import Judge
from octavo_lab.tune.target import LatencyTarget

from tests.unit.lab.virtual import run_virtual

TARGET = LatencyTarget(percentile=90, ttft_s=2.0, tpot_s=0.5)


class Service:
    """Answers the request with each number after so long, with so long between its tokens."""

    def __init__(self, first_s: list[float], gap_s: float = 0.1, outcome: Outcome = Outcome.OK) -> None:
        self._first_s = iter(first_s)
        self._gap_s = gap_s
        self._outcome = outcome

    @property
    def record(self) -> TargetRecord:
        return TargetRecord(kind="test", address="here")

    async def ask(self, request: PlannedRequest, sink: Sink) -> Answer:
        await asyncio.sleep(next(self._first_s))
        sink.chunk()
        await asyncio.sleep(self._gap_s)
        sink.chunk()
        return Answer(outcome=self._outcome, output_tokens=2)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


def judge(service: Service, count: int = 50) -> tuple[RunRecord, bool]:
    requests = [PlannedRequest(prompt="Hello", prompt_tokens=1, output_tokens=2) for _ in range(count)]

    async def run() -> tuple[RunRecord, bool]:
        stop = asyncio.Event()
        target = Judge(service, TARGET, TARGET.allowed_misses(count), stop)
        record = await generate(
            target, Traffic(requests=requests, arrivals=Even(1.0)), RunLimits(), stop=stop
        )
        return record, stop.is_set()

    return run_virtual(run())


def test_trial_within_the_target_runs_to_its_end() -> None:
    run, stopped = judge(Service([1.0] * 50))
    assert not stopped
    assert len(run.requests) == 50


def test_trial_with_as_many_misses_as_allowed_runs_to_its_end() -> None:
    _, stopped = judge(Service([1.0] * 45 + [3.0] * 5))
    assert not stopped


def test_trial_is_over_as_soon_as_one_first_token_too_many_is_late() -> None:
    run, stopped = judge(Service([1e5] * 50))
    assert stopped
    # The sixth is sent in the sixth second and late two later: not one of them had to end for that.
    assert run.ended_s < 10
    assert {one.outcome for one in run.requests} == {Outcome.ABANDONED}


def test_slow_tokens_count_once_and_late_ones_not_again() -> None:
    run, stopped = judge(Service([3.0] * 50, gap_s=1.0))
    assert stopped
    assert run.ended_s < 12


def test_failures_count_as_misses() -> None:
    _, stopped = judge(Service([0.1] * 50, outcome=Outcome.REFUSED))
    assert stopped
