"""A request from arrival to its one end, and the table of legal steps between."""

from __future__ import annotations

import itertools

import pytest
from octavo.protocol.steps import FinishReason
from octavo_lab.sim.tokens import stream_of, token_at

from scheduler_svc.core import FinishChoice, Reason, RequestAccepted
from scheduler_svc.core.errors import IllegalTransitionError
from scheduler_svc.core.request import TRANSITIONS, SequenceStatus
from tests.unit.scheduler.core.desk import HIGH, Desk, worker


@pytest.mark.parametrize(("start", "to"), list(itertools.product(SequenceStatus, SequenceStatus)))
def test_transition_not_in_the_table_raises_and_changes_nothing(
    start: SequenceStatus, to: SequenceStatus
) -> None:
    desk = Desk()
    desk.submit()
    sequence = desk.sequence("r1")
    sequence.status = start
    if to in TRANSITIONS[start]:
        sequence.transition(to)
        assert sequence.status is to
    else:
        with pytest.raises(IllegalTransitionError, match=f"r1/0: {start.value} -> {to.value}"):
            sequence.transition(to)
        assert sequence.status is start


def test_request_runs_to_max_tokens_and_its_tokens_come_once_in_order() -> None:
    desk = Desk()
    name = desk.submit(20, max_tokens=40)
    desk.finish()
    assert desk.tokens[name, 0] == [token_at(stream_of(1, 0), position) for position in range(20, 60)]
    end = desk.ends[name, 0]
    assert (end.reason, end.completion_tokens, end.last) == (FinishReason.LENGTH, 40, True)
    assert end.timings.ttft_s is not None
    assert end.timings.ttft_s < end.timings.total_s
    assert desk.outcomes == {"LENGTH": 1}


def test_request_that_meets_a_stop_token_ends_with_it() -> None:
    desk = Desk()
    stop = token_at(stream_of(1, 0), 25)
    name = desk.submit(20, max_tokens=40, stop_token_ids=(stop,))
    desk.finish()
    end = desk.ends[name, 0]
    assert (end.reason, end.stop_token_id, end.completion_tokens) == (FinishReason.STOP, stop, 6)


@pytest.mark.parametrize(
    "answered", [0, 1, 3], ids=["before its plan runs", "in its prefill", "while it decodes"]
)
def test_cancelled_request_ends_at_once_and_its_blocks_are_back_by_the_next_report(answered: int) -> None:
    desk = Desk()
    name = desk.submit(200, max_tokens=50)
    for _ in range(answered):
        desk.answer()
    desk.cancel(name)
    assert desk.ends[name, 0].reason is FinishReason.CANCELLED
    desk.finish()
    assert desk.outcomes == {"CANCELLED": 1}


def test_cancel_that_overtakes_the_plan_that_admits_is_repeated() -> None:
    desk = Desk()
    name = desk.submit(20, max_tokens=50)
    (plan,) = desk.plans["w0"]
    assert plan.admit
    desk.cancel(name)
    # The worker has applied the cancel to nothing, then admits.
    desk.workers["w0"]._cancelled.clear()
    report = desk.answer()
    assert report.live_count == 1
    desk.finish()


def test_cancel_of_an_unknown_or_ended_request_changes_nothing() -> None:
    desk = Desk()
    name = desk.submit()
    desk.finish()
    assert desk.cancel(name) == []
    assert desk.cancel("never") == []
    assert desk.outcomes == {"LENGTH": 1}


def test_duplicate_request_id_is_refused_and_the_first_goes_on() -> None:
    desk = Desk()
    desk.submit(20, request_id="same")
    desk.submit(20, request_id="same")
    assert desk.rejects["same"].error.reason is Reason.DUPLICATE_REQUEST_ID
    desk.finish()
    assert desk.outcomes == {"DUPLICATE_REQUEST_ID": 1, "LENGTH": 1}


def test_queue_beyond_its_bound_is_refused_with_a_retry_delay_and_paced_requests_are_not() -> None:
    desk = Desk(worker(max_num_seqs=1), max_waiting_requests=2)
    for _ in range(3):
        desk.submit(20)
    refused = desk.submit(20)
    paced = desk.submit(20, paced=True)
    error = desk.rejects[refused].error
    assert error.reason is Reason.QUEUE_FULL
    assert error.retry_after_s is not None
    assert paced not in desk.rejects
    desk.finish()
    assert desk.outcomes == {"QUEUE_FULL": 1, "LENGTH": 4}


def test_queue_bounded_in_tokens_takes_one_long_prompt_but_no_second() -> None:
    desk = Desk(worker(max_num_seqs=1), max_waiting_tokens=100)
    desk.submit(20)
    first, second = desk.submit(150), desk.submit(10)
    assert first not in desk.rejects
    assert desk.rejects[second].error.reason is Reason.QUEUE_FULL


def test_prompt_that_no_worker_can_hold_is_refused_at_the_door() -> None:
    desk = Desk(worker(max_model_len=128))
    assert desk.rejects[desk.submit(120, max_tokens=9)].error.reason is Reason.PROMPT_TOO_LONG
    assert desk.submit(120, max_tokens=8) not in desk.rejects


