"""The order of the queue: classes, turns of aged classes, policies, and the bound on anybody's wait."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from octavo.protocol.steps import Priority
from octavo.sampling import SamplingParams

from scheduler_svc.config import SchedulerSettings
from scheduler_svc.core import CoreConfig, NewRequest
from scheduler_svc.core.events import AdmissionRequest
from scheduler_svc.core.policies import POLICIES
from scheduler_svc.core.policies.base import Charges
from scheduler_svc.core.policies.fair import VirtualTokenCounters
from scheduler_svc.core.policies.fcfs import Fcfs
from scheduler_svc.core.request import Request, Sequence
from scheduler_svc.core.waiting import WaitingQueue
from tests.unit.scheduler.core.desk import HIGH, LOW, NORMAL, Desk, worker


def waiting(arrival: float = 0.0, prompt: int = 10, **fields: Any) -> Sequence:
    spec = NewRequest(
        request_id=f"{arrival}",
        model="m",
        prompt_token_ids=range(prompt),
        sampling=SamplingParams(n=1, seed=1, max_tokens=4),
        **fields,
    )
    return Request.from_spec(spec, arrival, None).sequences[0]


def queue_of(
    *sequences: Sequence, charges: VirtualTokenCounters | None = None, **config: Any
) -> WaitingQueue:
    queue = WaitingQueue(CoreConfig(**config), charges or Charges())
    for sequence in sequences:
        queue.push(sequence)
    return queue


def test_fcfs_serves_higher_classes_first_and_by_arrival_within_a_class() -> None:
    low, normal, high, later = (
        waiting(0, priority=LOW),
        waiting(1, priority=NORMAL),
        waiting(2, priority=HIGH),
        waiting(3, priority=HIGH),
    )
    assert list(queue_of(low, normal, high, later).order(4)) == [high, later, normal, low]


def test_sequence_that_ran_before_goes_ahead_of_its_class_by_arrival() -> None:
    first, second, fresh = waiting(5), waiting(3), waiting(1)
    queue = queue_of(fresh)
    queue.push_front(first)
    queue.push_front(second)
    assert list(queue.order(6)) == [second, first, fresh]


@pytest.mark.parametrize("policy", ["fcfs", "edf", "srf"])
def test_lower_order_goes_first_until_others_have_waited_too_long(policy: str) -> None:
    early, urgent, late = waiting(0), waiting(1, order=-2), waiting(2, order=7)
    queue = queue_of(early, late, urgent, policy=policy, starvation_age_s=30.0)

    assert list(queue.order(3)) == [urgent, early, late]
    assert queue.ahead_of(AdmissionRequest(order=-3), 3)[0] == 0
    assert queue.ahead_of(AdmissionRequest(order=0, prompt_tokens=99), 3)[0] == 2
    assert list(queue.order(30)) == [early, urgent, late]
    assert queue.ahead_of(AdmissionRequest(order=-3), 30)[0] == 1


def test_fair_orders_only_the_requests_of_each_tenant() -> None:
    mine, pushy, hurried = (
        waiting(0, tenant="a"),
        waiting(1, tenant="b", order=-9),
        waiting(2, tenant="a", order=-1),
    )
    queue = queue_of(
        mine, pushy, hurried, charges=VirtualTokenCounters({}), policy="fair", starvation_age_s=30.0
    )

    assert list(queue.order(3)) == [hurried, pushy, mine]


def test_queue_counts_its_fresh_sequences_and_tokens_through_every_move() -> None:
    one, two = waiting(0, prompt=30), waiting(1, prompt=12)
    queue = queue_of(one, two)
    assert (len(queue), queue.num_fresh, queue.num_tokens) == (2, 2, 42)
    queue.start(one, on_turn=False)
    one.history.started_at = 2.0
    queue.push_front(one)
    assert (len(queue), queue.num_fresh, queue.num_tokens) == (2, 1, 42)
    queue.remove(two)
    queue.remove(one)
    assert (len(queue), queue.num_fresh, queue.num_tokens) == (0, 0, 0)


def test_every_stride_th_start_is_a_turn_of_the_class_that_has_waited_past_its_aging_time() -> None:
    high = [waiting(50 + i, priority=HIGH) for i in range(9)]
    low = [waiting(i, priority=LOW) for i in range(3)]
    queue = queue_of(*high, *low, aging_stride=4, aging_s={HIGH: 1.0, NORMAL: 10.0, LOW: 60.0})
    order = list(queue.order(100.0))
    assert [s.request.priority for s in order] == [HIGH] * 3 + [LOW] + [HIGH] * 3 + [LOW] + [HIGH] * 3 + [LOW]


def test_turns_are_counted_across_plans_and_a_start_out_of_turn_does_not_spend_one() -> None:
    high = [waiting(50 + i, priority=HIGH) for i in range(20)]
    low = [waiting(i, priority=LOW) for i in range(2)]
    queue = queue_of(*high, *low, aging_stride=4, aging_s={HIGH: 1.0, NORMAL: 10.0, LOW: 60.0})
    taken = []
    for _ in range(8):
        turns: set[Sequence] = set()
        head = next(queue.order(100.0, turns))
        queue.start(head, on_turn=head in turns)
        taken.append(head.request.priority)
    assert taken == [HIGH, HIGH, HIGH, LOW] * 2


def test_class_that_is_not_old_enough_gets_no_turn() -> None:
    high = [waiting(50 + i, priority=HIGH) for i in range(8)]
    queue = queue_of(*high, waiting(90, priority=LOW))
    assert [s.request.priority for s in queue.order(100.0)][:8] == [HIGH] * 8


def test_turn_goes_to_the_class_whose_time_came_first() -> None:
    aging = {HIGH: 1.0, NORMAL: 10.0, LOW: 60.0}
    high = [waiting(99, priority=HIGH) for _ in range(8)]
    normal, low = waiting(85, priority=NORMAL), waiting(30, priority=LOW)
    order = list(queue_of(*high, normal, low, aging_s=aging, aging_stride=2).order(100.0))
    assert order[1] is low, "due at 90, the other at 95"
    assert order[3] is normal


@pytest.mark.parametrize("seed", range(20))
def test_wait_of_any_sequence_under_a_constant_stream_of_higher_ones_is_bounded(seed: int) -> None:
    """docs/scheduler.md: from its due time, at most stride * (1 + those due before it) starts."""
    rng = random.Random(seed)
    stride = rng.randint(2, 6)
    aging = {HIGH: 0.5, NORMAL: 3.0, LOW: 9.0}
    queue = queue_of(aging_stride=stride, aging_s=aging)
    now, starts = 0.0, 0
    due: dict[Sequence, tuple[int, int]] = {}
    """Starts at the due time, and the bound counted from then."""
    known: list[Sequence] = []
    worst = 0.0
    while starts < 1500:
        now += 0.05
        for _ in range(rng.choice([0, 1, 1, 2])):
            known.append(waiting(now, priority=HIGH))
            queue.push(known[-1])
        if rng.random() < 0.15:
            known.append(waiting(now, priority=rng.choice([NORMAL, LOW])))
            queue.push(known[-1])
        for sequence in known:
            when = sequence.request.arrival + aging[sequence.request.priority]
            if sequence not in due and when <= now and sequence.request.priority is not HIGH:
                ahead = sum(o.request.arrival + aging[o.request.priority] <= when for o in known) - 1
                due[sequence] = (starts, stride * (1 + ahead))
        turns: set[Sequence] = set()
        started = [s for s, _ in zip(queue.order(now, turns), range(rng.choice([0, 1, 3])), strict=False)]
        for sequence in started:
            queue.start(sequence, on_turn=sequence in turns)
            known.remove(sequence)
            starts += 1
            if sequence in due:
                since, bound = due.pop(sequence)
                worst = max(worst, (starts - since) / bound)
    assert worst <= 1.0
    assert all(starts - since <= bound for since, bound in due.values())


def test_edf_serves_the_earliest_deadline_and_nobody_waits_for_what_comes_much_later() -> None:
    far, near, none = waiting(0, deadline=500.0), waiting(1, ttft_deadline=6.0), waiting(2)
    queue = queue_of(far, near, none, policy="edf", starvation_age_s=30.0)
    assert list(queue.order(3)) == [near, far, none]
    queue.push(waiting(40.0, deadline=41.0))
    assert next(queue.order(41)) is near
    queue.remove(near)
    assert list(queue.order(41))[:2] == [far, none], "31 s old: as good as a deadline of 30 s"


def test_srf_serves_the_least_work_and_whoever_has_waited_too_long_before_that() -> None:
    long, short, middle = waiting(0, prompt=300), waiting(1, prompt=10), waiting(2, prompt=80)
    queue = queue_of(long, short, middle, policy="srf", starvation_age_s=30.0)
    assert list(queue.order(29)) == [short, middle, long]
    assert list(queue.order(30)) == [long, short, middle]


def test_srf_counts_what_may_be_generated_and_tells_newcomers_how_many_go_before_them() -> None:
    desk = Desk(worker(max_num_seqs=1), policy="srf", window=1, starvation_age_s=1e6)
    desk.submit(20, max_tokens=40)
    talker, reader = desk.submit(10, max_tokens=60), desk.submit(50, max_tokens=4)
    queue = desk.core._models["sim"].pool.queue
    asked = {
        n: queue.ahead_of(AdmissionRequest(prompt_tokens=n, max_tokens=4), desk.now) for n in (9, 60, 90)
    }
    assert {n: ahead for n, (ahead, _) in asked.items()} == {9: 0, 60: 1, 90: 2}
    desk.finish()
    assert desk.ends[reader, 0].timings.queue_s < desk.ends[talker, 0].timings.queue_s


def test_fair_serves_the_tenant_that_has_got_least_and_charges_within_a_pass() -> None:
    charges = VirtualTokenCounters({})
    charges.join("a")
    charges.join("b")
    charges.charge("a", 15.0)
    a = [waiting(i, tenant="a") for i in range(4)]
    b = [waiting(10 + i, tenant="b") for i in range(4)]
    queue = queue_of(*a, *b, charges=charges, policy="fair")
    assert list(queue.order(20)) == [b[0], b[1], a[0], b[2], a[1], b[3], a[2], a[3]]


def test_fair_lets_a_flood_that_has_waited_long_go_no_faster() -> None:
    charges = VirtualTokenCounters({})
    charges.join("flood")
    charges.join("other")
    charges.charge("flood", 1000.0)
    flood = [waiting(i, tenant="flood") for i in range(50)]
    other = waiting(900.0, tenant="other")
    queue = queue_of(*flood, other, charges=charges, policy="fair")
    assert next(queue.order(901.0)) is other


def test_fair_weighs_tenants_also_within_a_pass() -> None:
    charges = VirtualTokenCounters({"heavy": 3.0})
    charges.join("heavy")
    charges.join("light")
    heavy = [waiting(i, tenant="heavy") for i in range(8)]
    light = [waiting(i, tenant="light") for i in range(8)]
    order = list(queue_of(*heavy, *light, charges=charges, policy="fair").order(20))
    assert sum(s.request.tenant == "heavy" for s in order[:8]) == 6


def test_counters_lift_a_tenant_that_comes_back_so_that_idling_earns_nothing() -> None:
    charges = VirtualTokenCounters({})
    charges.join("busy")
    charges.charge("busy", 500.0)
    charges.join("newcomer")
    assert charges.level("newcomer") == 500.0
    charges.leave("newcomer")
    charges.charge("busy", 100.0)
    charges.join("newcomer")
    assert charges.level("newcomer") == 600.0


def test_counters_of_tenants_without_work_are_forgotten_unless_they_are_ahead() -> None:
    charges = VirtualTokenCounters({})
    charges.join("busy")
    charges.charge("busy", 10.0)
    charges.join("ahead")
    charges.charge("ahead", 1000.0)
    charges.leave("ahead")
    for index in range(1000):
        charges.join(f"t{index}")
        charges.leave(f"t{index}")
    assert len(charges._levels) < 200
    assert charges.level("ahead") == 1010.0


def test_fair_charges_what_is_admitted_at_once_and_refunds_what_was_not_computed() -> None:
    desk = Desk(worker(max_num_batched_tokens=64, max_num_seqs=1), policy="fair", window=1)
    name = desk.submit(200, max_tokens=4, tenant="a")
    pool = desk.core._models["sim"].pool
    assert pool.charges.level("a") == 200.0
    desk.submit(20, tenant="b")
    desk.answer()
    desk.cancel(name)
    assert pool.charges.level("a") == 64.0, "one chunk was computed"
    desk.finish()


def test_fair_discounts_cached_prompt_tokens() -> None:
    desk = Desk(worker(num_blocks=128), policy="fair")
    prompt = list(range(160))
    desk.submit(prompt, max_tokens=2, tenant="first")
    desk.submit(20, max_tokens=400, tenant="keeps")
    while desk.core.find("r1") is not None:
        desk.answer()
    pool = desk.core._models["sim"].pool
    before = pool.charges.level("keeps")
    desk.submit([*prompt, 1, 2], max_tokens=100, tenant="second")
    desk.answer()
    assert pool.charges.level("second") - before < 12, "2 prompt tokens and a few of output"
    desk.finish()


class LastCome(Fcfs):
    """A policy that only `POLICIES` knows."""

    charges_tenants = True

    def order(self, now: float) -> Iterator[Sequence]:
        return reversed(list(super().order(now)))


def test_policy_that_is_only_registered_is_a_setting_orders_and_charges(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(POLICIES, "last_come", LastCome)
    policy = SchedulerSettings.load({"policy": "last_come"}).core_config().policy
    desk = Desk(worker(max_num_seqs=1), policy=policy, window=1)
    desk.submit(20, max_tokens=4)
    early, late = desk.submit(20, max_tokens=4, tenant="a"), desk.submit(20, max_tokens=4, tenant="b")
    while desk.core.find(late) is not None:
        desk.answer()
    assert desk.sequence(early).num_output_tokens == 0
    assert desk.core._models["sim"].pool.charges.level("b") >= 20
    desk.finish()


def test_every_priority_has_a_queue() -> None:
    assert set(queue_of().classes) == set(Priority)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(5))
def test_policy_yields_each_that_waits_once_and_counts_no_more_than_those_ahead(
    policy: str, seed: int
) -> None:
    rng = random.Random(seed)
    charges = VirtualTokenCounters({})
    queue = queue_of(charges=charges, policy=policy, starvation_age_s=5.0)
    known: list[Sequence] = []
    for step in range(200):
        now = step * 0.1
        if known and rng.random() < 0.45:
            queue.remove(known.pop(rng.randrange(len(known))))
        else:
            deadline = rng.choice([None, now + rng.uniform(0, 9)])
            tenant = rng.choice("abc")
            charges.join(tenant)
            known.append(waiting(now, prompt=rng.randint(1, 99), tenant=tenant, deadline=deadline))
            queue.push(known[-1])
        order = list(queue.order(now))
        assert sorted(map(id, order)) == sorted(map(id, known))
        assert list(queue.order(now)) == order, "to ask changes nothing"
        count, tokens = queue.ahead_of(AdmissionRequest(tenant="a", prompt_tokens=50, max_tokens=4), now)
        assert 0 <= count <= len(known)
        assert 0 <= tokens <= queue.num_tokens
