"""Workers that die, hang, lie or fail steps; and requests that make them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from octavo.protocol.steps import FinishReason, StepError, StepStatus
from octavo_lab.sim import SimWorker

from scheduler_svc.core import Reason
from scheduler_svc.core.request import SequenceStatus
from scheduler_svc.planlog import checkpoint
from tests.unit.scheduler.core.desk import Desk, worker


def seeds_of(desk: Desk, *names: str) -> frozenset[int]:
    return frozenset(desk.sequence(name).request.spec.sampling.seed or 0 for name in names)


# Workers that go away ----------------------------------------------------------------------------


def test_requests_of_a_lost_worker_go_on_elsewhere_and_repeat_nothing() -> None:
    desk = Desk(worker(), worker("w1"))
    name = desk.submit(20, max_tokens=30)
    home = str(desk.where(name))
    for _ in range(6):
        desk.answer(home)
    assert 0 < len(desk.tokens[name, 0]) < 30
    desk.lose(home)
    assert desk.where(name) not in {home, None}
    desk.finish()
    assert len(desk.tokens[name, 0]) == 30
    assert desk.ends[name, 0].timings.recoveries == 1


def test_requests_wait_for_the_only_worker_to_come_back() -> None:
    desk = Desk()
    name = desk.submit(20, max_tokens=30)
    desk.answer()
    machine = desk.workers["w0"]
    desk.lose()
    assert desk.sequence(name).status is SequenceStatus.WAITING
    desk.attach(machine)
    assert desk.where(name) == "w0"
    desk.finish()


def test_seats_are_those_of_the_workers_that_are_here() -> None:
    desk = Desk(worker(max_num_seqs=8), worker("w1", max_num_seqs=3))
    assert desk.core.num_seats == 11
    desk.attach(desk.workers["w1"])
    assert desk.core.num_seats == 11
    desk.core.worker_down("w0", desk.now)
    assert desk.core.num_seats == 3
    desk.core.worker_down("w1", desk.now)
    assert desk.core.num_seats == 0


def test_worker_that_owes_a_report_for_too_long_is_let_go() -> None:
    desk = Desk(step_watchdog_s=5.0)
    desk.submit(20)
    desk.tick(4.9)
    assert desk.detached == []
    desk.tick(5.1)
    assert [(d.worker_id, d.reason) for d in desk.detached] == [("w0", "watchdog: no report in time")]


def test_report_of_a_worker_that_was_let_go_changes_nothing() -> None:
    desk = Desk(step_watchdog_s=5.0)
    desk.submit(20)
    report = desk.run()
    desk.tick(desk.now + 6.0)
    assert desk.core.report("w0", report, desk.now) == []


def test_worker_that_comes_again_without_having_gone_replaces_itself() -> None:
    desk = Desk()
    name = desk.submit(20, max_tokens=20)
    desk.answer()
    desk.plans["w0"].clear()
    desk.attach(desk.workers["w0"])
    assert desk.sequence(name).deaths.count == 0
    desk.finish()
    assert len(desk.tokens[name, 0]) == 20


def test_what_a_draining_worker_runs_moves_after_the_grace_to_where_there_is_room() -> None:
    desk = Desk(worker(), worker("w1", max_num_seqs=1), worker_drain_grace_s=5.0)
    names = [desk.submit(20, max_tokens=200) for _ in range(3)]
    desk.answer("w0")
    desk.answer("w0")
    stays = [name for name in names if desk.where(name) == "w0"]
    assert len(stays) == 2
    desk._perform(desk.core.worker_draining("w0", desk.now))
    for _ in range(5):
        desk.answer("w0")
    assert [desk.where(name) for name in stays] == ["w0", "w0"], "they might end by themselves"
    desk.now += 5.0
    for _ in range(5):
        desk.answer("w0")
    assert [desk.where(name) for name in stays] == ["w0", "w0"], "nobody has room for them"
    desk.cancel(next(name for name in names if name not in stays))
    for _ in range(3):
        for worker_id in ("w1", "w0"):
            if desk.plans[worker_id]:
                desk.answer(worker_id)
    assert sorted(str(desk.where(name)) for name in stays) == ["w0", "w1"]
    had = {name: len(desk.tokens[name, 0]) for name in stays}
    desk.lose("w0")
    assert all(desk.sequence(name).deaths.count == 0 for name in stays)
    desk.finish()
    assert all(len(desk.tokens[name, 0]) == 200 > had[name] > 5 for name in stays)


def test_only_worker_that_drains_keeps_what_it_runs() -> None:
    desk = Desk(worker_drain_grace_s=0.0)
    name = desk.submit(20, max_tokens=30)
    desk._perform(desk.core.worker_draining("w0", desk.now))
    desk.finish()
    assert desk.ends[name, 0].timings.recoveries == 0


# Reports that cannot be --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"step": 7}, "report of step 7, due is 2"),
        ({"live_count": 5}, "books differ"),
        ({"digest": 12345}, "books differ"),
        ({"first_positions": [3]}, "token at 3"),
        ({"released": (1,), "live_count": 0}, "released without being asked"),
    ],
)
def test_report_that_the_books_do_not_allow_detaches_the_worker_and_nothing_is_lost(
    changes: dict[str, Any], said: str
) -> None:
    desk = Desk()
    name = desk.submit(20, max_tokens=12)
    desk.answer()
    desk.answer(**changes)
    (detached,) = desk.detached
    assert said in detached.reason
    assert desk.sequence(name).status is SequenceStatus.WAITING
    assert desk.sequence(name).deaths.count == 0, "nobody died"
    desk.attach(desk.workers["w0"])
    desk.finish()
    assert len(desk.tokens[name, 0]) == 12


def test_blocks_that_do_not_add_up_detach_the_worker() -> None:
    desk = Desk()
    desk.submit(20)
    report = desk.run()
    desk.report("w0", replace(report, pool=replace(report.pool, free=report.pool.free + 1)))
    assert "free" in desk.detached[0].reason


def test_tokens_before_the_fault_in_a_report_reach_their_clients() -> None:
    desk = Desk()
    names = [desk.submit(20, max_tokens=12) for _ in range(2)]
    desk.answer()
    report = desk.run()
    assert len(report.first_positions) == 2
    had = len(desk.tokens[names[0], 0])
    desk.report("w0", replace(report, first_positions=[report.first_positions[0], 999]))
    assert len(desk.tokens[names[0], 0]) == had + 1
    desk.attach(desk.workers["w0"])
    desk.finish()
    assert [len(desk.tokens[name, 0]) for name in names] == [12, 12]


def test_worker_that_keeps_a_cancelled_sequence_is_detached() -> None:
    desk = Desk()
    name = desk.submit(20, max_tokens=50)
    desk.answer()
    desk.cancel(name)
    machine = desk.workers["w0"]
    for _ in range(3):
        machine._cancelled.clear()
        if desk.plans["w0"]:
            desk.answer()
    assert "not released as asked" in desk.detached[0].reason


# Poison ------------------------------------------------------------------------------------------


def test_request_under_which_two_workers_died_alone_is_quarantined_and_its_neighbours_are_not() -> None:
    machines = [worker(f"w{index}") for index in range(3)]
    desk = Desk(*machines)
    names = [desk.submit(20, max_tokens=40) for _ in range(6)]
    for _ in range(2):
        for worker_id in list(desk.workers):
            if desk.plans[worker_id]:
                desk.answer(worker_id)
    poison = names[0]  # Its seed is 1.
    deaths = 0
    for _ in range(300):
        home = desk.where(poison) if desk.core.find(poison) else None
        if home is not None and desk.workers[home].has(1, 0):
            desk.lose(home)
            deaths += 1
        for worker_id in list(desk.workers):
            if desk.plans[worker_id]:
                desk.answer(worker_id)
        if (poison, 0) in desk.ends:
            break
    end = desk.ends[poison, 0]
    assert end.error is not None
    assert end.error.reason is Reason.POISON
    assert (deaths, end.error.metadata) == (3, {"deaths": "3", "alone": "2"}), "it had a neighbour at first"
    desk.finish()
    assert all(len(desk.tokens[name, 0]) == 40 for name in names[1:])


def test_suspects_run_one_per_worker_and_beside_nobody_untried() -> None:
    desk = Desk(worker(), worker("w1", max_num_seqs=1))
    names = [desk.submit(20, max_tokens=40) for _ in range(4)]
    blocker = next(name for name in names if desk.where(name) == "w1")
    for _ in range(2):
        desk.answer("w0")
    machine = desk.workers["w0"]
    desk.lose("w0")
    fresh = desk.submit(20, max_tokens=40)
    machine.restart()
    desk.attach(machine)
    for _ in range(40):
        running = list(desk.state("w0").sequences.values())
        suspects = [sequence for sequence in running if sequence.suspect]
        assert len(suspects) <= 1
        assert not (suspects and any(s.untried and not s.suspect for s in running))
        if desk.plans["w0"]:
            desk.answer("w0")
    assert desk.core.find(blocker) is not None
    desk.finish()
    assert all((name, 0) in desk.ends for name in (*names, fresh))


def test_broken_stream_is_forgiven_when_the_same_process_comes_back_and_a_restart_is_not() -> None:
    for restarted in (False, True):
        desk = Desk()
        name = desk.submit(20, max_tokens=40)
        desk.answer()
        machine = desk.workers["w0"]
        desk.lose()
        assert desk.sequence(name).deaths.count == 1
        if restarted:
            machine.restart()
        desk.attach(machine)
        assert desk.sequence(name).deaths.count == restarted
        desk.finish()


def test_stream_that_breaks_again_and_again_ends_no_long_request() -> None:
    desk = Desk()
    name = desk.submit(20, max_tokens=100)
    for _ in range(12):
        desk.answer()
        machine = desk.workers["w0"]
        desk.lose()
        desk.attach(machine)
    desk.finish()
    assert desk.ends[name, 0].reason is FinishReason.LENGTH


def test_workers_that_never_come_back_leave_nothing_behind() -> None:
    desk = Desk(worker("stays"))
    sizes = []
    for index in range(60):
        desk.submit(20, max_tokens=40)
        desk.attach(SimWorker(worker(f"w{index}")))
        name = desk.submit(200, max_tokens=4)
        home = str(desk.where(name))
        desk.answer(home)
        if home != "stays":
            desk.lose(home)
        desk.finish()
        for gone in desk.workers.keys() - {"stays"}:
            desk.lose(gone)
        sizes.append(checkpoint.dump(desk.core).ByteSize())
    assert desk.ends[name, 0].timings.recoveries == 1
    assert sizes[-1] < 1.2 * sizes[20]


def test_hang_is_not_forgiven_when_the_process_comes_back() -> None:
    desk = Desk(step_watchdog_s=5.0)
    name = desk.submit(20, max_tokens=40)
    desk.answer()
    for hang in (1, 2):
        desk.tick(desk.now + 6.0)
        if hang == 1:
            assert desk.sequence(name).deaths.count == 1
            desk.attach(desk.workers["w0"])
    end = desk.ends[name, 0]
    assert end.error is not None
    assert end.error.reason is Reason.POISON


def test_death_after_a_sequence_has_proved_itself_does_not_add_up() -> None:
    desk = Desk()
    name = desk.submit(20, max_tokens=100)
    for _ in range(4):
        for _ in range(10):
            desk.answer()
        machine = desk.workers["w0"]
        desk.lose()
        machine.restart()
        desk.attach(machine)
    assert desk.sequence(name).deaths.count == 1
    desk.finish()
    assert len(desk.tokens[name, 0]) == 100


# Failed steps ------------------------------------------------------------------------------------


def fail_on(desk: Desk, bad: frozenset[int], *, named: bool = False) -> None:
    machine = desk.workers["w0"]

    def fault(seeds: frozenset[int]) -> tuple[StepError, ...]:
        hit = seeds & bad
        if not hit:
            return ()
        return (StepError(machine.handles_of(hit) if named else (), "EXCEPTION", "boom"),)

    machine.step_fault = fault


@pytest.mark.parametrize("culprit", [0, 3, 6])
@pytest.mark.parametrize("window", [1, 2, 3])
def test_bisection_fails_the_culprit_alone_and_the_others_go_on_exactly(culprit: int, window: int) -> None:
    desk = Desk(window=window)
    names = [desk.submit(20, max_tokens=20) for _ in range(7)]
    for _ in range(3):
        desk.answer()
    fail_on(desk, seeds_of(desk, names[culprit]))
    desk.finish()
    error = desk.ends[names[culprit], 0].error
    assert error is not None
    assert error.reason is Reason.STEP_FAILED
    assert "boom" in error.message
    others = [name for name in names if name != names[culprit]]
    assert all(len(desk.tokens[name, 0]) == 20 for name in others)
    failed = sum(report.status is StepStatus.FAILED for report in desk.reports)
    assert failed <= 5, "halving, not trying each"


def test_two_culprits_in_one_batch_are_both_found() -> None:
    desk = Desk()
    names = [desk.submit(20, max_tokens=20) for _ in range(6)]
    desk.answer()
    fail_on(desk, seeds_of(desk, names[1], names[4]))
    desk.finish()
    failed = {name for name in names if desk.ends[name, 0].error is not None}
    assert failed == {names[1], names[4]}


def test_culprit_in_its_prefill_is_found() -> None:
    desk = Desk(worker(max_num_batched_tokens=64))
    good = desk.submit(20, max_tokens=20)
    desk.answer()
    bad = desk.submit(150, max_tokens=4)
    fail_on(desk, seeds_of(desk, bad))
    desk.finish()
    assert desk.rejects.get(bad) is not None or desk.ends[bad, 0].error is not None
    assert desk.ends[good, 0].reason is FinishReason.LENGTH


def test_culprit_that_the_worker_names_is_failed_without_a_search() -> None:
    desk = Desk()
    names = [desk.submit(20, max_tokens=20) for _ in range(6)]
    desk.answer()
    fail_on(desk, seeds_of(desk, names[2]), named=True)
    desk.finish()
    assert desk.ends[names[2], 0].error is not None
    assert sum(report.status is StepStatus.FAILED for report in desk.reports) == 1


def test_step_that_fails_once_fails_nobody_even_one_that_runs_alone() -> None:
    desk = Desk()
    name = desk.submit(20, max_tokens=20)
    desk.answer()
    fail_on(desk, seeds_of(desk, name))
    desk.answer()
    desk.workers["w0"].step_fault = lambda seeds: ()
    desk.finish()
    assert desk.ends[name, 0].reason is FinishReason.LENGTH


def test_plans_queued_behind_a_failed_step_are_skipped_and_what_they_admitted_is_admitted_anew() -> None:
    desk = Desk()
    first = desk.submit(20, max_tokens=30)
    desk.answer()
    fail_on(desk, seeds_of(desk, first))
    second = desk.submit(20, max_tokens=10)
    for _ in range(4):
        if second in desk.admitted():
            break
        desk.wake()
    desk.workers["w0"].step_fault = lambda seeds: ()
    desk.finish()
    assert [len(desk.tokens[name, 0]) for name in (first, second)] == [30, 10]


def test_culprit_cancelled_during_the_search_ends_the_search() -> None:
    desk = Desk()
    names = [desk.submit(20, max_tokens=20) for _ in range(4)]
    desk.answer()
    fail_on(desk, seeds_of(desk, names[1]))
    while desk.state().pipeline.bisection is None:
        desk.answer()
    desk.cancel(names[1])
    desk.finish()
    assert all(desk.ends[name, 0].error is None for name in names)
