"""The simulator itself: time, step times, traces, the simulated worker, and a monitor that does object."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from octavo.protocol.steps import Admit, FinishReason, Plan, RefuseReason, StepStatus
from octavo.sampling import SamplingParams
from octavo.steptimes import StepTimes
from octavo_lab.sim import (
    EventLoop,
    Monitor,
    Recorder,
    SimCell,
    SimWorker,
    SimWorkerConfig,
    poisson,
    request_of,
)
from octavo_lab.sim.arrivals import gamma, prefix_keys
from octavo_lab.sim.audit import InvariantError
from octavo_lab.sim.tokens import stream_of, token_at
from octavo_lab.sim.worker import PlanFaultError
from octavo_lab.traces import TraceRequest

from scheduler_svc.core import EmitTokens, FinishChoice, SchedulerCore, SendPlan, TokenDelta
from scheduler_svc.core.config import CoreConfig

TIMES = StepTimes.builtin()


def small(**limits: int) -> SimWorker:
    sizes = {"num_blocks": 8, "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64, **limits}
    return SimWorker(SimWorkerConfig(worker_id="w", step_times=TIMES, **sizes))


def admit(handle: int, tokens: int, max_tokens: int = 4, keys: tuple[bytes, ...] = ()) -> Admit:
    sampling = SamplingParams(seed=handle, max_tokens=max_tokens)
    return Admit(handle, range(tokens), tokens, sampling, keys=keys)


# Time --------------------------------------------------------------------------------------------


def test_loop_runs_callbacks_by_time_and_those_of_one_moment_in_order() -> None:
    loop = EventLoop()
    seen: list[tuple[str, float]] = []
    for name, at in (("c", 2.0), ("a", 1.0), ("b", 1.0)):
        loop.at(at, lambda name=name: seen.append((name, loop.now)))  # type: ignore[misc] # bound by default
    loop.run(until=1.5)
    assert (seen, loop.now) == ([("a", 1.0), ("b", 1.0)], 1.5)
    loop.run()
    assert seen[-1] == ("c", 2.0)


# Arrivals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cv", [1.0, 3.0])
def test_gaps_have_the_rate_and_the_burstiness_asked_for(cv: float) -> None:
    times = gamma(5.0, cv, random.Random(1))
    at = [next(times) for _ in range(20000)]
    gaps = [b - a for a, b in itertools.pairwise(at)]
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.1)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(cv, rel=0.15)
    assert next(poisson(5.0, random.Random(1))) > 0.0


def test_prefix_hashes_become_keys_that_are_equal_where_the_prompts_are() -> None:
    first, second = TraceRequest(0.0, 1100, 5, (0, 1, 2)), TraceRequest(2.5, 1030, 1, (0, 1, 9))
    one, two = prefix_keys(first, 64), prefix_keys(second, 64)
    assert (len(one), len(two)) == (17, 16)
    assert one[:16] == two
    assert len(set(one)) == 17


def test_hash_of_divided_lengths_stands_for_fewer_tokens() -> None:
    request = TraceRequest(0.0, 1100 // 8, 5, (0, 1, 2))
    assert len(prefix_keys(request, 16, scale=8)) == 137 // 16
    assert request_of(request, "r", 1, 16, 8).prompt_keys == prefix_keys(request, 16, scale=8)


# The simulated worker ----------------------------------------------------------------------------


def test_simulated_worker_admits_prefills_decodes_and_ends() -> None:
    machine = small()
    report = machine.run(Plan(1, admit=(admit(1, 20, 3),), prefill=((1, 15),)))
    assert (report.prefilled, report.token_handles, report.live_count) == (((1, 15),), [], 1)
    report = machine.run(Plan(2, prefill=((1, 64),)))
    assert (report.prefilled, report.first_positions) == (((1, 5),), [20])
    report = machine.run(Plan(3))
    assert (report.first_positions, report.digest) == ([21], 22)
    report = machine.run(Plan(4))
    assert [(f.handle, f.reason) for f in report.finished] == [(1, FinishReason.LENGTH)]
    assert machine.quiet


def test_simulated_worker_refuses_what_does_not_fit_and_skips_after_a_failure() -> None:
    machine = small()
    report = machine.run(Plan(1, admit=(admit(1, 60), admit(2, 63), admit(3, 60)), prefill=((1, 60),)))
    assert [(r.handle, r.reason) for r in report.refused] == [(3, RefuseReason.NO_BLOCKS)]
    machine.step_fault = lambda seeds: (
        __import__("octavo.protocol.steps").protocol.steps.StepError((), "X", ""),
    )
    assert machine.run(Plan(2)).status is StepStatus.FAILED
    report = machine.run(Plan(3, release=(1,), admit=(admit(4, 5),)))
    assert (report.status, report.released, report.admitted) == (StepStatus.SKIPPED, (1,), ())
    machine.step_fault = lambda seeds: ()
    assert machine.run(Plan(4, resume_after=2)).status is StepStatus.OK


def test_simulated_worker_shares_and_evicts_published_blocks() -> None:
    machine = small()
    keys = (b"a" * 16, b"b" * 16)
    report = machine.run(Plan(1, admit=(admit(1, 40, 1, keys),), prefill=((1, 40),)))
    assert report.key_events.stored == keys
    assert (report.pool.free, report.pool.evictable) == (6, 2)
    report = machine.run(Plan(2, admit=(admit(2, 40, 1, keys),)))
    assert report.admitted[0].cached_tokens == 32
    report = machine.run(Plan(3, release=(2,), admit=(admit(3, 63, 1), admit(4, 63, 1))))
    assert report.key_events.evicted == (keys[1], keys[0]), "the tail of a chain goes first"


@pytest.mark.parametrize("plan", [Plan(2), Plan(1, admit=(admit(2, 5), admit(1, 5)))])
def test_plan_that_breaks_the_protocol_is_a_fault(plan: Plan) -> None:
    with pytest.raises(PlanFaultError):
        small().run(plan)


@given(st.integers(0, 2**64), st.integers(0, 10**6))
def test_neighbouring_tokens_differ_so_that_a_shift_shows(stream: int, position: int) -> None:
    assert token_at(stream, position) != token_at(stream, position + 1)


# The monitor objects -----------------------------------------------------------------------------


def watched() -> tuple[SchedulerCore, Monitor]:
    core = SchedulerCore(CoreConfig())
    monitor = Monitor(core)
    spec = request_of(TraceRequest(0.0, 10, 4), "r", 1)
    monitor.submitted(spec, 0.0)
    monitor.effects(core.submit(spec, 0.0), 0.0)
    return core, monitor


def test_monitor_objects_to_a_token_that_is_lost_repeated_or_nobodys() -> None:
    right = [token_at(stream_of(1, 0), position) for position in range(10, 14)]
    for wrong in ([right[1]], [right[0], right[0]], [right[0], right[2]], [*right, 5]):
        _, monitor = watched()
        with pytest.raises(InvariantError):
            monitor.effects([EmitTokens([TokenDelta("r", 0, tuple(wrong), None)])], 0.0)
    _, monitor = watched()
    with pytest.raises(InvariantError, match="never submitted"):
        monitor.effects([EmitTokens([TokenDelta("other", 0, (1,), None)])], 0.0)


def test_monitor_objects_to_a_second_end_and_to_open_accounts() -> None:
    core, monitor = watched()
    effects = core.cancel("r", 0.0)
    monitor.effects(effects, 0.0)
    (end,) = [effect for effect in effects if isinstance(effect, FinishChoice)]
    with pytest.raises(InvariantError, match="has ended"):
        monitor.effects([end], 0.0)
    core, monitor = watched()
    core._lifecycle.arrivals += 1
    with pytest.raises(InvariantError, match="2 arrivals"):
        monitor.effects([], 0.0)


def test_monitor_objects_to_a_gap_in_plans() -> None:
    _, monitor = watched()
    with pytest.raises(InvariantError, match="plan 2 after 0"):
        monitor.effects([SendPlan("w", Plan(2))], 0.0)


# All of it ---------------------------------------------------------------------------------------


def test_recorder_shows_a_run_as_its_clients_saw_it() -> None:
    core = SchedulerCore(CoreConfig())
    recorder = Recorder(gaps=True)
    cell = SimCell(
        core, [SimWorkerConfig(worker_id="w", step_times=TIMES)], observers=[recorder, Monitor(core)]
    )
    for index in range(20):
        cell.submit_at(index * 0.05, request_of(TraceRequest(0.0, 50 + index, 10), f"r{index}", index))
    cell.loop.run()
    assert len(recorder.completed) == 20
    assert len(recorder.token_gaps_s) == 20 * 9
    for result in recorder.completed:
        assert result.ttft_s is not None
        assert result.tpot_s is not None
        assert result.tpot_s > TIMES.seconds(1, 50)
        assert result.ended_at == result.last_token_at
