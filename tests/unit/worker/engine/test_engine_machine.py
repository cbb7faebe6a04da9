"""The engine under any plans, failures, cancels and delays: nothing is lost, nothing is wrong.

The shadow runner checks each KV slot that a step reads, the driver each report; here the outputs are
compared with what they must be.
"""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from octavo.protocol.steps import Plan, Priority, StepStatus

from tests.unit.worker.driver import Driver, Request, request
from worker_svc.engine.faults import Fault, FaultKind, Faults
from worker_svc.errors import StepFailed, StepOutOfMemory

PROMPTS = [[(7 * index + family) % 49 + 1 for index in range(40)] for family in range(3)]
HANDLES = st.sets(st.integers(0, 7), max_size=3)
WINDOW = 2


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(16, 40),
        num_host_blocks=st.integers(0, 16),
        max_num_seqs=st.integers(2, 8),
        promote_blocks_per_step=st.sampled_from([1, 64]),
    )
    def start(
        self, num_blocks: int, num_host_blocks: int, max_num_seqs: int, promote_blocks_per_step: int
    ) -> None:
        self.faults = Faults()
        self.driver = Driver(
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            max_num_seqs=max_num_seqs,
            max_model_len=50,
            pin_budget_blocks=3,
            promote_blocks_per_step=promote_blocks_per_step,
            faults=self.faults,
        )
        self.requests: list[Request] = []
        self.plans: deque[Plan] = deque()

    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 40),
        max_tokens=st.integers(1, 20),
        priority=st.sampled_from(Priority),
        ignore_eos=st.booleans(),
    )
    def arrive(self, family: int, length: int, max_tokens: int, priority: Priority, ignore_eos: bool) -> None:
        prompt = PROMPTS[family][:length]
        self.requests.append(request(prompt, max_tokens, priority=priority, ignore_eos=ignore_eos))

    @rule(
        num_admits=st.integers(0, 3),
        chunk=st.sampled_from([1, 3, 9, 1 << 30]),
        skip=HANDLES,
        preempt=st.sets(st.integers(0, 7), max_size=1),
    )
    def plan(self, num_admits: int, chunk: int, skip: set[int], preempt: set[int]) -> None:
        """Plan on what the reports read so far say; the oldest plan runs when the window is full."""
        driver = self.driver
        handles = list(driver.on_worker)
        releasing = {handle for plan in self.plans for handle in plan.release} | driver.cancelled
        awaited = list(driver.awaited.values())
        waiting = [r for r in self.requests if r.handle is None and r.finished is None and r not in awaited]
        admit = driver.admit(*waiting[:num_admits])
        prefill = [(handle, chunk) for handle in (*handles, *driver.awaited)]
        release = {handles[pick] for pick in preempt if pick < len(handles)} - releasing
        resume_after = driver.failed_step
        driver.failed_step = None
        self.plans.append(
            driver.plan(
                admit,
                prefill,
                skip={handles[pick] for pick in skip if pick < len(handles)},
                release=release,
                resume_after=resume_after,
            )
        )
        if len(self.plans) == WINDOW:
            self.run_oldest()

    @rule(num_steps=st.integers(1, 12), chunk=st.sampled_from([2, 7, 1 << 30]))
    def go_on(self, num_steps: int, chunk: int) -> None:
        for _ in range(num_steps):
            self.plan(num_admits=1, chunk=chunk, skip=set(), preempt=set())

    @precondition(lambda self: self.plans)
    @rule()
    def run_oldest(self) -> None:
        report = self.driver.run(self.plans.popleft())
        if report.status is StepStatus.FAILED:
            # No plan that is on its way says resume_after this step: all are skipped.
            while self.plans:
                assert self.driver.run(self.plans.popleft()).status is StepStatus.SKIPPED
            assert self.driver.failed_step == report.step

    @rule(pick=st.integers(0, 7), awaited=st.booleans())
    def cancel(self, pick: int, awaited: bool) -> None:
        handles = list(self.driver.awaited if awaited else self.driver.on_worker)
        if pick < len(handles):
            self.driver.cancel(handles[pick], 10**6)
            wanted = self.driver.awaited if awaited else self.driver.on_worker
            self.requests = [r for r in self.requests if r is not wanted[handles[pick]]]

    @rule(kinds=st.lists(st.sampled_from("-fmb"), min_size=1, max_size=6))
    def fail(self, kinds: list[str]) -> None:
        """Let the next attempts pass, fail, run out of memory, or fail with a bug."""
        failures = {"f": StepFailed("no culprit"), "m": StepOutOfMemory("full"), "b": ValueError("bug")}
        self.driver.runner.failures.extend(failures.get(kind) for kind in kinds)

    @rule(polls=st.integers(1, 4), failures=st.lists(st.booleans(), max_size=2))
    def slow_copies(self, polls: int, failures: list[bool]) -> None:
        self.driver.runner.copy_polls = polls
        self.driver.runner.copy_failures.extend(StepFailed("copy") if fails else None for fails in failures)

    @rule(kind=st.sampled_from([FaultKind.ALLOCATION, FaultKind.EVICTION_RACE]), count=st.integers(1, 3))
    def inject(self, kind: FaultKind, count: int) -> None:
        self.faults.set([Fault(kind, count=count)])

    @rule(name=st.sampled_from("ab"), family=st.integers(0, 2), num_blocks=st.integers(0, 4))
    def pin(self, name: str, family: int, num_blocks: int) -> None:
        keys = self.driver.keys(PROMPTS[family][: 4 * num_blocks])
        assert self.driver.engine.pin(name, keys).wanted_blocks == num_blocks

    @rule(luck=st.integers(0, 5))
    def lose_the_scheduler(self, luck: int) -> None:
        """The stream ends: another one attaches, with the tokens that its clients have."""
        if luck == 5:
            self.plans.clear()
            self.driver.reattach()

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        driver = self.driver
        while self.plans:
            self.run_oldest()
        driver.runner.failures.clear()
        self.faults.set([])
        driver.run(driver.plan(release=list(driver.on_worker), resume_after=driver.failed_step))
        for one in self.requests:
            driver.finish(one)
            assert one.output == driver.expected(one)
        assert driver.engine.num_live == 0
        for name in "ab":
            driver.engine.unpin(name)
        driver.let_copies_land()
        pool = driver.engine.pool_report()
        assert pool.free + pool.evictable == driver.config.num_blocks
        assert pool.unused_slots == 0


