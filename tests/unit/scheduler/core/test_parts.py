"""The small parts: timers, prefix index, step times, load index, books of a worker."""

from __future__ import annotations

import random
from dataclasses import astuple, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from octavo.protocol.steps import FinishReason
from octavo.steptimes import StepTimes
from octavo_lab.sim import SimWorker

from scheduler_svc.core import CoreConfig
from scheduler_svc.core.fleet import LoadIndex
from scheduler_svc.core.placement import PrefixIndex
from scheduler_svc.core.steptime import StepTimeModel
from scheduler_svc.core.timers import RESOLUTION_S, TimerWheel
from tests.unit.scheduler.core.desk import Desk, worker

# Timers ------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.sampled_from(["arm", "disarm", "expire"]), st.integers(0, 5), st.floats(0.0, 2.0)),
        max_size=60,
    )
)
def test_timer_fires_once_never_early_and_at_most_a_bucket_late(steps: list[tuple[str, int, float]]) -> None:
    wheel: TimerWheel[int] = TimerWheel()
    armed: dict[int, float] = {}
    now = 0.0
    for action, key, value in steps:
        if action == "arm":
            wheel.arm(key, now + value)
            armed[key] = now + value
        elif action == "disarm":
            wheel.disarm(key)
            armed.pop(key, None)
        else:
            now += value
            for fired in wheel.expire(now):
                assert armed.pop(fired) <= now
            assert all(at > now - RESOLUTION_S for at in armed.values())
        assert len(wheel) == len(armed)
        due = wheel.next_at()
        assert (due is None) == (not armed)
        if due is not None:
            assert due <= min(armed.values()) + RESOLUTION_S


@given(st.floats(0.0, 1e9))
def test_timer_fires_by_its_own_wakeups_and_not_a_rounding_error_before_its_time(at: float) -> None:
    wheel: TimerWheel[str] = TimerWheel()
    wheel.arm("x", at)
    for _ in range(10):
        due = wheel.next_at()
        assert due is not None
        if wheel.expire(due):
            break
    assert at <= due <= at + 2 * RESOLUTION_S
    assert wheel.next_at() is None


def test_timers_that_come_and_go_leave_nothing_behind() -> None:
    wheel: TimerWheel[int] = TimerWheel()
    for index in range(100_000):
        now = index * 0.001
        wheel.arm(index, now + 10.0 ** (index % 9 - 2) + index * 0.0137)
        if index >= 100:
            wheel.disarm(index - 100)
        wheel.expire(now)
    assert len(wheel) <= 100
    assert wheel.num_slots < 400


# Prefix index ------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 6), st.booleans()), max_size=60),
)
def test_prefix_index_matches_what_workers_hold(events: list[tuple[int, int, int, bool]]) -> None:
    """Workers store chains from the head and evict from the tail, so what each holds is a prefix."""
    chains = [[bytes([chain, depth]) for depth in range(6)] for chain in range(4)]
    index = PrefixIndex()
    held: dict[tuple[str, int], int] = {}
    for number, chain, depth, stores in events:
        name = f"w{number}"
        had = held.get((name, chain), 0)
        if stores:
            index.add(name, chains[chain][: max(had, depth)])
            held[name, chain] = max(had, depth)
        else:
            index.discard(name, chains[chain][min(had, depth) :])
            held[name, chain] = min(had, depth)
        for each in range(4):
            depths = {w: held.get((w, each), 0) for w in ("w0", "w1", "w2")}
            deepest, holders = index.deepest(chains[each])
            assert deepest == max(depths.values())
            assert holders == ({w for w, d in depths.items() if d == deepest} if deepest else set())
            assert all(index.match(w, chains[each]) == d for w, d in depths.items())
    for name in ("w0", "w1", "w2"):
        index.forget(name)
    assert index._holders == {}


def test_request_finds_its_prefix_in_the_cache_that_a_worker_kept_over_a_broken_stream() -> None:
    desk = Desk()
    prompt = list(range(100))
    desk.submit(prompt, max_tokens=2)
    desk.finish()
    machine = desk.workers["w0"]
    desk.lose()
    desk.attach(machine)
    again = desk.submit(prompt, max_tokens=2)
    desk.finish()
    assert desk.ends[again, 0].cached_tokens == 96


def test_nothing_is_shared_with_prefix_caching_off_or_without_a_root_key() -> None:
    desk = Desk(prefix_caching=False)
    prompt = list(range(100))
    for _ in range(2):
        name = desk.submit(prompt, max_tokens=20)
    desk.finish()
    assert desk.ends[name, 0].cached_tokens == 0
    assert all(report.key_events.stored == () for report in desk.reports)


def test_output_is_published_as_it_fills_blocks_and_found_by_the_next_turn() -> None:
    desk = Desk(worker(num_blocks=128))
    prompt = list(range(40))
    first = desk.submit(prompt, max_tokens=60)
    desk.finish()
    said = desk.tokens[first, 0]
    second = desk.submit([*prompt, *said, 7, 8, 9], max_tokens=4)
    desk.finish()
    assert desk.ends[second, 0].cached_tokens >= 80


# Step times --------------------------------------------------------------------------------------


