"""Faults inside a step of the torch runner, and copies between its tiers."""

from __future__ import annotations

import math

import pytest
import torch

from tests.unit.worker.runner.torch.conftest import LoadFamily
from tests.unit.worker.runner.torch.driver import Driver
from worker_svc.errors import DeviceLost, StepFailed, StepOutOfMemory
from worker_svc.runner import host_memory
from worker_svc.runner.base import BlockCopy
from worker_svc.runner.torch import TorchRunner

PROMPT = [5, 17, 99, 200, 31, 31, 8]
BLOCKS = 16


@pytest.fixture
def runner(load_family: LoadFamily) -> TorchRunner:
    return load_family("llama")[0]


def poison(runner: TorchRunner, token_id: int, value: float) -> None:
    """Make everything that comes of one token be no number."""
    with torch.inference_mode():
        runner._model._embedding[token_id] = value


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_token_that_makes_no_numbers_names_its_sequence_and_spoils_no_other(
    runner: TorchRunner, value: float
) -> None:
    alone = Driver(runner, BLOCKS)
    expected = alone.generate([alone.add(PROMPT)], 6)
    poison(runner, 77, value)
    driver = Driver(runner, BLOCKS)
    good, bad = driver.add(PROMPT), driver.add([*PROMPT, 77, 3])

    with pytest.raises(StepFailed) as caught:
        driver.step()

    assert caught.value.handles == (bad.handle,)
    driver.remove(bad)
    assert driver.generate([good], 6) == expected
    # Blocks that the bad one had written are clean for whoever gets them next.
    last = driver.add(PROMPT)
    driver.free.reverse()
    assert driver.generate([last], 6) == expected


def test_chunk_that_makes_no_numbers_is_noticed_although_nothing_is_sampled(runner: TorchRunner) -> None:
    poison(runner, 77, math.nan)
    driver = Driver(runner, BLOCKS)
    bad = driver.add([77, *PROMPT])

    with pytest.raises(StepFailed) as caught:
        driver.step({bad.handle: 3})

    assert caught.value.handles == (bad.handle,)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (torch.OutOfMemoryError("out of memory"), StepOutOfMemory),
        (MemoryError(), StepOutOfMemory),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), StepOutOfMemory),
        (RuntimeError("shapes differ"), StepFailed),
        (IndexError("out of range"), StepFailed),
        (torch.AcceleratorError("an illegal memory access was encountered"), DeviceLost),
    ],
)
def test_error_of_torch_becomes_the_workers_and_the_next_step_is_right(
    runner: TorchRunner, monkeypatch: pytest.MonkeyPatch, raised: Exception, expected: type[Exception]
) -> None:
    undisturbed = Driver(runner, BLOCKS)
    tokens = undisturbed.generate([undisturbed.add(PROMPT)], 4)
    driver = Driver(runner, BLOCKS)
    sequence = driver.add(PROMPT)
    with monkeypatch.context() as patch:

        def fail(*_: object) -> None:
            raise raised

        patch.setattr(runner._model, "logits", fail)
        with pytest.raises(expected) as caught:
            driver.step()
    assert str(raised) in str(caught.value)

    assert driver.generate([sequence], 4) == tokens


def test_tiers_that_fit_only_one_without_the_other_are_refused_with_the_arithmetic(
    runner: TorchRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    block_bytes = 4 * runner.info.kv_bytes_per_token
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 25 * block_bytes)
    runner.allocate(25, 4, 0)
    runner.allocate(15, 4, 10)

    with pytest.raises(MemoryError, match=f"26 blocks x {block_bytes} bytes = {26 * block_bytes} bytes"):
        runner.allocate(15, 4, 11)

    assert runner.available_kv_bytes(0.2) == 5 * block_bytes


def test_token_beyond_the_vocabulary_fails_the_step_and_not_the_runner(runner: TorchRunner) -> None:
    driver = Driver(runner, BLOCKS)
    bad = driver.add([10**6])
    with pytest.raises(StepFailed):
        driver.step()
    driver.remove(bad)
    assert driver.generate([driver.add(PROMPT)], 1)


def test_blocks_that_went_to_the_host_and_came_back_elsewhere_hold_what_they_held(
    runner: TorchRunner,
) -> None:
    driver = Driver(runner, BLOCKS, block_size=4)
    runner.allocate(BLOCKS, 4, num_host_blocks=5)
    prompt = PROMPT * 2
    first = driver.add(prompt)
    expected = driver.generate([first], 6)
    moved = first.block_table[: (len(prompt) - 1) // 4]
    slots = [4, 0, 2]

    runner.copy_to_host([BlockCopy(block, slot) for block, slot in zip(moved, slots, strict=True)])
    driver.remove(first)
    overwriting = driver.add([9] * 4 * BLOCKS)
    driver.step()
    driver.remove(overwriting)
    second = driver.add(prompt)
    second.block_table = [driver.free.pop() for _ in moved]
    ticket = runner.copy_to_device(
        [BlockCopy(block, slot) for block, slot in zip(second.block_table, slots, strict=True)]
    )

    assert ticket.done()
    assert ticket.elapsed_s() > 0
    second.num_computed_tokens = 4 * len(moved)
    assert driver.generate([second], 6) == expected
