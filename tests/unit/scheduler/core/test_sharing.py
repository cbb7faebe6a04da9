"""How the prompts of a worker share a step."""

from __future__ import annotations

from octavo.protocol.steps import Priority

from scheduler_svc.core.sharing import tokens_before
from tests.unit.scheduler.core.desk import Desk, worker

STANDARD, INTERACTIVE, BATCH = Priority.STANDARD, Priority.INTERACTIVE, Priority.BATCH


def steps_to_first_token(desk: Desk, name: str) -> int:
    """Answer steps until a request has a token; return how many that took."""
    for step in range(1, 1000):
        desk.answer()
        if (name, 0) in desk.tokens:
            return step
    raise AssertionError("no token")


def behind_a_long_prompt(long: Priority) -> tuple[Desk, str]:
    desk = Desk(worker(max_num_batched_tokens=64, num_blocks=256, max_model_len=4096), window=1)
    name = desk.submit(1000, max_tokens=4, priority=long)
    desk.answer()
    desk.answer()
    return desk, name


def test_short_prompt_does_not_wait_for_a_long_one_of_its_class_nor_of_a_lower() -> None:
    for long in (STANDARD, BATCH):
        desk, _ = behind_a_long_prompt(long)
        assert steps_to_first_token(desk, desk.submit(20, max_tokens=4)) == 2
        desk.finish()


def test_long_prompt_of_a_higher_class_goes_on_beside_a_short_one_of_a_lower() -> None:
    desk, long = behind_a_long_prompt(INTERACTIVE)
    short = desk.submit(20, max_tokens=4, priority=BATCH)
    steps_to_first_token(desk, long)
    assert (short, 0) in desk.tokens  # its least share has brought it there
    desk.finish()


def test_long_prompt_has_a_share_of_every_step_however_many_short_ones_come() -> None:
    desk, long = behind_a_long_prompt(STANDARD)
    for _ in range(400):
        desk.submit(60, max_tokens=1)
        desk.answer()
        if (long, 0) in desk.tokens:
            break
    assert (long, 0) in desk.tokens
    desk.finish()


def test_step_is_full_while_there_is_a_prompt_to_compute() -> None:
    desk, long = behind_a_long_prompt(STANDARD)
    while (long, 0) not in desk.tokens:
        desk.submit(24, max_tokens=1)
        desk.answer()
    timings = [report.timing for report in desk.reports[2:-2]]
    assert min(timing.num_prefill_tokens + timing.num_decodes for timing in timings) >= 60
    desk.finish()


def test_newcomer_waits_for_shorter_prompts_and_higher_classes_and_the_least_share_of_others() -> None:
    running = [(STANDARD, 7000), (STANDARD, 100), (INTERACTIVE, 300)]
    assert tokens_before(running, INTERACTIVE, 70) == 10
    assert tokens_before(running, STANDARD, 200) == 400 + 600 // 7
    assert tokens_before(running, BATCH, 70) == 7400
