"""Results of cells that nobody ran."""

from __future__ import annotations

import random
from collections.abc import Sequence

from octavo_lab.ladder.cells import CellResult, Sample
from octavo_lab.ladder.plan import LadderCell
from octavo_lab.load.records import (
    GeneratorRecord,
    Offered,
    Outcome,
    RequestMeasurement,
    RunRecord,
    TargetRecord,
    TrafficRecord,
)


def cell(arm: str = "static", rung: str = "middle", repeat: int = 0, rate: float = 10.0) -> LadderCell:
    return LadderCell(arm, rung, repeat, rate, 2.0, 20.0, 5.0, 7)


def request(number: int, at: float, took: float, outcome: Outcome = Outcome.OK) -> RequestMeasurement:
    tokens = (at + took / 2, at + took) if outcome is Outcome.OK else ()
    return RequestMeasurement(
        offered=Offered(number=number, planned_s=at, prompt_tokens=50 + number % 200, output_tokens=2),
        sent_s=at,
        outcome=outcome,
        ended_s=at + took,
        chunk_times_s=tokens,
        prompt_tokens=50 + number % 200,
        output_tokens=len(tokens),
        cached_tokens=0,
        queue_s=took / 4,
        preemptions=0,
        reason="" if outcome is Outcome.OK else outcome.value.upper(),
    )


def result(of: LadderCell, requests: Sequence[RequestMeasurement], written: float = 0.5) -> CellResult:
    run = RunRecord(
        target=TargetRecord(kind="octavo", address="here"),
        traffic=TrafficRecord(
            dataset="made up", arrivals="Poisson", seed=1, offered_rate_per_s=of.rate_per_s
        ),
        started_at="2026-01-01T00:00:00+00:00",
        warm_up_s=of.warm_up_s,
        until_s=of.warm_up_s + of.window_s,
        ended_s=of.warm_up_s + of.window_s + 1,
        generator=GeneratorRecord(late_sends=0, max_lateness_s=0.001, cpu_s=0.5),
        requests=tuple(requests),
    )
    samples = tuple(
        Sample(at / 4, at, 4, 1, written, 0.6, 0.0, 1 - written / 0.6, 0.2, 1 << 28, None, written, 0.6)
        for at in range(int(4 * run.until_s))
    )
    return CellResult(of, run, samples)


def drawn(of: LadderCell, mean_s: float, *, unanswered: int = 0, written: float = 0.5) -> CellResult:
    """Requests at the cell's rate with exponential latencies; the last so many have no answer."""
    rng = random.Random(of.seed + of.repeat)
    count = int(of.rate_per_s * (of.warm_up_s + of.window_s))
    requests = [
        request(
            number,
            number / of.rate_per_s,
            rng.expovariate(1 / mean_s),
            Outcome.ABANDONED if number >= count - unanswered else Outcome.OK,
        )
        for number in range(count)
    ]
    return result(of, requests, written)