def test_draining_scheduler_refuses_new_requests_and_ends_old_ones() -> None:
    desk = Desk()
    old = desk.submit()
    desk.core.drain(desk.now)
    new = desk.submit()
    assert desk.rejects[new].error.reason is Reason.DRAINING
    desk.finish()
    assert desk.ends[old, 0].reason is FinishReason.LENGTH


def test_expired_in_the_queue_is_refused_promptly_and_never_prefilled() -> None:
    desk = Desk(worker(max_num_seqs=1))
    desk.submit(20, max_tokens=100)
    late = desk.submit(20, queue_deadline=0.05)
    while late not in desk.rejects:
        desk.answer()
    assert desk.rejects[late].error.reason is Reason.QUEUE_TIMEOUT
    assert 0.05 <= desk.now < 0.08
    desk.finish()
    prompts = sum(report.timing.num_prefill_tokens for report in desk.reports)
    assert prompts == 20


def test_request_that_may_not_wait_starts_where_there_is_a_place_in_the_next_plan_or_not_at_all() -> None:
    desk = Desk(worker(max_num_seqs=2))
    at_once = desk.submit(20, max_tokens=40, queue_deadline=0.0)
    assert desk.where(at_once) == "w0", "the worker was idle"
    beside = desk.submit(20, max_tokens=40, queue_deadline=desk.now)
    desk.wake()
    assert desk.where(beside) == "w0", "it was busy and had a place"
    began = desk.now
    refused = desk.submit(20, max_tokens=40, queue_deadline=desk.now)
    while refused not in desk.rejects:
        desk.answer()
    assert desk.rejects[refused].error.reason is Reason.QUEUE_TIMEOUT
    assert desk.now < began + 0.05
    desk.finish()
    assert {at_once, beside} == {name for name, _ in desk.ends}


def test_deadline_that_has_passed_before_its_timer_fires_keeps_a_request_out_of_plans() -> None:
    desk = Desk(worker(max_num_seqs=1), window=1)
    first = desk.submit(20, max_tokens=100)
    desk.answer()
    late = desk.submit(20, ttft_deadline=desk.now + 0.001)
    # Past the deadline, inside the timer's resolution: the place comes free just now.
    desk.now += 0.0011
    desk.cancel(first)
    desk.answer()
    assert all(not plan.admit for plan in desk.plans["w0"])
    desk.wake()
    assert desk.rejects[late].error.reason is Reason.DEADLINE_QUEUED


@pytest.mark.parametrize("fields", [{"ttft_deadline": 0.01}, {"deadline": 0.01}])
def test_deadline_that_passes_before_the_first_token_refuses_as_a_whole(fields: dict[str, float]) -> None:
    desk = Desk()
    name = desk.submit(300, max_tokens=50, **fields)
    desk.answer()
    error = desk.rejects[name].error
    assert error.reason is Reason.TTFT_DEADLINE
    assert error.metadata["phase"] == "prefill"
    desk.finish()


def test_deadline_that_passes_while_tokens_flow_ends_the_choice_with_what_it_has() -> None:
    desk = Desk()
    name = desk.submit(20, max_tokens=200, deadline=0.2)
    desk.finish()
    end = desk.ends[name, 0]
    assert end.reason is FinishReason.DEADLINE
    assert end.error is not None
    assert end.error.reason is Reason.DEADLINE_RUNNING
    assert 0 < end.completion_tokens < 200
    assert desk.outcomes == {"DEADLINE_RUNNING": 1}


def test_queue_deadline_is_over_once_a_request_has_started() -> None:
    desk = Desk()
    name = desk.submit(20, max_tokens=50, queue_deadline=0.01)
    desk.finish()
    assert desk.ends[name, 0].reason is FinishReason.LENGTH


def test_resumed_request_continues_after_its_tokens() -> None:
    desk = Desk()
    before = tuple(token_at(stream_of(1, 0), position) for position in range(20, 30))
    name = desk.submit(20, max_tokens=16, resumed={0: before})
    desk.finish()
    assert desk.tokens[name, 0] == [token_at(stream_of(1, 0), position) for position in range(30, 36)]
    assert desk.ends[name, 0].completion_tokens == 16


def test_siblings_wait_for_their_leader_and_share_its_prompt() -> None:
    desk = Desk()
    name = desk.submit(100, max_tokens=4, n=3)
    assert [desk.sequence(name, choice).status for choice in range(3)] == [
        SequenceStatus.RUNNING,
        SequenceStatus.HELD,
        SequenceStatus.HELD,
    ]
    desk.finish()
    computed = sum(report.timing.num_prefill_tokens for report in desk.reports)
    assert computed == 100 + 2 * 4
    assert [desk.ends[name, choice].cached_tokens for choice in range(3)] == [0, 96, 96]
    assert [desk.ends[name, choice].last for choice in range(3)].count(True) == 1


