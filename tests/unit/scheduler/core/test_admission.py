"""Who may come in: classes, bounds, deadlines that cannot be met; in the core, on a virtual clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from octavo.protocol.steps import FinishReason, Priority
from octavo_lab.sim import SimWorker
from octavo_lab.sim.tokens import stream_of, token_at

from scheduler_svc.core import Reason
from scheduler_svc.core.events import AdmissionRequest
from scheduler_svc.core.overload import Controller, Level, OverloadConfig
from tests.unit.scheduler.core.desk import HIGH, LOW, NORMAL, Desk, worker

QUIET = OverloadConfig(rise_s=1e9)
"""A ladder that never moves by itself."""


def desk_at(level: Level, **config: Any) -> Desk:
    desk = Desk(worker(max_num_seqs=1), overload=QUIET, **config)
    desk.submit(20, max_tokens=300)
    controller(desk).level = level
    return desk


def controller(desk: Desk) -> Controller:
    admission = desk.core._models["sim"].admission
    assert admission.controller is not None
    return admission.controller


def reason_of(desk: Desk, name: str) -> Reason | None:
    return desk.rejects[name].error.reason if name in desk.rejects else None


@pytest.mark.parametrize(
    ("level", "refused"),
    [
        (Level.NORMAL, set()),
        (Level.TRIM, set()),
        (Level.SHED_BATCH, {"batch", "long and may be shed"}),
        (Level.SHED_STANDARD, {"batch", "long and may be shed", "long", "standard"}),
    ],
)
def test_level_refuses_by_class_and_says_so(level: Level, refused: set[str]) -> None:
    desk = desk_at(level)
    shed_over = OverloadConfig().shed_prompt_tokens
    asks = {
        "interactive": AdmissionRequest(priority=HIGH),
        "standard": AdmissionRequest(priority=NORMAL),
        "batch": AdmissionRequest(priority=LOW),
        "long": AdmissionRequest(priority=NORMAL, prompt_tokens=shed_over + 1),
        "long and may be shed": AdmissionRequest(priority=NORMAL, prompt_tokens=shed_over + 1, may_shed=True),
        "short and may be shed": AdmissionRequest(priority=HIGH, prompt_tokens=shed_over, may_shed=True),
        "paced": AdmissionRequest(priority=LOW, paced=True),
    }
    errors = {name: desk.core.refusal_for_load("sim", ask, desk.now) for name, ask in asks.items()}
    assert {name for name, error in errors.items() if error is not None} == refused
    for error in errors.values():
        if error is not None:
            assert error.reason is Reason.SHED
            assert error.retry_after_s is not None
            assert error.metadata["level"] == str(int(level))


def test_open_breaker_refuses_everything_but_its_probes() -> None:
    desk = desk_at(Level.NORMAL)
    ladder = controller(desk)
    ladder._move(Level.OPEN, "test", desk.now)
    refused = desk.submit(20, priority=HIGH)
    assert reason_of(desk, refused) is Reason.BREAKER_OPEN
    ladder.breaker.half_open = True
    probes = [desk.submit(20, priority=HIGH) for _ in range(4)]
    assert [reason_of(desk, name) for name in probes] == [None, None, None, Reason.BREAKER_OPEN]
    desk.finish()
    assert ladder.breaker.satisfied


def test_probe_that_misses_its_deadline_opens_the_breaker_again_and_is_logged() -> None:
    desk = desk_at(Level.OPEN)
    ladder = controller(desk)
    ladder.breaker.half_open = True
    probe = desk.submit(20, ttft_deadline=desk.now + 0.01)
    assert probe not in desk.rejects
    desk.tick(desk.now + 0.1)
    assert reason_of(desk, probe) is Reason.DEADLINE_QUEUED
    assert not ladder.breaker.half_open
    assert desk.events("breaker_probe_failed")


def test_full_queue_gives_the_place_of_the_last_of_the_lowest_class_to_a_higher_one() -> None:
    desk = Desk(worker(max_num_seqs=1), max_waiting_requests=3)
    desk.submit(20, max_tokens=300)
    normal, first, last = desk.submit(priority=NORMAL), desk.submit(priority=LOW), desk.submit(priority=LOW)
    high = desk.submit(priority=HIGH)
    assert reason_of(desk, last) is Reason.SHED
    assert {high, normal, first}.isdisjoint(desk.rejects)
    another = desk.submit(priority=NORMAL)
    assert reason_of(desk, first) is Reason.SHED
    assert another not in desk.rejects
    assert reason_of(desk, desk.submit(priority=NORMAL)) is Reason.QUEUE_FULL
    desk.finish()
    assert desk.outcomes == {"SHED": 2, "QUEUE_FULL": 1, "LENGTH": 4}


def test_burst_on_its_way_to_idle_workers_is_bounded_by_the_queue_and_their_places() -> None:
    desk = Desk(worker(max_num_seqs=8), max_waiting_requests=3)
    errors = [
        desk.core.refusal_for_load("sim", AdmissionRequest(pending_requests=pending), desk.now)
        for pending in (0, 10, 11)
    ]
    assert errors[:2] == [None, None]
    assert errors[2] is not None
    assert errors[2].reason is Reason.QUEUE_FULL


def test_what_is_paced_neither_fills_the_queue_nor_has_to_leave_it() -> None:
    desk = Desk(worker(max_num_seqs=1), max_waiting_requests=1)
    desk.submit(20, max_tokens=300)
    paced = [desk.submit(priority=LOW, paced=True) for _ in range(5)]
    one = desk.submit(priority=LOW)
    assert one not in desk.rejects
    assert reason_of(desk, desk.submit(priority=LOW)) is Reason.QUEUE_FULL
    high = desk.submit(priority=HIGH)
    assert reason_of(desk, one) is Reason.SHED
    assert set(paced).isdisjoint(desk.rejects)
    assert high not in desk.rejects


def trained(**config: Any) -> Desk:
    """A service that has seen requests end and knows its step times."""
    desk = Desk(worker(max_num_seqs=2), overload=QUIET, **config)
    for _ in range(6):
        desk.submit(30, max_tokens=20)
    desk.finish()
    return desk


def test_request_that_would_miss_its_deadline_is_refused_at_once_and_says_when_to_come_back() -> None:
    desk = trained()
    for _ in range(12):
        desk.submit(30, max_tokens=20)
    expected = desk.core._models["sim"].admission.predict(AdmissionRequest(todo_tokens=30), desk.now)
    assert expected is not None
    steps = len(desk.reports)
    for field, seconds in (("queue_deadline", expected.wait_s), ("ttft_deadline", expected.ttft_s)):
        late = desk.submit(30, **{field: desk.now + 0.6 * seconds})
        error = desk.rejects[late].error
        assert error.reason is Reason.DEADLINE_INFEASIBLE
        assert error.retry_after_s == pytest.approx(0.4 * seconds, rel=0.6)
        fine = desk.submit(30, **{field: desk.now + 1.6 * seconds})
        assert fine not in desk.rejects
    assert len(desk.reports) == steps
    desk.finish()
    assert desk.outcomes == {"LENGTH": 20, "DEADLINE_INFEASIBLE": 2}


def test_questions_change_nothing_that_newcomers_are_told() -> None:
    told = []
    for asks in (False, True):
        desk = Desk(*(worker(f"w{number}") for number in range(6)), overload=QUIET)
        for number in range(12):
            desk.submit(10 + number, max_tokens=12)
        desk.finish()
        for _ in range(6):
            desk.submit(100, max_tokens=40)
        desk.tick(desk.now + 5.0)
        if asks:
            desk.core.refusal_for_load("sim", AdmissionRequest(deadline=desk.now + 1.0), desk.now)
            desk.core.snapshot(desk.now)
        desk.answer("w0")
        told.append(desk.submit_effects(30)[0])
    assert told[0] == told[1]


def test_deadline_for_the_whole_output_counts_only_what_is_certain_to_be_generated() -> None:
    desk = trained()
    desk.submit(30, max_tokens=100)
    desk.answer()
    step_s = desk.core._models["sim"].admission.forecast.token_s(desk.now)
    ask = AdmissionRequest(todo_tokens=30, deadline=desk.now + 50 * step_s)
    assert desk.core.refusal_for_load("sim", ask, desk.now) is None
    certain = AdmissionRequest(todo_tokens=30, deadline=desk.now + 50 * step_s, output_tokens=60)
    error = desk.core.refusal_for_load("sim", certain, desk.now)
    assert error is not None
    assert error.reason is Reason.DEADLINE_INFEASIBLE


def test_idle_service_tries_what_it_does_not_believe_in() -> None:
    desk = trained()
    name = desk.submit(300, ttft_deadline=desk.now + 0.001)
    assert name not in desk.rejects


def test_prediction_of_a_waiting_request_comes_true() -> None:
    desk = trained()
    names = [desk.submit(30, max_tokens=20) for _ in range(16)]
    expected = {name: desk.core.find(name).prediction for name in names}  # type: ignore[union-attr]
    arrived = desk.now
    desk.finish()
    for name in names[4:]:
        promise = expected[name]
        assert promise is not None
        waited = desk.ends[name, 0].timings.queue_s
        assert promise.wait_s == pytest.approx(waited, rel=0.35, abs=0.03), (name, arrived)


def test_lower_classes_do_not_lengthen_the_predicted_wait_of_higher_ones() -> None:
    desk = trained()
    for _ in range(20):
        desk.submit(30, max_tokens=20, priority=LOW)
    admission = desk.core._models["sim"].admission
    waits = [admission.predict(AdmissionRequest(priority=priority), desk.now) for priority in Priority]
    high, normal, low = (wait.wait_s for wait in waits if wait is not None)
    assert high == normal
    assert low > 5 * high


def test_fair_queue_predicts_a_short_wait_for_a_tenant_without_backlog() -> None:
    desk = trained(policy="fair")
    for _ in range(20):
        desk.submit(30, max_tokens=20, tenant="flood")
    admission = desk.core._models["sim"].admission
    flood = admission.predict(AdmissionRequest(tenant="flood"), desk.now)
    other = admission.predict(AdmissionRequest(tenant="other"), desk.now)
    assert flood is not None
    assert other is not None
    assert flood.wait_s > 5 * other.wait_s


def test_cancelled_while_queued_costs_nothing_and_gives_the_place_back() -> None:
    desk = trained(max_waiting_requests=20)
    running = [desk.submit(30, max_tokens=20) for _ in range(2)]
    desk.answer()
    waiting = [desk.submit(30, max_tokens=20) for _ in range(20)]
    assert reason_of(desk, desk.submit(30)) is Reason.QUEUE_FULL
    for name in waiting[::2]:
        desk.cancel(name)
    again = [desk.submit(30, max_tokens=20) for _ in range(10)]
    assert not {*waiting, *again} & desk.rejects.keys()
    desk.finish()
    for name in (*running, *waiting[1::2], *again):
        assert desk.ends[name, 0].reason is FinishReason.LENGTH
    for name in waiting[::2]:
        assert (name, 0) not in desk.tokens
        assert desk.ends[name, 0].reason is FinishReason.CANCELLED


def test_prompt_that_would_come_too_late_is_not_begun_and_the_next_takes_its_place() -> None:
    desk = trained(max_num_batched_tokens=128)
    desk.submit(20, max_tokens=300)
    desk.answer()
    # The queue has room, and the promise was fair when it was made.
    hopeless = desk.submit(400, ttft_deadline=desk.now + 10.0)
    fine = desk.submit(20)
    assert hopeless not in desk.rejects
    request = desk.sequence(hopeless).request
    request.spec = replace(request.spec, ttft_deadline=desk.now + 0.02)
    for _ in range(6):
        desk.answer()
    assert (fine, 0) in desk.tokens
    assert not request.started


def test_timeout_of_nothing_starts_at_once_or_not_at_all() -> None:
    desk = Desk(worker(max_num_seqs=1), overload=QUIET)
    first = desk.submit(20, max_tokens=50, queue_deadline=desk.now)
    assert desk.where(first) == "w0"
    second = desk.submit(20, queue_deadline=desk.now)
    desk.answer()
    assert reason_of(desk, second) is Reason.QUEUE_TIMEOUT
    desk.finish()
    assert desk.ends[first, 0].reason is FinishReason.LENGTH


def test_wait_of_a_class_that_nobody_asks_for_turns_nobody_away() -> None:
    desk = trained()
    for _ in range(20):
        desk.submit(30, max_tokens=300)
    desk.tick(desk.now + 0.2)
    assert controller(desk).pressure.wait[0] == 0.0
    desk.submit(30, max_tokens=300, priority=HIGH)
    desk.tick(desk.now + 0.2)
    assert controller(desk).pressure.wait[0] > 0.0


def test_step_that_takes_as_long_as_expected_is_no_stall() -> None:
    desk = trained()
    desk.submit(30, max_tokens=300)
    due = desk.core._workers["w0"].ends_at()
    desk.tick(due)
    assert controller(desk).pressure.stalled_s == pytest.approx(0.0, abs=0.001)
    desk.tick(due + 5.0)
    assert controller(desk).pressure.stalled_s == pytest.approx(5.0, abs=0.1)


def test_first_steps_of_a_service_are_left_to_the_watchdog() -> None:
    desk = Desk(worker(max_num_seqs=2), overload=QUIET)
    desk.submit(30, max_tokens=300)
    desk.tick(desk.now + 9.0)
    assert controller(desk).pressure.stalled_s == 0.0


def test_hang_of_one_worker_is_no_stall_while_another_could_take_more() -> None:
    desk = trained()
    desk.submit(30, max_tokens=300)
    due = desk.core._workers["w0"].ends_at()
    other = SimWorker(worker("w1", max_num_seqs=2))
    desk.attach(other)
    desk.tick(due + 12.0)
    assert controller(desk).pressure.stalled_s == 0.0, "one is idle"
    desk.submit(30, max_tokens=300)
    assert desk.plans["w1"]
    desk.tick(desk.now + 12.0)
    assert controller(desk).pressure.stalled_s == 0.0, "the first steps of a new process take long"
    for _ in range(8):
        desk.answer("w1")
    due = desk.core._workers["w1"].ends_at()
    desk.tick(due + 5.0)
    assert controller(desk).pressure.stalled_s == pytest.approx(5.0, abs=0.1)


@pytest.mark.parametrize("drains", [False, True])
def test_absence_of_all_workers_does_not_lengthen_the_wait_predicted_after_it(drains: bool) -> None:
    desk = trained()
    for _ in range(12):
        desk.submit(30, max_tokens=20)
    while len(desk.core._models["sim"].pool.queue) > 6:
        desk.answer()
    admission = desk.core._models["sim"].admission
    before = admission.predict(AdmissionRequest(), desk.now)
    if drains:
        desk._perform(desk.core.worker_draining("w0", desk.now))
        while desk.plans["w0"]:
            desk.answer()
    desk.tick(desk.now + 40.0)
    desk.lose()
    assert admission.predict(AdmissionRequest(), desk.now) is None, "nobody knows when one comes back"
    desk.tick(desk.now + 40.0)
    desk.attach(SimWorker(worker(max_num_seqs=2)))
    after = admission.predict(AdmissionRequest(), desk.now)
    assert before is not None
    assert after is not None
    assert after.wait_s < 2 * before.wait_s


def test_request_that_only_a_worker_that_is_away_can_hold_turns_nobody_else_away() -> None:
    desk = Desk(worker(), overload=OverloadConfig(), max_waiting_requests=4)
    stranded = [desk.submit(20, adapter="a") for _ in range(4)]
    desk.cancel(stranded.pop())
    for _ in range(600):
        desk.tick(desk.now + 0.1)
        assert controller(desk).level is Level.NORMAL
    base = desk.submit(20, deadline=desk.now + 1.0)
    assert desk.where(base) == "w0"
    while (base, 0) not in desk.ends:
        desk.answer()
    desk.attach(SimWorker(worker("w1")), adapters=("a",))
    assert {desk.where(name) for name in stranded} == {"w1"}
    desk.finish()


def test_requests_that_wait_for_a_worker_that_is_away_do_not_lengthen_the_predicted_wait() -> None:
    desk = trained(policy="fair")
    for _ in range(20):
        desk.submit(30, adapter="a", tenant="a", priority=HIGH)
        desk.submit(30, adapter="a", tenant="a")
    for _ in range(20):
        desk.submit(30, max_tokens=20)
        while desk.plans["w0"]:
            desk.answer()
        desk.tick(desk.now + 60.0)
    admission = desk.core._models["sim"].admission
    for _ in range(2):
        desk.submit(30, max_tokens=20)
    expected = admission.predict(AdmissionRequest(), desk.now)
    assert expected is not None
    assert expected.wait_s < 1.0, "an idle minute says nothing of how fast places come free"


def test_backlog_counts_while_no_worker_is_there_at_all() -> None:
    desk = Desk(worker(), overload=QUIET, max_waiting_requests=4)
    desk.lose()
    for _ in range(4):
        desk.submit(20, adapter="a")
    desk.tick(desk.now + 20.0)
    assert controller(desk).pressure.backlog[2] == 1.0
    assert controller(desk).pressure.stalled_s == 0.0, "nobody is late who is not there"


def test_run_before_a_preemption_is_no_error_of_the_predicted_wait() -> None:
    desk = trained()
    names = [desk.submit(20, max_tokens=200, priority=LOW) for _ in range(2)]
    for _ in range(40):
        desk.answer()
    forecast = desk.core._models["sim"].admission.forecast
    error_s = forecast._wait_error_s.value
    assert error_s is not None
    desk.submit(20, max_tokens=2, priority=HIGH)
    while sum(desk.sequence(name).history.preemptions for name in names) == 0:
        desk.answer()
    for _ in range(12):
        desk.answer()
    assert {desk.where(name) for name in names} == {"w0"}
    after_s = forecast._wait_error_s.value
    assert after_s is not None
    assert after_s <= error_s + 0.05 * 0.02, "one short wait more"


def test_many_choices_of_one_long_prompt_count_for_what_they_compute_and_as_one_request() -> None:
    big = worker(num_blocks=1024, max_num_seqs=32, max_num_batched_tokens=512, max_model_len=4096)
    desk = Desk(big, overload=OverloadConfig(), max_waiting_requests=20, max_waiting_tokens=20_000)
    for prompt in range(200, 2200, 200):
        desk.submit(prompt, max_tokens=8)
    desk.finish()
    queue = desk.core._models["sim"].pool.queue
    many = desk.submit(1600, max_tokens=4, n=128)
    assert not any(desk.sequence(many, choice).token_ids for choice in range(1, 128)), "nothing is copied"
    most = 0
    while desk.core.find(many) is not None:
        desk.answer()
        assert queue.bounded_requests() <= 1
        assert queue.bounded_tokens() <= 127 * 16
        assert max(controller(desk).pressure.backlog) < 0.1
        assert controller(desk).level <= Level.TRIM, "its choices do take places"
        if len(queue):
            most = max(most, len(queue))
            ask = AdmissionRequest(priority=HIGH, todo_tokens=100, ttft_deadline=desk.now + 2.0)
            assert desk.core.refusal_for_load("sim", ask, desk.now) is None
    assert most >= 95
    assert sum(desk.ends[many, choice].completion_tokens for choice in range(128)) == 128 * 4


def test_choices_that_were_refused_count_as_before() -> None:
    desk = Desk(worker(max_num_seqs=4), window=1)
    many = desk.submit(160, max_tokens=4, n=12)
    queue = desk.core._models["sim"].pool.queue
    while not len(queue):
        desk.answer()
    desk.workers["w0"].refuse_next = 10**6
    before = (queue.bounded_requests(), queue.bounded_tokens())
    assert before[1] <= 12 * 16
    for _ in range(4):
        desk.answer() if desk.plans["w0"] else desk.wake()
        assert queue.bounded_tokens() <= 12 * 16
    desk.workers["w0"].refuse_next = 0
    desk.finish()
    assert {desk.ends[many, choice].completion_tokens for choice in range(12)} == {4}


@pytest.mark.parametrize("prompt", [8, 40])
def test_choice_cancelled_while_held_ends_with_what_it_had(prompt: int) -> None:
    desk = Desk()
    kept = tuple(token_at(stream_of(1, 1), prompt + index) for index in range(3))
    name = desk.submit(prompt, max_tokens=8, n=3, resumed={1: kept})
    desk.cancel(name)
    assert [desk.ends[name, choice].completion_tokens for choice in range(3)] == [0, 3, 0]
    desk.finish()