def random_operation(machine: EngineMachine, rng: random.Random) -> None:
    """Make one operation, the frequent ones of a loaded worker more often."""
    draw = rng.random()
    picks = {rng.randrange(8) for _ in range(rng.randrange(3))}
    if draw < 0.2:
        machine.arrive(
            rng.randrange(3),
            rng.randint(1, 40),
            rng.randint(1, 20),
            rng.choice(list(Priority)),
            rng.random() < 0.5,
        )
    elif draw < 0.7:
        preempt = {rng.randrange(8)} if rng.random() < 0.2 else set()
        machine.plan(rng.randrange(3), rng.choice([1, 3, 9, 1 << 30]), picks, preempt)
    elif draw < 0.85:
        machine.go_on(rng.randint(1, 12), rng.choice([2, 7, 1 << 30]))
    elif draw < 0.9:
        machine.cancel(rng.randrange(8), rng.random() < 0.5)
    elif draw < 0.93:
        machine.fail(rng.choices("-fmb", k=rng.randint(1, 6)))
    elif draw < 0.95:
        machine.slow_copies(rng.randint(1, 4), [rng.random() < 0.5 for _ in range(3)])
    elif draw < 0.97:
        machine.inject(rng.choice([FaultKind.ALLOCATION, FaultKind.EVICTION_RACE]), rng.randint(1, 3))
    elif draw < 0.99:
        machine.pin(rng.choice("ab"), rng.randrange(3), rng.randrange(4))
    else:
        machine.lose_the_scheduler(5)


@pytest.mark.parametrize("seed", range(6))
def test_engine_under_random_load_loses_nothing_and_meets_every_case(seed: int) -> None:
    rng = random.Random(seed)
    machine = EngineMachine()
    machine.start(
        num_blocks=rng.randint(16, 24),
        num_host_blocks=16,
        max_num_seqs=4,
        promote_blocks_per_step=1 + seed % 2,
    )
    for _ in range(1500):
        random_operation(machine, rng)
    machine.teardown()
    met = machine.driver.met
    assert met >= {"OK", "FAILED", "SKIPPED", "STOP", "LENGTH", "released", "hit", "host hit"}
    assert met >= {"NO_BLOCK", "PROMOTING", "NO_BLOCKS", "MAX_NUM_SEQS"}
    runner = machine.driver.runner
    assert min(runner.blocks_in, runner.blocks_out, runner.failed_copies_in) > 0


EngineMachine.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
test_engine_under_any_plans_and_failures_loses_nothing = pytest.mark.slow(EngineMachine.TestCase)
