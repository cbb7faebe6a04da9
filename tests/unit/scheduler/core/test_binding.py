"""Which worker a request meets, and when: late binding and placement."""

from __future__ import annotations

from dataclasses import replace

import pytest
from octavo.protocol.steps import Plan, Report, StallReason
from octavo_lab.sim import SimWorker

from tests.unit.scheduler.core.desk import Desk, worker


def test_request_meets_a_worker_only_when_it_has_room() -> None:
    desk = Desk(worker(max_num_seqs=1), worker("w1", max_num_seqs=1))
    names = [desk.submit(20, max_tokens=20) for _ in range(3)]
    assert [desk.where(name) for name in names] == ["w0", "w1", None]
    desk.answer("w1")
    desk.cancel(names[1])
    desk.answer("w1")
    assert desk.where(names[2]) == "w1"


def test_busy_worker_is_planned_a_lead_before_its_step_ends_and_takes_what_came_meanwhile() -> None:
    desk = Desk()
    desk.submit(100, max_tokens=50)
    for _ in range(20):
        desk.answer()
        while len(desk.plans["w0"]) < 1:
            desk.wake()
    at = desk.core.next_wakeup()
    assert at is not None
    late = desk.submit(20)
    assert desk.where(late) is None
    desk.tick(at)
    assert desk.where(late) == "w0"
    flight = desk.state().pipeline.in_flight[0]
    assert flight.sent_at < at < flight.sent_at + desk.state().predict_flight_s(flight)


def test_no_more_plans_are_outstanding_than_the_window() -> None:
    for window in (1, 2, 3):
        desk = Desk(window=window)
        desk.submit(20, max_tokens=30)
        desk.tick(1.0)
        assert len(desk.plans["w0"]) == window


def test_idle_workers_share_a_burst() -> None:
    desk = Desk(*(worker(f"w{index}") for index in range(4)))
    names = [desk.submit(64, max_tokens=20) for _ in range(4)]
    assert sorted(str(desk.where(name)) for name in names) == ["w0", "w1", "w2", "w3"]


def test_request_too_long_for_a_worker_waits_for_a_larger_one() -> None:
    desk = Desk(worker(max_model_len=64), worker("big", max_num_seqs=1))
    blocker = desk.submit(200, max_tokens=8)
    long = desk.submit(200, max_tokens=8)
    assert [desk.where(blocker), desk.where(long)] == ["big", None]
    short = desk.submit(20)
    assert desk.where(short) == "w0"
    desk.finish()


def test_request_goes_where_its_prefix_is_and_waits_for_that_worker_to_plan() -> None:
    desk = Desk(worker(num_blocks=128), worker("w1", num_blocks=128))
    prefix = list(range(320))
    first = desk.submit(prefix, max_tokens=30)
    while len(desk.tokens.get((first, 0), ())) < 10:
        for worker_id in ("w0", "w1"):
            if desk.plans[worker_id]:
                desk.answer(worker_id)
    home = desk.where(first)
    second = desk.submit([*prefix, 1, 2, 3], max_tokens=4)
    assert desk.where(second) is None, "left for the worker that has the prefix"
    while desk.where(second) is None:
        desk.answer(str(home))
    assert desk.where(second) == home
    desk.finish()
    assert desk.ends[second, 0].cached_tokens == 320


def test_request_left_to_a_busy_worker_that_then_has_no_room_is_taken_by_the_idle_one() -> None:
    desk = Desk(worker(num_blocks=128, max_num_seqs=2), worker("w1", num_blocks=128))
    prefix = list(range(320))
    first = desk.submit(prefix, max_tokens=60)
    while len(desk.tokens.get((first, 0), ())) < 10:
        desk.answer("w0")
    second = desk.submit([*prefix, 7], max_tokens=60)
    third = desk.submit([*prefix, 8], max_tokens=60)
    assert (desk.where(second), desk.where(third)) == (None, None)
    desk.answer("w0")
    while desk.where(second) is None:
        desk.wake()
    assert (desk.where(second), desk.where(third)) == ("w0", "w1")
    desk.finish()


def test_what_was_left_to_a_worker_that_dies_is_taken_by_another() -> None:
    desk = Desk(worker(num_blocks=128), worker("w1", num_blocks=128))
    prefix = list(range(320))
    first = desk.submit(prefix, max_tokens=60)
    while len(desk.tokens.get((first, 0), ())) < 10:
        desk.answer("w0")
    second = desk.submit([*prefix, 7], max_tokens=60)
    assert desk.where(second) is None
    desk.lose("w0")
    assert "w1" in {desk.where(first), desk.where(second)}
    desk.finish()


@pytest.mark.parametrize("places", [1, 8])
def test_those_left_to_a_better_worker_do_not_keep_an_idle_one_from_what_it_could_run(places: int) -> None:
    desk = Desk(worker(num_blocks=128), worker("w1", num_blocks=128, max_num_seqs=places), lookahead=0)
    prefix = list(range(320))
    first = desk.submit(prefix, max_tokens=60)
    while len(desk.tokens.get((first, 0), ())) < 10:
        desk.answer("w0")
    left = [desk.submit([*prefix, 7, count], max_tokens=4) for count in range(3)]
    other = desk.submit(5, max_tokens=4)
    assert [desk.where(name) for name in (*left, other)] == [None, None, None, "w1"]
    desk.finish()


def test_sequence_whose_worker_took_a_sibling_instead_is_not_forgotten() -> None:
    desk = Desk(
        worker(num_blocks=96, max_num_batched_tokens=128),
        worker("w1", num_blocks=80, max_num_seqs=1, max_num_batched_tokens=512),
        worker("w2", num_blocks=70, max_num_seqs=4, max_num_batched_tokens=64),
        window=1,
        lookahead=0,
        chunked_prefill=False,
        prefix_caching=False,
    )
    first = desk.submit(22, max_tokens=4)
    assert desk.where(first) == "w0"
    # The desk checks that no worker sleeps beside work that it could do.
    siblings = desk.submit(306, max_tokens=4, n=3)
    assert "w1" in {desk.where(siblings, choice) for choice in range(3)}
    desk.finish()


class Promoting(SimWorker):
    """Its first steps compute nothing: the blocks of what it runs are on their way from the host."""

    waits = 3

    def run(self, plan: Plan, bubble_us: int = 0) -> Report:
        if not self.waits:
            return super().run(plan, bubble_us)
        self.waits -= 1
        report = super().run(replace(plan, prefill=()), bubble_us)
        return replace(report, stalled=tuple((handle, StallReason.PROMOTING) for handle, _ in plan.prefill))


def test_worker_whose_sequences_all_wait_for_promotion_is_not_sent_steps_in_a_hurry() -> None:
    desk = Desk(worker(), window=1)
    desk.lose()
    desk.attach(Promoting(worker()))
    name = desk.submit(20, max_tokens=4)
    for _ in range(3):
        desk.answer()
        assert not desk.plans["w0"], "it rests"
        at = desk.core.next_wakeup()
        assert at is not None
        assert 0.001 < at - desk.now < 0.005
        desk.wake()
    assert desk.plans["w0"]
    desk.finish()
    assert len(desk.tokens[name, 0]) == 4
