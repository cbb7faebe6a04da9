"""What a step that fails does to its sequences: as little as possible, and nothing twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from octavo.protocol.steps import FinishReason, Plan, StepStatus

from tests.unit.worker.driver import Driver, request
from worker_svc.errors import DeviceLost, NotFinite, StepFailed, StepOutOfMemory
from worker_svc.runner.base import StepBatch, StepResult

PROMPT = list(range(1, 11))


def test_failed_step_advances_nothing_and_publishes_no_key() -> None:
    driver, one, two = Driver(), request(PROMPT[:6], 10), request(PROMPT)
    driver.step(one)
    driver.runner.failures.append(StepFailed("what happened"))
    report = driver.step(two)
    assert report.status is StepStatus.FAILED
    assert [(error.handles, error.kind, error.message) for error in report.errors] == [
        ((), "EXCEPTION", "what happened")
    ]
    assert [entry.handle for entry in report.admitted] == [2]
    driver.finish(one, two)
    assert [one.output, two.output] == [driver.expected(one), driver.expected(two)]


def test_queued_plans_are_skipped_until_one_resumes_after_the_failed_step() -> None:
    driver, one = Driver(), request(PROMPT)
    driver.step(one, request(PROMPT))
    driver.runner.failures.append(StepFailed("no culprit"))
    failed = driver.step()
    skipped = driver.step(request(PROMPT), release=[2])
    assert skipped.status is StepStatus.SKIPPED
    assert (skipped.released, skipped.admitted, skipped.live_count) == ((2,), (), 1)
    assert driver.step(resume_after=failed.step - 1).status is StepStatus.SKIPPED
    resumed = driver.step(resume_after=failed.step)
    assert (resumed.status, list(resumed.token_handles)) == (StepStatus.OK, [1])


def test_cancel_applies_in_a_skipped_step() -> None:
    driver = Driver()
    driver.step(request(PROMPT))
    driver.runner.failures.append(StepFailed("no culprit"))
    driver.step()
    driver.cancel(1)
    assert driver.step().released == (1,)


def test_cancel_of_a_sequence_whose_admission_was_skipped_is_forgotten() -> None:
    driver = Driver()
    driver.step(request(PROMPT))
    driver.runner.failures.append(StepFailed("no culprit"))
    failed = driver.step()
    skipped = driver.plan(driver.admit(request(PROMPT)))
    driver.cancel(2)
    driver.run(skipped)
    driver.cancelled.clear()
    report = driver.step(request(PROMPT), resume_after=failed.step)
    assert [entry.handle for entry in report.admitted] == [3]
    assert report.released == ()


def test_seal_in_a_failed_step_waits_for_the_next_one() -> None:
    driver, one = Driver(), request(PROMPT[:6], 12)
    driver.step(one)
    for _ in range(4):
        driver.step(seal=())
    driver.runner.failures.append(StepFailed("no culprit"))
    failed = driver.step()
    assert failed.key_events.stored == ()
    assert driver.step(resume_after=failed.step).key_events.stored == tuple(driver.keys(one.tokens)[1:2])


def test_out_of_memory_is_met_in_halves() -> None:
    driver = Driver()
    requests = [request(PROMPT[:length], 6, seed=length) for length in range(3, 8)]
    driver.step(*requests)
    driver.runner.batches.clear()
    driver.runner.failures.append(StepOutOfMemory("full"))
    report = driver.step()
    assert report.status is StepStatus.OK
    assert [[handle for handle, _, _ in batch] for batch in driver.runner.batches] == [[1, 2], [3, 4, 5]]
    assert report.errors == ()
    driver.finish(*requests)
    assert [one.output for one in requests] == [driver.expected(one) for one in requests]


def test_out_of_memory_in_a_lone_prefill_computes_a_shorter_chunk() -> None:
    driver, one = Driver(), request(PROMPT, 4)
    driver.runner.failures.extend([StepOutOfMemory("full"), StepOutOfMemory("full")])
    report = driver.step(one)
    assert report.prefilled == ((1, 2),)
    assert report.timing.num_prefill_tokens == 2
    driver.finish(one)
    assert one.output == driver.expected(one)


def test_out_of_memory_in_a_lone_decode_is_tried_again() -> None:
    driver = Driver()
    driver.step(request(PROMPT))
    driver.runner.failures.extend([StepOutOfMemory("full"), StepOutOfMemory("full")])
    assert driver.step().status is StepStatus.OK


def test_out_of_memory_that_stays_fails_the_step_and_names_the_row() -> None:
    driver = Driver()
    driver.step(request(PROMPT), request(PROMPT))
    driver.runner.failures.extend([StepOutOfMemory("full"), None, *[StepOutOfMemory("full")] * 3])
    report = driver.step()
    assert report.status is StepStatus.FAILED
    assert [(error.handles, error.kind) for error in report.errors] == [((2,), "OOM")]


def test_culprits_are_failed_alone_and_the_others_advance() -> None:
    driver = Driver()
    requests = [request(PROMPT[:length], 6) for length in (3, 5, 7)]
    driver.step(*requests)
    driver.runner.failures.append(StepFailed("nan", handles=(2, 99)))
    report = driver.step()
    assert report.status is StepStatus.OK
    assert [(end.handle, end.reason) for end in report.finished] == [(2, FinishReason.ERROR)]
    assert [(error.handles, error.message) for error in report.errors] == [((2,), "nan")]
    assert list(report.token_handles) == [1, 3]
    driver.finish(requests[0], requests[2])
    assert requests[2].output == driver.expected(requests[2])


def test_step_of_culprits_only_fails_them() -> None:
    driver, one = Driver(), request(PROMPT)
    driver.runner.failures.append(StepFailed("nan", handles=(1,)))
    report = driver.step(one)
    assert (report.status, report.live_count) == (StepStatus.OK, 0)
    assert report.finished[0].reason is FinishReason.ERROR
    assert driver.step(request(PROMPT)).status is StepStatus.OK


def test_culprits_of_a_step_that_fails_nevertheless_are_named_and_not_ended() -> None:
    driver = Driver()
    driver.step(request(PROMPT), request(PROMPT))
    driver.runner.failures.extend([StepFailed("nan", handles=(1,)), StepFailed("no culprit")])
    report = driver.step()
    assert report.status is StepStatus.FAILED
    assert [error.handles for error in report.errors] == [(1,), ()]
    assert report.live_count == 2


def test_bug_of_a_runner_is_a_failed_step() -> None:
    driver = Driver()
    driver.runner.failures.append(KeyError("oops"))
    report = driver.step(request(PROMPT))
    assert report.status is StepStatus.FAILED
    assert report.errors[0].message == "KeyError: 'oops'"


def test_row_without_its_token_is_a_culprit() -> None:
    driver = Driver()
    execute = driver.runner.execute

    def forgetful(batch: StepBatch) -> StepResult:
        result = execute(batch)
        return StepResult({h: token for h, token in result.token_ids.items() if h != 1}, {})

    driver.runner.execute = forgetful  # type: ignore[method-assign]
    report = driver.step(request(PROMPT), request(PROMPT))
    assert [end.handle for end in report.finished] == [1]
    assert report.errors[0].message == "the runner sampled no token"
    assert list(report.token_handles) == [2]


def test_lost_device_ends_the_engine() -> None:
    driver = Driver()
    driver.runner.failures.append(DeviceLost("gone"))
    with pytest.raises(DeviceLost):
        driver.engine.run_step(driver.plan(driver.admit(request(PROMPT))), lambda: 0.0)


def fail(driver: Driver) -> None:
    driver.runner.failures.append(StepFailed("no culprit"))


def run_out_of_memory(driver: Driver) -> None:
    driver.runner.failures.extend([StepOutOfMemory("full")] * 7)


def cancel(driver: Driver) -> None:
    driver.cancel(*driver.on_worker)


def preempt(driver: Driver) -> None:
    driver.run(driver.plan(release=list(driver.on_worker), resume_after=driver.failed_step))


MISHAPS = (fail, run_out_of_memory, cancel, preempt, Driver.reattach)


@pytest.mark.parametrize("mishap", MISHAPS, ids=lambda mishap: mishap.__name__)
@pytest.mark.parametrize("at_step", range(9))
def test_mishap_at_any_point_of_a_life_leaks_nothing_and_changes_no_output(
    mishap: Callable[[Driver], None], at_step: int
) -> None:
    driver = Driver(num_blocks=16, max_model_len=40, num_host_blocks=8)
    one, two = request(PROMPT, 8), request(PROMPT[2:], 6)
    for step in range(at_step):
        chunks = [(handle, 3) for handle in (*driver.on_worker, 1, 2)]
        driver.run(driver.plan(driver.admit(one, two) if step == 0 else (), chunks))
    mishap(driver)
    if mishap is cancel:
        driver.step()
        assert driver.engine.num_live == 0
    driver.finish(one, two)
    assert [one.output, two.output] == [driver.expected(one), driver.expected(two)]
    pool = driver.engine.pool_report()
    assert pool.free + pool.evictable == 16
    assert pool.unused_slots == 0


def test_plan_about_handles_that_never_were_is_no_error() -> None:
    driver = Driver()
    report = driver.engine.run_step(
        Plan(1, prefill=((5, 3),), skip=(6,), release=(7,), resume_after=99), lambda: 0.0
    )
    assert (report.status, report.released) == (StepStatus.OK, ())


def test_sequences_that_compute_no_numbers_fail_alone_and_say_so() -> None:
    driver = Driver()
    for count in range(1, 31):
        good, bad = request(PROMPT), request(PROMPT)
        driver.runner.failures.append(NotFinite("logits are not finite", (2 * count,)))
        report = driver.step(good, bad, release=[2 * count - 3] if count > 1 else [])
        assert [(error.handles, error.kind) for error in report.errors] == [((2 * count,), "INVALID_VALUE")]
        assert [(end.handle, end.reason) for end in report.finished] == [(2 * count, FinishReason.ERROR)]


def test_device_that_computes_no_numbers_for_anybody_ends_the_worker() -> None:
    driver = Driver()
    for handle in range(1, 16):
        driver.runner.failures.append(NotFinite("logits are not finite", (handle,)))
        assert driver.step(request(PROMPT)).errors
    driver.runner.failures.append(NotFinite("logits are not finite", (16,)))
    with pytest.raises(DeviceLost, match="16 sequences in a row"):
        driver.step(request(PROMPT))
