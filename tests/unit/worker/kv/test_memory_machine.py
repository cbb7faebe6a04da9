"""Pool, prefix index, tiers and pins under any order of operations, audited after each."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from octavo_lab.scorecard.kv_workload import NUM_CHAINS, MemoryWorkload

PICK = st.integers(0, 63)
TOKENS = st.integers(1, 16) | st.just(16)
CHAIN = st.sampled_from([0, 1, 2, NUM_CHAINS - 1])


class MemoryMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(6, 16), num_host_blocks=st.integers(0, 12), first_block=st.integers(0, 1)
    )
    def start(self, num_blocks: int, num_host_blocks: int, first_block: int) -> None:
        self.workload = MemoryWorkload(2, num_blocks, num_host_blocks, 3, first_block)

    @rule(chain=CHAIN, num_tokens=TOKENS)
    def admit(self, chain: int, num_tokens: int) -> None:
        self.workload.admit(chain, num_tokens)

    @rule(chain=CHAIN, num_tokens=TOKENS)
    def live_and_die(self, chain: int, num_tokens: int) -> None:
        self.workload.admit(chain, num_tokens)
        self.promote(at_most=16, failed=False)
        self.workload.compute(-1, num_tokens)
        self.workload.release(-1)

    @rule(at_most=st.integers(1, 4), failed=st.booleans())
    def promote(self, at_most: int, failed: bool) -> None:
        self.workload.start_promotions(at_most)
        self.workload.land(-1, failed=failed)

    @rule(pick=PICK, num_tokens=TOKENS)
    def compute(self, pick: int, num_tokens: int) -> None:
        self.workload.compute(pick, num_tokens)

    @rule(pick=PICK)
    def grow(self, pick: int) -> None:
        self.workload.grow(pick)

    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        self.workload.release(pick)

    @rule(num_blocks=st.integers(1, 4))
    def evict(self, num_blocks: int) -> None:
        self.workload.memory.evict(num_blocks)

    @rule(failed=st.booleans())
    def copy_out(self, failed: bool) -> None:
        self.workload.copy_out(failed=failed)

    @rule(at_most=st.integers(1, 4))
    def start_promotions(self, at_most: int) -> None:
        self.workload.start_promotions(at_most)

    @rule(pick=PICK, failed=st.booleans())
    def land(self, pick: int, failed: bool) -> None:
        self.workload.land(pick, failed=failed)

    @rule(name=st.integers(0, 2), chain=CHAIN, num_blocks=st.integers(0, 4))
    def pin(self, name: int, chain: int, num_blocks: int) -> None:
        self.workload.pin(name, chain, num_blocks)

    @invariant()
    def books_balance(self) -> None:
        self.workload.check()

    def teardown(self) -> None:
        if hasattr(self, "workload"):
            self.workload.drain()


MemoryMachine.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=100,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
test_memory_under_any_operations_keeps_its_books = pytest.mark.slow(MemoryMachine.TestCase)


@pytest.mark.parametrize("seed", range(4))
def test_memory_under_random_load_keeps_its_books_and_meets_every_case(seed: int) -> None:
    rng = random.Random(seed)
    workload = MemoryWorkload(4, 32, 16, 4)
    for step in range(4000):
        workload.random_operation(rng)
        if step % 20 == 0:
            workload.check()
    workload.drain()
    cases = ("hit blocks", "host hit blocks", "refused", "demotions", "promotions", "pins")
    assert all(workload.outcomes[case] for case in (*cases, "failed demotions", "failed promotions"))
