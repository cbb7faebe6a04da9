"""The static control arm: fill or timeout, all in, all out."""

from __future__ import annotations

from scheduler_svc.core import StaticConfig
from tests.unit.scheduler.core.desk import Desk, worker


def static_desk(*workers: object, **settings: object) -> Desk:
    config = StaticConfig(**{"batch_size": 3, "timeout_s": 0.5, **settings})  # type: ignore[arg-type]
    return Desk(*workers, static=config, prefix_caching=False)  # type: ignore[arg-type]


def test_batch_starts_when_it_is_full() -> None:
    desk = static_desk()
    names = [desk.submit(20, max_tokens=5) for _ in range(2)]
    assert [desk.where(name) for name in names] == [None, None]
    names.append(desk.submit(20, max_tokens=5))
    assert [desk.where(name) for name in names] == ["w0"] * 3
    desk.finish()


def test_batch_that_is_not_full_starts_at_its_timeout() -> None:
    desk = static_desk()
    name = desk.submit(20, max_tokens=5)
    assert desk.core.next_wakeup() == 0.5
    desk.wake()
    assert desk.where(name) == "w0"
    desk.finish()


def test_nobody_joins_a_batch_that_runs_and_the_next_one_follows_it() -> None:
    desk = static_desk()
    for _ in range(3):
        desk.submit(20, max_tokens=5)
    desk.answer()
    late = [desk.submit(20, max_tokens=5) for _ in range(3)]
    for _ in range(3):
        desk.answer()
        assert desk.where(late[0]) is None
    desk.finish()
    assert all((name, 0) in desk.ends for name in late)


def test_finished_rows_are_computed_until_the_whole_batch_ends() -> None:
    desk = static_desk()
    short = desk.submit(20, max_tokens=2)
    for _ in range(2):
        desk.submit(20, max_tokens=12)
    desk.finish()
    assert desk.ends[short, 0].timings.total_s < desk.now / 2, "its client has it at once"
    assert [report.timing.num_decodes for report in desk.reports][1:12] == [3] * 11


def test_rows_leave_at_their_end_without_holding() -> None:
    desk = static_desk(hold_finished=False)
    desk.submit(20, max_tokens=2)
    for _ in range(2):
        desk.submit(20, max_tokens=12)
    desk.finish()
    assert [report.timing.num_decodes for report in desk.reports][1:4] == [3, 2, 2]


def test_batches_are_of_one_length_bucket() -> None:
    desk = static_desk(bucket_bounds=(32, 128))
    short = [desk.submit(20, max_tokens=5) for _ in range(2)]
    long = [desk.submit(100, max_tokens=5) for _ in range(3)]
    assert [desk.where(name) for name in long] == ["w0"] * 3
    assert [desk.where(name) for name in short] == [None] * 2
    desk.finish()


def test_members_reserve_room_for_prompt_and_output_in_one_run() -> None:
    desk = static_desk(worker(num_blocks=32, paged=False, max_model_len=256))
    names = [desk.submit(60, max_tokens=190) for _ in range(3)]
    (plan, *_) = desk.plans["w0"]
    assert [admit.reserve_tokens for admit in plan.admit] == [250, 250]
    assert [desk.where(name) for name in names] == ["w0", "w0", None]
    desk.finish()
    assert desk.workers["w0"].surprises.get("refused") is None


def test_each_idle_worker_takes_a_batch() -> None:
    desk = static_desk(worker(), worker("w1"))
    names = [desk.submit(20, max_tokens=5) for _ in range(6)]
    assert sorted(str(desk.where(name)) for name in names) == ["w0"] * 3 + ["w1"] * 3
    desk.finish()


def test_cancelled_member_leaves_and_the_batch_goes_on() -> None:
    desk = static_desk()
    names = [desk.submit(20, max_tokens=12) for _ in range(3)]
    for _ in range(3):
        desk.answer()
    desk.cancel(names[0])
    desk.finish()
    assert [len(desk.tokens[name, 0]) for name in names[1:]] == [12, 12]


def test_worker_lost_with_a_batch_gives_each_member_a_batch_of_its_own_first() -> None:
    desk = static_desk()
    names = [desk.submit(20, max_tokens=12) for _ in range(3)]
    desk.answer()
    machine = desk.workers["w0"]
    desk.lose()
    machine.restart()
    desk.attach(machine)
    desk.finish()
    assert [len(desk.tokens[name, 0]) for name in names] == [12] * 3
