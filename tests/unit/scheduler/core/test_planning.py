"""What goes into a plan: budgets, chunks, look-ahead, preemption."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from octavo.protocol.steps import Refused, RefuseReason, StallReason

from scheduler_svc.core.request import Sequence, SequenceStatus
from scheduler_svc.core.worker import WorkerState
from tests.unit.scheduler.core.desk import HIGH, LOW, NORMAL, Desk, worker

# Budgets -----------------------------------------------------------------------------------------


def test_decodes_come_first_then_prefills_in_chunks_within_the_budget() -> None:
    desk = Desk(worker(max_num_batched_tokens=64), window=1)
    short = desk.submit(20, max_tokens=40)
    desk.answer()
    long = desk.submit(200, max_tokens=4)
    desk.answer()
    assert desk.plans["w0"][0].prefill == ((desk.sequence(long).binding.handle, 63),)
    desk.answer()
    assert desk.plans["w0"][0].prefill == ((desk.sequence(long).binding.handle, 63),)
    assert len(desk.tokens[short, 0]) == 3
    desk.finish()
    assert max(r.timing.num_decodes + r.timing.num_prefill_tokens for r in desk.reports) <= 64


def test_partial_prefills_are_bounded_and_a_prompt_that_fits_whole_still_gets_in() -> None:
    desk = Desk(worker(max_num_batched_tokens=100), window=1, max_partial_prefills=1)
    desk.submit(400, max_tokens=4)
    desk.answer()
    desk.answer()
    second, small = desk.submit(150, max_tokens=4), desk.submit(30, max_tokens=4)
    desk.answer()
    # The first prompt's last 50 tokens leave room for 50: too few for 150, enough for 30.
    assert (desk.where(second), desk.where(small)) in {("w0", None), (None, "w0")}
    desk.finish()


def test_admissions_that_a_plan_cannot_carry_wait_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_svc.core.planning.MAX_ADMIT_BYTES", 1000)
    desk = Desk(worker(max_num_batched_tokens=4096), window=1)
    first = desk.submit(20, max_tokens=40)
    desk.answer()
    # Each has about 800 bytes of tokens and some of keys: the second passes the bound, and still goes.
    long = [desk.submit(200, max_tokens=4) for _ in range(4)]
    admitted = []
    for _ in range(2):
        desk.answer()
        admitted.append(len(desk.plans["w0"][0].admit))
    assert admitted == [2, 2]
    desk.finish()
    assert all(desk.tokens[one, 0] for one in (first, *long))


def test_without_chunking_a_prompt_runs_whole_and_alone_if_the_budget_is_too_small() -> None:
    desk = Desk(worker(max_num_batched_tokens=64), window=1, chunked_prefill=False)
    desk.submit(20, max_tokens=40)
    desk.answer()
    desk.answer()
    long = desk.submit(200, max_tokens=4)
    desk.answer()
    (plan,) = desk.plans["w0"]
    assert plan.prefill == ((desk.sequence(long).binding.handle, 200),)
    assert len(plan.skip) == 1
    report = desk.answer()
    assert (report.timing.num_decodes, report.timing.num_prefill_tokens) == (0, 200)
    desk.finish()


def test_step_with_decodes_in_latency_critical_mode_keeps_near_its_target() -> None:
    target = 0.025
    desk = Desk(worker(max_num_batched_tokens=512, num_blocks=256), target_itl_s=target)
    for _ in range(4):
        desk.submit(16, max_tokens=200)
    for _ in range(60):
        desk.answer()
    desk.submit(480, max_tokens=8)
    seconds = []
    for _ in range(40):
        report = desk.answer()
        if report.timing.num_prefill_tokens and report.timing.num_decodes:
            seconds.append(report.timing.execute_us * 1e-6)
    assert len(seconds) > 5, "the prompt is spread over steps"
    assert sorted(seconds)[len(seconds) // 2] < target * 1.2


def test_decodes_do_not_sit_out_for_a_whole_prompt_that_has_no_blocks() -> None:
    desk = Desk(
        worker(max_num_batched_tokens=64, num_blocks=32), window=1, chunked_prefill=False, watermark=0.0
    )
    first = desk.submit(60, max_tokens=60)
    second = desk.submit(250, max_tokens=4)
    third = desk.submit(260, max_tokens=4)
    while (second, 0) not in desk.ends:
        had = len(desk.tokens.get((first, 0), ()))
        (plan,) = desk.plans["w0"]
        desk.answer()
        if plan.skip:
            assert plan.prefill, "whoever makes others wait runs"
        elif had:
            assert len(desk.tokens[first, 0]) == had + 1
    desk.finish()
    assert (third, 0) in desk.ends


# Blocks ------------------------------------------------------------------------------------------


def test_plans_never_count_on_blocks_that_a_plan_in_flight_may_take() -> None:
    desk = Desk(worker(num_blocks=34, max_num_batched_tokens=512))
    names = [desk.submit(190, max_tokens=4) for _ in range(3)]
    desk.tick(1.0)
    assert [desk.where(name) for name in names] == ["w0", "w0", None]
    desk.finish()
    assert desk.workers["w0"].surprises == {}


def test_admissions_leave_the_watermark_to_those_that_run() -> None:
    desk = Desk(worker(num_blocks=40), watermark=0.2, window=1)
    desk.submit(240, max_tokens=4)
    desk.answer()
    desk.answer()
    second = desk.submit(260, max_tokens=4)
    desk.answer()
    assert desk.where(second) is None, "17 of 24 blocks are more than the watermark of 8 leaves"
    desk.finish()


def test_small_request_passes_one_that_does_not_fit_until_that_one_has_waited_too_long() -> None:
    desk = Desk(worker(num_blocks=32), window=1, lookahead_age_s=0.5, watermark=0.0)
    desk.submit(300, max_tokens=180)
    desk.answer()
    big = desk.submit(300, max_tokens=4)
    passing = desk.submit(20, max_tokens=4)
    desk.answer()
    desk.answer()
    assert (desk.where(big), desk.where(passing)) == (None, "w0")
    while desk.now < 1.0:
        desk.answer()
    late = desk.submit(20, max_tokens=4)
    desk.answer()
    desk.answer()
    assert (desk.where(big), desk.where(late)) == (None, None)
    desk.finish()


def test_look_ahead_is_bounded() -> None:
    desk = Desk(worker(num_blocks=32), window=1, lookahead=2, watermark=0.0)
    desk.submit(300, max_tokens=100)
    desk.answer()
    for _ in range(3):
        desk.submit(300, max_tokens=4)
    small = desk.submit(20, max_tokens=4)
    desk.answer()
    desk.answer()
    assert desk.where(small) is None
    desk.finish()


def test_growth_is_counted_before_a_sequence_takes_its_block() -> None:
    # Exactly as many blocks as both need in the end: a plan that forgot one would stall.
    desk = Desk(worker(num_blocks=20, max_model_len=160), watermark=0.0)
    names = [desk.submit(33, max_tokens=120) for _ in range(2)]
    desk.finish()
    assert desk.workers["w0"].surprises == {}
    assert all(desk.ends[name, 0].timings.preemptions == 0 for name in names)


@pytest.mark.parametrize("window", [1, 2, 3])
def test_growth_of_prefills_that_just_completed_is_counted(window: int) -> None:
    desk = Desk(worker(num_blocks=12, max_model_len=96), watermark=0.0, window=window)
    for length in (15, 16, 31, 32):
        desk.submit(length, max_tokens=16)
    desk.finish()
    assert desk.workers["w0"].surprises == {}


# Preemption --------------------------------------------------------------------------------------


def run_until(desk: Desk, met: Callable[[], bool]) -> None:
    for _ in range(500):
        if met():
            return
        desk.answer()
    pytest.fail("it did not come to that")


def test_growth_without_blocks_preempts_the_last_admitted_which_resumes_and_repeats_nothing() -> None:
    desk = Desk(worker(num_blocks=16, max_model_len=250), watermark=0.0)
    first, second = desk.submit(60, max_tokens=120), desk.submit(60, max_tokens=120)
    run_until(desk, lambda: bool(desk.events("sequence_preempted")))
    (event,) = desk.events("sequence_preempted")
    assert event["request_id"] == second
    assert desk.sequence(first).status is SequenceStatus.RUNNING
    desk.finish()
    assert desk.ends[second, 0].timings.preemptions == 1
    assert [len(desk.tokens[name, 0]) for name in (first, second)] == [120, 120]
    assert desk.workers["w0"].surprises == {}


def test_preempted_sequence_is_admitted_again_only_when_its_release_is_settled() -> None:
    desk = Desk(worker(num_blocks=16, max_model_len=250), worker("w1", max_num_seqs=1), watermark=0.0)
    desk.submit(100, max_tokens=60)  # keeps w1 or w0 busy
    second, third = desk.submit(60, max_tokens=120), desk.submit(60, max_tokens=120)
    for _ in range(400):
        for worker_id in ("w0", "w1"):
            if desk.plans[worker_id]:
                desk.answer(worker_id)
        released = [n for n in (second, third) if (n, 0) not in desk.ends]
        for name in released:
            sequence = desk.sequence(name)
            if sequence.status is SequenceStatus.RELEASING:
                home = desk.where(name)
                assert home is not None
                assert sequence.binding.handle in desk.state(home).sequences
    desk.finish()


def test_victim_is_of_the_lowest_class_then_the_last_admitted() -> None:
    desk = Desk(worker(num_blocks=24, max_model_len=300), watermark=0.0)
    low = desk.submit(60, max_tokens=100, priority=LOW)
    desk.submit(60, max_tokens=100, priority=NORMAL)
    desk.submit(60, max_tokens=100, priority=HIGH)
    run_until(desk, lambda: bool(desk.events("sequence_preempted")))
    assert desk.events("sequence_preempted")[0]["request_id"] == low
    desk.finish()


def test_interactive_request_preempts_one_batch_request_when_all_places_are_taken() -> None:
    desk = Desk(worker(max_num_seqs=2), window=1)
    for _ in range(2):
        desk.submit(20, max_tokens=60, priority=LOW)
    desk.answer()
    urgent = desk.submit(20, max_tokens=4, priority=HIGH)
    desk.answer()
    assert len(desk.events("sequence_preempted")) == 1
    desk.answer()
    assert desk.where(urgent) == "w0"
    assert len(desk.events("sequence_preempted")) == 1
    desk.finish()


@pytest.mark.parametrize("steps", [1, 12])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preemption_says_what_is_computed_again_when_the_cache_keeps_the_rest(
    steps: int, prefix_caching: bool
) -> None:
    desk = Desk(worker(max_num_seqs=1, max_num_batched_tokens=40), window=1, prefix_caching=prefix_caching)
    victim = desk.submit(100, max_tokens=60, priority=LOW)
    for _ in range(steps):
        desk.answer()
    urgent = desk.submit(10, max_tokens=1, priority=HIGH)
    run_until(desk, lambda: bool(desk.events("sequence_preempted")))
    (event,) = desk.events("sequence_preempted")
    known = desk.sequence(victim).num_tokens
    run_until(desk, lambda: (urgent, 0) in desk.ends)
    run_until(desk, lambda: desk.sequence(victim).status is SequenceStatus.RUNNING)
    desk.answer()
    (again,) = desk.reports[-1].admitted
    assert event["tokens_to_recompute"] == known - again.cached_tokens
    assert (again.cached_tokens > 0) == prefix_caching
    desk.finish()


def test_nobody_is_preempted_while_another_worker_has_room() -> None:
    desk = Desk(worker(max_num_seqs=2), worker("w1", max_num_seqs=2))
    for _ in range(3):
        desk.submit(20, max_tokens=60, priority=LOW)
    for worker_id in ("w0", "w1"):
        desk.answer(worker_id)
    desk.submit(20, max_tokens=4, priority=HIGH)
    for _ in range(3):
        for worker_id in ("w0", "w1"):
            desk.answer(worker_id)
    assert desk.events("sequence_preempted") == []
    desk.finish()


@pytest.mark.parametrize("scarce", [{"max_num_seqs": 2}, {"num_blocks": 8}])
def test_nobody_is_preempted_for_room_that_a_cancel_is_about_to_make(scarce: dict[str, int]) -> None:
    desk = Desk(worker(**scarce), window=1)
    names = [desk.submit(40, max_tokens=60, priority=LOW) for _ in range(2)]
    desk.answer()
    report = desk.run()
    desk.cancel(names[1])
    urgent = desk.submit(40, max_tokens=4, priority=HIGH)
    desk.report("w0", report)
    for _ in range(2):
        desk.answer()
    assert desk.where(urgent) == "w0"
    assert desk.events("sequence_preempted") == []
    desk.finish()


def test_decode_grows_into_the_blocks_of_a_cancelled_one() -> None:
    desk = Desk(worker(num_blocks=8), window=1, watermark=0.0)
    names = [desk.submit(40, max_tokens=40) for _ in range(2)]
    third = desk.submit(20, max_tokens=40)
    while desk.state().growth_in(desk.state().pipeline.next_step) <= desk.state().available_blocks():
        desk.answer()
    report = desk.run()
    desk.cancel(third)
    desk.report("w0", report)
    for _ in range(2):
        desk.answer()
    assert desk.events("sequence_preempted") == []
    assert {desk.where(name) for name in names} == {"w0"}
    desk.finish()


def test_sequence_preempted_often_enough_is_protected_from_higher_classes() -> None:
    desk = Desk(worker(max_num_seqs=1), window=1, max_preemptions=2)
    victim = desk.submit(20, max_tokens=60, priority=LOW)
    for _ in range(4):
        desk.submit(20, max_tokens=3, priority=HIGH)
        for _ in range(8):
            if desk.plans["w0"]:
                desk.answer()
    assert desk.sequence(victim).history.preemptions == 2
    desk.finish()


# Refusals and stalls -----------------------------------------------------------------------------


def test_refused_request_keeps_its_place_and_a_worker_that_goes_on_refusing_is_left_alone() -> None:
    desk = Desk(window=1)
    desk.workers["w0"].refuse_next = 10**6
    first, second = desk.submit(20), desk.submit(20)
    answered = 0
    while desk.now < 2.0 or desk.plans["w0"]:
        if desk.plans["w0"]:
            desk.answer()
            answered += 1
        else:
            desk.wake()
    assert answered < 15, "no ping-pong"
    assert desk.sequence(first).history.started_at is None
    desk.workers["w0"].refuse_next = 0
    while desk.where(first) is None:
        desk.wake()
    assert desk.admitted()[0] == first
    desk.finish()
    assert desk.ends[second, 0].completion_tokens == 8


def test_refused_request_goes_to_another_worker_at_once() -> None:
    desk = Desk(worker(), worker("w1"), window=1)
    desk.workers["w0"].refuse_next = 10**6
    name = desk.submit(20)
    desk.answer("w0")
    assert desk.where(name) in {"w0", "w1"}
    for _ in range(3):
        if desk.where(name) == "w0":
            desk.answer("w0")
    assert desk.where(name) == "w1"
    desk.finish()


def test_request_that_the_runner_cannot_serve_fails_with_its_reason() -> None:
    desk = Desk()
    name = desk.submit(20)
    handle = desk.sequence(name).binding.handle
    empty = {"admitted": (), "prefilled": (), "token_handles": [], "first_positions": [], "token_ids": []}
    report = desk.run()
    desk.workers["w0"]._release(handle)
    refusal = (Refused(handle, RefuseReason.UNSUPPORTED, "no grammars here"),)
    changed = {**empty, "refused": refusal, "live_count": 0, "digest": 0}
    desk.report("w0", replace(report, **changed))
    end = desk.ends.get((name, 0))
    assert end is not None
    assert end.error is not None
    assert (end.error.reason.value, end.error.message) == ("UNSUPPORTED", "no grammars here")
    desk.finish()


def test_requests_that_the_runner_cannot_serve_do_not_hold_up_those_that_it_can() -> None:
    desk = Desk(window=1)
    for _ in range(12):
        handle = desk.sequence(desk.submit(20)).binding.handle
        report = desk.run()
        desk.workers["w0"]._release(handle)
        empty = {"admitted": (), "prefilled": (), "token_handles": [], "first_positions": [], "token_ids": []}
        refusal = (Refused(handle, RefuseReason.UNSUPPORTED, "no grammars here"),)
        desk.report("w0", replace(report, **empty, refused=refusal, live_count=0, digest=0))
    assert desk.outcomes == {"UNSUPPORTED": 12}
    good = desk.submit(20)
    assert desk.where(good) == "w0"
    desk.finish()


def test_request_finds_the_idle_worker_beside_one_that_is_left_alone_after_refusals() -> None:
    desk = Desk(worker(max_num_seqs=1), worker("w1", max_num_seqs=1), window=1)
    names = [desk.submit(20, max_tokens=40) for _ in range(2)]
    refused = next(name for name in names if desk.where(name) == "w0")
    other = next(name for name in names if desk.where(name) == "w1")
    desk.workers["w0"].refuse_next = 10**6
    while desk.state("w0").backoff.admits_after < desk.now + 0.5:
        if desk.plans["w0"]:
            desk.answer("w0")
        else:
            desk.wake()
    desk.cancel(refused)
    while (other, 0) not in desk.ends:
        desk.answer("w1")
    # The desk checks that no worker sleeps beside work that it could do.
    assert desk.where(desk.submit(20)) == "w1"
    desk.finish()


def test_draining_worker_takes_nothing_new_and_finishes_what_it_has() -> None:
    desk = Desk(worker(), worker("w1"))
    old = desk.submit(20, max_tokens=30)
    home = str(desk.where(old))
    other = "w1" if home == "w0" else "w0"
    desk.answer(home)
    desk._perform(desk.core.worker_draining(home, desk.now))
    new = desk.submit(20, max_tokens=30)
    assert desk.where(new) == other
    desk.finish()
    assert desk.ends[old, 0].timings.recoveries == 0


def test_request_refused_by_a_worker_that_began_to_drain_moves_on() -> None:
    desk = Desk(worker(), worker("w1"))
    name = desk.submit(20)
    home = str(desk.where(name))
    desk.workers[home].draining = True
    desk.answer(home)
    assert desk.where(name) not in {home, None}
    desk.finish()


def test_stalled_decode_takes_its_block_later_without_harm() -> None:
    desk = Desk()
    name = desk.submit(16, max_tokens=40)
    desk.answer()
    desk.answer()
    handle = desk.sequence(name).binding.handle
    before = desk.state().blocks.growth.copy()
    report = desk.run()
    assert report.token_handles == [handle]
    # As if the worker had found no block for it: nothing advanced.
    row = desk.workers["w0"]._rows[handle]
    row.length -= 1
    row.computed -= 1
    desk.workers["w0"]._digest -= handle
    nothing: dict[str, Any] = {"token_handles": [], "first_positions": [], "token_ids": []}
    stalled = ((handle, StallReason.NO_BLOCK),)
    digest = desk.workers["w0"]._digest
    desk.report("w0", replace(report, **nothing, stalled=stalled, digest=digest))
    assert desk.state().blocks.growth != before
    desk.finish()
    assert len(desk.tokens[name, 0]) == 40


def test_contiguous_memory_is_planned_in_whole_runs() -> None:
    desk = Desk(worker(num_blocks=32, paged=False), prefix_caching=False)
    names = [desk.submit(60, max_tokens=190) for _ in range(3)]
    for _ in range(3):
        desk.answer()
    assert [desk.where(name) for name in names] == ["w0", "w0", None], "16 blocks each, from the start"
    desk.finish()
    assert desk.workers["w0"].surprises == {}


def test_explanation_names_what_each_waiting_request_lacked() -> None:
    desk = Desk(worker(max_num_seqs=1, num_blocks=40), window=1)
    told: list[tuple[str, str, dict[str, object]]] = []

    def explain(sequence: Sequence, state: WorkerState, reason: str, figures: dict[str, object]) -> None:
        told.append((sequence.request_id, reason, figures))

    desk.core.explain_to(explain)
    desk.submit(20, max_tokens=20)
    desk.answer()
    name = desk.submit(20)
    desk.answer()
    assert told[-1] == (name, "max_num_seqs", {"running": 1, "max_num_seqs": 1})
    assert desk.core.queue_position(name, desk.now) == (0, 1)
    assert desk.core.queue_position("r1", desk.now) is None
