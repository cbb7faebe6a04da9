from __future__ import annotations

import pytest

from tests.unit.worker.driver import Driver, request
from tests.unit.worker.shadow_runner import ShadowRunner
from worker_svc.engine.engine import WorkerEngine
from worker_svc.engine.faults import Fault, FaultKind, Faults, FaultyRunner
from worker_svc.errors import StepFailed
from worker_svc.runner.base import Row, SequenceData, StepBatch


class Effects:
    def __init__(self) -> None:
        self.log: list[object] = []

    def sleep(self, seconds: float) -> None:
        self.log.append(seconds)

    def hang(self) -> None:
        self.log.append("hang")

    def crash(self) -> None:
        self.log.append("crash")


def batch_of(*token_ids: int, start: int = 0) -> StepBatch:
    sequence = SequenceData(1, list(token_ids), len(token_ids), request([1]).sampling)
    sequence.block_table, sequence.num_computed_tokens = [0, 1], start
    row = Row(sequence, start, len(token_ids) - start, sample=True)
    return StepBatch((row,), added=(sequence,))


def test_without_faults_nothing_fires() -> None:
    assert Faults().draw(FaultKind.STEP_OOM) is None
    Faults().draw_allocation()


def test_fault_with_a_count_is_spent_after_it() -> None:
    faults = Faults([Fault(FaultKind.STEP_OOM, count=2)])
    assert [bool(faults.draw(FaultKind.STEP_OOM)) for _ in range(4)] == [True, True, False, False]


def test_probability_is_kept_and_repeats_with_the_seed() -> None:
    def draws(seed: int) -> list[bool]:
        faults = Faults([Fault(FaultKind.ALLOCATION, probability=0.05)], seed)
        return [faults.draw(FaultKind.ALLOCATION) is not None for _ in range(4000)]

    assert draws(1) == draws(1) != draws(2)
    assert sum(draws(1)) == pytest.approx(200, rel=0.2)


def test_setting_faults_replaces_those_before() -> None:
    faults = Faults([Fault(FaultKind.CRASH)])
    faults.set([Fault(FaultKind.HANG)])
    assert faults.draw(FaultKind.CRASH) is None
    assert faults.draw(FaultKind.HANG) is not None


@pytest.mark.parametrize(
    ("fault", "effect"),
    [
        (Fault(FaultKind.SLOW_STEP, duration_s=0.25), 0.25),
        (Fault(FaultKind.HANG), "hang"),
        (Fault(FaultKind.CRASH), "crash"),
    ],
)
def test_step_faults_have_their_effects_and_the_step_goes_on(fault: Fault, effect: object) -> None:
    effects = Effects()
    runner = FaultyRunner(ShadowRunner(4), Faults([fault]), effects)
    assert runner.execute(batch_of(1, 2, 3)).token_ids.keys() == {1}
    assert effects.log == [effect]


def test_step_error_is_raised_instead_of_the_step() -> None:
    shadow = ShadowRunner(4)
    runner = FaultyRunner(shadow, Faults([Fault(FaultKind.STEP_ERROR)]), Effects())
    with pytest.raises(StepFailed):
        runner.execute(batch_of(1, 2, 3))
    assert shadow.batches == []


def test_fault_of_a_token_fires_only_in_steps_that_compute_it() -> None:
    faults = Faults([Fault(FaultKind.CRASH, token_id=2)])
    effects = Effects()
    runner = FaultyRunner(ShadowRunner(4), faults, effects)
    runner.execute(batch_of(1, 3))
    assert effects.log == []
    runner.execute(batch_of(1, 2, 3))
    assert effects.log == ["crash"]
    assert faults.draw(FaultKind.CRASH, {1, 3}) is None


def test_injected_out_of_memory_on_two_percent_of_steps_fails_no_request() -> None:
    driver = Driver()
    faults = Faults([Fault(FaultKind.STEP_OOM, probability=0.02)], seed=3)
    driver.engine = WorkerEngine(FaultyRunner(driver.runner, faults, Effects()), driver.config)
    for seed in range(40):
        one = request(range(1, 11), 30, seed=seed)
        driver.finish(one)
        assert one.output == driver.expected(one)
    assert "FAILED" not in driver.met


PROMPT, OTHER = list(range(1, 17)), list(range(20, 48))


def tiered() -> tuple[Driver, Faults]:
    """A driver with a host tier and PROMPT's blocks cached on the device, and the faults of its runner."""
    driver, faults = Driver(num_blocks=9, max_model_len=36, num_host_blocks=8), Faults()
    driver.engine = WorkerEngine(FaultyRunner(driver.runner, faults, Effects()), driver.config)
    driver.finish(request([*PROMPT, 48], 1))
    return driver, faults


def test_copies_to_the_host_that_are_made_to_fail_lose_cached_contents_and_nothing_else() -> None:
    driver, faults = tiered()
    faults.set([Fault(FaultKind.TIER_COPY)])
    other, again = request(OTHER, 5), request([*PROMPT, 49], 3)
    driver.finish(other)
    assert not driver.host_keys
    assert driver.runner.blocks_out == 0
    driver.finish(again)
    assert [other.output, again.output] == [driver.expected(other), driver.expected(again)]
    assert "FAILED" not in driver.met


def test_copy_to_the_device_that_is_made_to_fail_is_made_up_for_by_computing() -> None:
    driver, faults = tiered()
    driver.finish(request(OTHER, 5))
    faults.set([Fault(FaultKind.TIER_COPY)])
    again = request([*PROMPT, 49], 3)
    assert driver.step(again).admitted[0].host_cached_tokens > 0
    driver.finish(again)
    assert driver.runner.blocks_in == 0
    assert again.output == driver.expected(again)
    assert "FAILED" not in driver.met
