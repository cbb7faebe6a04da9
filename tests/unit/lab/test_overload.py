"""The overload bench in virtual time, against services that keep or lose their head."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from octavo_lab.command import BenchError
from octavo_lab.load.arrivals import Phase, Phases
from octavo_lab.load.records import Answer, Outcome, RequestMeasurement
from octavo_lab.load.target import PlannedRequest, Sink
from octavo_lab.overload.command import as_text, plot
from octavo_lab.overload.drive import Calibration, Look, Mix, Timeline, at_load, calibrate, seats_of, through

from tests.unit.lab.runs import request, run
from tests.unit.lab.test_generator import Serve, Service
from tests.unit.lab.virtual import run_virtual

MIX = Mix(prompt_tokens=(5, 5), output_tokens=(10, 10))
SEATS = 4
TOKEN_S = 0.1
"""Each of the seats gives a token so often: four requests per second in all."""


def service(patience: int | None) -> Serve:
    """Seats, and a queue that holds so many; None is without bound."""
    seats = asyncio.Semaphore(SEATS)
    waiting = 0

    async def serve(request: PlannedRequest, sink: Sink) -> Answer:
        nonlocal waiting
        if patience is not None and waiting >= patience:
            return Answer(outcome=Outcome.REFUSED, reason="QUEUE_FULL", output_tokens=0)
        waiting += 1
        try:
            await seats.acquire()
        finally:
            waiting -= 1
        try:
            for _ in range(request.output_tokens):
                await asyncio.sleep(TOKEN_S)
                sink.chunk()
        finally:
            seats.release()
        return Answer(output_tokens=request.output_tokens)

    return serve


def test_calibration_finds_the_capacity_and_the_times_of_an_unloaded_service() -> None:
    async def run() -> Calibration:
        return await calibrate(Service(service(None)), MIX, 2 * SEATS, 20.0)

    measured = run_virtual(run())
    assert measured.capacity_per_s == pytest.approx(SEATS / (10 * TOKEN_S), rel=0.06)
    assert measured.unloaded_tpot_s == pytest.approx(TOKEN_S)
    assert measured.unloaded_ttft_s == pytest.approx(TOKEN_S)
    assert (measured.slo.ttft_s, measured.slo.tpot_s) == (1.5, pytest.approx(4 * TOKEN_S))


def test_service_that_answers_nothing_is_no_service_to_overload() -> None:
    async def refuse(request: PlannedRequest, sink: Sink) -> Answer:
        await asyncio.sleep(0.1)
        return Answer(outcome=Outcome.ERROR, reason="NO_WORKER")

    async def run() -> None:
        await calibrate(Service(refuse), MIX, 8, 10.0)

    with pytest.raises(BenchError, match="NO_WORKER"):
        run_virtual(run())


def test_requests_are_drawn_within_their_ranges_and_the_same_for_the_same_seed() -> None:
    mix = Mix(options={"priority": "batch"})
    drawn = mix.requests(200, seed=3)
    assert drawn == mix.requests(200, seed=3) != mix.requests(200, seed=4)
    assert {len(one.prompt) for one in drawn} <= set(range(64, 193))
    assert {one.output_tokens for one in drawn} <= set(range(32, 97))
    assert all(one.options == {"priority": "batch"} for one in drawn)


def overloaded(patience: int | None) -> Timeline:
    plan = Phases((Phase(60, 1.0), Phase(30, 8.0), Phase(60, 1.0)))

    async def run() -> Timeline:
        target = Service(service(patience))
        record = await through(target, MIX, plan)
        looks = [Look(at / 2, 3 if 60 <= at / 2 < 94 else 0, 0, 0) for at in range(300)]
        return Timeline(record, looks, Calibration(4.0, TOKEN_S, TOKEN_S), 60.0, 90.0, 5.0)

    return run_virtual(run())


def test_timeline_tells_a_service_that_refuses_from_one_that_lets_everybody_wait() -> None:
    bounded, unbounded = overloaded(3), overloaded(None)
    assert bounded.level_zero_s == pytest.approx(3.5)
    assert bounded.latency_quantile == 0.9
    assert bounded.latency_back_s is not None
    assert bounded.latency_back_s < 5
    assert bounded.recovery_s is not None
    assert bounded.recovery_s < 5
    assert unbounded.latency_back_s is None or unbounded.latency_back_s > 20
    during = bounded.phase(60, 90)
    assert during["goodput_per_s"] > 3.0
    assert during["outcomes"]["QUEUE_FULL"] > 50
    assert during["highest_level"] == 3
    assert unbounded.phase(70, 90)["goodput_per_s"] < 0.5


def test_timeline_is_told_as_text_record_and_picture(tmp_path: Path) -> None:
    timeline = overloaded(3)
    text = as_text(timeline)
    for part in ("capacity 4.00 requests/s", "baseline", "QUEUE_FULL", "level 0 again 3.5 s after"):
        assert part in text
    record = json.loads(json.dumps(timeline.as_record(), allow_nan=False))
    assert record["overload"]["offered_per_s"] == pytest.approx(8.0, rel=0.2)
    plot(timeline, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_timeline_tells_nothing_from_too_few_requests() -> None:
    def at(planned_s: float, ttft_s: float) -> RequestMeasurement:
        return request(round(planned_s), planned_s, chunk_times_s=(planned_s + ttft_s,), output_tokens=1)

    calm = [at(number / 5, 0.1 + number / 1000) for number in range(60)]
    late = [at(30 + number, 5.0) for number in range(8)]
    back = [at(38 + number, 0.1) for number in range(12)]
    looks = [Look(0.0, 0, 0, 0)]
    few = Timeline(
        run(*calm[:7], *late, *back, until_s=50.0), looks, Calibration(4.0, 0.1, 0.1), 20.0, 30.0, 0.0
    )
    record = json.loads(json.dumps(few.as_record(), allow_nan=False))
    assert record["baseline"]["ttft_p50_s"] is record["baseline"]["ttft_p99_s"] is None
    assert record["overload"]["ttft_p50_s"] is None
    assert record["latency_back_s"] is record["recovery_s"] is record["latency_quantile"] is None
    assert "nan" not in as_text(few).lower()
    assert "wants 10 answered requests" in as_text(few)
    for count, quantile, back_s in ((15, 0.5, 2.5), (60, 0.9, 6.5)):
        some = replace(few, run=run(*calm[:count], *late, *back, until_s=50.0))
        assert some.latency_quantile == quantile
        assert some.phase(0, 20)["ttft_p99_s"] is None
        assert some.latency_back_s is not None
        assert some.latency_back_s == back_s
        assert f"baseline's P{100 * quantile:g} after" in as_text(some)
    never = replace(few, run=run(*calm, *(at(30 + n, 5.0) for n in range(20)), until_s=50.0))
    assert never.latency_back_s is None
    assert "not before the end" in as_text(never)


def test_seats_are_asked_of_those_who_may_not_see_them() -> None:
    with pytest.raises(BenchError, match="see the status"):
        seats_of({"max_model_len": 512, "options": {}})
    assert seats_of({"max_num_seqs": 16, "workers": 2}) == 32


def test_load_is_offered_at_the_rate_that_was_asked_for() -> None:
    async def run() -> int:
        record = await at_load(Service(service(None)), MIX, 3.0, 80.0)
        assert record.warm_up_s == 10.0
        return len(record.measured)

    assert run_virtual(run()) == pytest.approx(240, rel=0.2)