def test_choices_that_had_ended_before_end_at_once_and_only_the_others_are_computed() -> None:
    desk = Desk()
    had = tuple(token_at(stream_of(1, 2), position) for position in range(100, 110))
    effects = desk.submit_effects(
        100, max_tokens=16, n=4, finished_choices=frozenset({0, 3}), resumed={2: had}
    )
    accepted, *ended = effects[:3]
    assert isinstance(accepted, RequestAccepted)
    assert [
        (end.choice, end.completion_tokens, end.last) for end in ended if isinstance(end, FinishChoice)
    ] == [
        (0, 0, False),
        (3, 0, False),
    ]
    assert [desk.sequence("r1", choice).status.name for choice in (1, 2)] == ["RUNNING", "HELD"]
    desk.finish()
    # The first that goes on computes the prompt, the other shares it and adds what it had.
    computed = sum(report.timing.num_prefill_tokens for report in desk.reports)
    assert computed == 100 + (100 + len(had) - 96)
    assert desk.ends["r1", 1].completion_tokens == 16
    assert len(desk.tokens["r1", 2]) == 16 - len(had)
    assert ("r1", 0) not in desk.tokens
    assert desk.outcomes == {"LENGTH": 1}


def test_request_of_which_all_choices_had_ended_needs_no_worker() -> None:
    desk = Desk()
    desk.lose()
    effects = desk.submit_effects(100, n=2, finished_choices=frozenset({0, 1}))
    assert [end.last for end in effects if isinstance(end, FinishChoice)] == [False, True]
    assert desk.core.snapshot(desk.now).live_requests == 0


def test_resumed_request_that_waits_too_long_ends_in_the_choices_that_were_to_go_on() -> None:
    desk = Desk()
    desk.lose()
    name = desk.submit(100, n=2, finished_choices=frozenset({0}), queue_deadline=1.0)
    desk.tick(2.0)
    error = desk.ends[name, 1].error
    assert error is not None
    assert error.reason == "QUEUE_TIMEOUT"


def test_siblings_fit_beside_their_leader_where_their_prompts_would_not() -> None:
    # 320 tokens take 21 blocks; three of them do not fit into 40, but they share 20.
    desk = Desk(worker(num_blocks=40, max_num_batched_tokens=512))
    name = desk.submit(320, max_tokens=30, n=3)
    for _ in range(4):
        desk.answer()
    assert [desk.where(name, choice) for choice in range(3)] == ["w0", "w0", "w0"]
    desk.finish()


def test_siblings_go_ahead_of_later_requests_of_their_class() -> None:
    desk = Desk(worker(max_num_seqs=2))
    name = desk.submit(32, max_tokens=4, n=2)
    others = [desk.submit(32, max_tokens=4) for _ in range(3)]
    desk.answer()
    desk.answer()
    started = {
        other: desk.sequence(other).history.started_at for other in others if other not in dict(desk.ends)
    }
    assert desk.sequence(name, 1).history.started_at is not None
    assert None in started.values()
    desk.finish()


def test_siblings_are_let_go_when_their_leader_is_stopped_before_its_first_token() -> None:
    desk = Desk()
    name = desk.submit(300, max_tokens=4, n=2)
    desk._perform(desk.core.stop_choice(name, 0, desk.now))
    desk.finish()
    assert desk.ends[name, 0].reason is FinishReason.STOP
    assert desk.ends[name, 1].reason is FinishReason.LENGTH


def test_stopped_choice_ends_and_its_siblings_go_on() -> None:
    desk = Desk()
    name = desk.submit(20, max_tokens=20, n=2)
    for _ in range(5):
        desk.answer()
    desk._perform(desk.core.stop_choice(name, 1, desk.now))
    assert desk.ends[name, 1].reason is FinishReason.STOP
    assert not desk.ends[name, 1].last
    assert desk._perform(desk.core.stop_choice(name, 1, desk.now)) == []
    desk.finish()
    assert desk.ends[name, 0].completion_tokens == 20


def test_accounts_close_over_every_kind_of_end() -> None:
    desk = Desk(worker(max_num_seqs=2), max_waiting_requests=2)
    names = [desk.submit(20, max_tokens=30, priority=HIGH) for _ in range(5)]
    desk.answer()
    desk.cancel(names[0])
    desk.finish()
    snapshot = desk.core.snapshot(desk.now)
    assert snapshot.arrivals == 5 == sum(snapshot.outcomes.values())
    assert snapshot.live_requests == 0


@pytest.mark.parametrize("lull_s", [1.0, 200.0, 400.0, 3600.0, 1e6])
def test_request_after_a_lull_is_told_a_wait_that_can_be_or_none(lull_s: float) -> None:
    desk = Desk()
    desk.submit()
    desk.finish()
    desk.tick(desk.now + lull_s)

    (accepted,) = [effect for effect in desk.submit_effects() if isinstance(effect, RequestAccepted)]

    assert accepted.estimated_wait_s is None or accepted.estimated_wait_s <= 3600.0