def test_step_time_model_learns_the_cost_of_each_part() -> None:
    truth = StepTimes.builtin()
    rng = random.Random(1)
    model = StepTimeModel()
    for _ in range(400):
        decodes, prefill = rng.randint(1, 32), rng.choice([0, 0, 64, 128, 256])
        context = decodes * rng.randint(50, 500)
        seconds = truth.seconds(decodes, context, prefill, prefill * prefill)
        model.observe(decodes, prefill, context, seconds)
    for decodes, prefill, context in ((8, 0, 2000), (16, 128, 4000), (1, 256, 100)):
        seconds = truth.seconds(decodes, context, prefill, prefill * prefill)
        assert model.predict(decodes, prefill, context) == pytest.approx(seconds, rel=0.1)
    tokens = model.prefill_tokens_within(0.05, 8, 2000)
    assert model.predict(8, tokens, 2000) == pytest.approx(0.05, rel=0.05)


def test_step_time_model_survives_a_long_steady_load() -> None:
    model = StepTimeModel()
    for _ in range(20000):
        model.observe(8, 0, 1000, 0.015)
    assert model.predict(8, 0, 1000) == pytest.approx(0.015, rel=1e-3)
    model.observe(8, 256, 1000, 0.080)
    for _ in range(50):
        model.observe(8, 256, 1000, 0.080)
    assert model.predict(8, 256, 1000) == pytest.approx(0.080, rel=0.1)
    assert model.predict(8, 0, 1000) == pytest.approx(0.015, rel=0.2)


def test_slow_newcomer_is_known_for_one_after_its_first_step() -> None:
    desk = Desk(worker("w0", max_num_seqs=1))
    for length in (100, 40, 250):
        desk.submit(length, max_tokens=8)
    desk.finish()
    slow = StepTimes(*(3.0 * seconds for seconds in astuple(StepTimes.builtin())))
    desk.attach(SimWorker(replace(worker("w1", max_num_batched_tokens=128), step_times=slow)))
    desk.submit(20, max_tokens=400)
    desk.answer("w0")
    desk.submit(200, max_tokens=4)
    pool = desk.core._models["sim"].pool
    known, new = (pool.workers[name] for name in ("w0", "w1"))

    def factor() -> float:
        times = [pool.times_of(one).predict(0, 128, 0) for one in (known, new)]
        return times[1] / times[0]

    assert factor() == 1.0, "nothing is known of it"
    desk.answer("w1")
    assert factor() == pytest.approx(3.0, rel=0.15)
    desk.finish()


def test_lead_grows_when_the_device_waited_and_shrinks_otherwise() -> None:
    desk = Desk()
    state = desk.state()
    start = state.pipeline.lead_s
    state.pipeline.adapt_lead(5000)
    assert state.pipeline.lead_s > start
    grown = state.pipeline.lead_s
    for _ in range(500):
        state.pipeline.adapt_lead(0)
    assert state.pipeline.lead_s < grown / 2


# Load index --------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 20), st.one_of(st.none(), st.floats(0, 10))), max_size=300))
def test_load_index_knows_the_least_loaded(changes: list[tuple[int, float | None]]) -> None:
    index = LoadIndex()
    loads: dict[str, float] = {}
    for number, load in changes:
        name = f"w{number}"
        if load is None:
            index.remove(name)
            loads.pop(name, None)
        else:
            index.update(name, load)
            loads[name] = load
        least = index.least(3)
        assert len(set(least)) == len(least)
        assert [loads[name] for name in least] == sorted(loads.values())[:3]


# Configuration -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"window": 0}, "window must be at least 1"),
        ({"watermark": 1.0}, r"watermark must be in \[0, 1\)"),
        ({"max_partial_prefills": 0}, "max_partial_prefills must be at least 1"),
    ],
)
def test_setting_that_cannot_work_is_refused(setting: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        CoreConfig(**setting)  # type: ignore[arg-type] # any setting may be wrong


def test_settings_of_the_scheduler_only_lower_a_workers_limits() -> None:
    desk = Desk(
        worker(max_num_seqs=8, max_num_batched_tokens=128), max_num_seqs=100, max_num_batched_tokens=64
    )
    assert (desk.state().max_num_seqs, desk.state().token_budget) == (8, 64)


def test_snapshot_shows_queues_and_workers() -> None:
    desk = Desk(worker(max_num_seqs=1))
    for _ in range(3):
        desk.submit(20, max_tokens=10)
    desk.tick(1.5)
    snapshot = desk.core.snapshot(desk.now)
    (queue,) = [queue for queue in snapshot.queues if queue.waiting]
    assert (queue.waiting, queue.waiting_tokens, queue.oldest_wait_s) == (2, 40, 1.5)
    (seen,) = snapshot.workers
    assert (seen.worker_id, seen.running, seen.max_num_seqs) == ("w0", 1, 1)


def test_request_with_an_adapter_runs_only_where_the_adapter_is() -> None:
    desk = Desk(worker("w0"))
    told: list[tuple[str, str]] = []
    desk.core.explain_to(lambda _, state, reason, __: told.append((state.worker_id, reason)))
    name = desk.submit(adapter="poet")
    assert desk.where(name) is None
    assert told == []

    other = desk.submit()
    assert (desk.where(other), desk.where(name)) == ("w0", None)
    assert set(told) == {("w0", "no_adapter")}

    desk.attach(SimWorker(worker("w1")), adapters=("critic", "poet"))
    assert desk.where(name) == "w1"
    assert [admit.adapter for plan in desk.plans["w1"] for admit in plan.admit] == ["poet"]
    desk.finish()
    assert desk.ends[name, 0].reason is FinishReason.LENGTH
