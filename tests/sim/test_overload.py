"""Overload in simulation: the real core on virtual time, with books that are audited at every event."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from octavo.protocol.steps import Priority
from octavo.steptimes import StepTimes
from octavo_lab.sim import Monitor, Recorder, SimCell, SimResult, SimWorkerConfig, poisson, request_of
from octavo_lab.sim.chaos import Chaos
from octavo_lab.traces import TraceRequest

from scheduler_svc.core import CoreConfig, Effect, LogEvent, NewRequest, RequestAccepted, SchedulerCore
from scheduler_svc.core.overload import OverloadConfig
from scheduler_svc.core.policies import POLICIES

TIMES = StepTimes.builtin()
CAPACITY_PER_S = 10.0
"""Of one worker with 16 places, for this traffic; measured with always more than it can take."""
TTFT_S = 1.5
TIMEOUT_S = {Priority.INTERACTIVE: 1.5, Priority.STANDARD: 30.0, Priority.BATCH: None}


class Watch:
    """Notes levels and promises."""

    def __init__(self) -> None:
        self.levels: list[tuple[float, int]] = []
        self.fields: list[dict[str, object]] = []
        self.promised: dict[str, float] = {}

    def submitted(self, spec: NewRequest, now: float) -> None:
        """Nothing is asked."""

    def effects(self, effects: list[Effect], now: float) -> None:
        for effect in effects:
            if isinstance(effect, LogEvent) and effect.name == "level_changed":
                self.levels.append((now, int(str(effect.fields["new_level"]))))
                self.fields.append(effect.fields)
            elif isinstance(effect, RequestAccepted) and effect.estimated_ttft_s is not None:
                self.promised[effect.request_id] = effect.estimated_ttft_s


class Run:
    """Phases of Poisson traffic on one worker, to the end."""

    def __init__(
        self,
        *phases: tuple[float, float],
        terms: Callable[[random.Random, float], dict[str, Any]],
        seed: int = 5,
        **config: Any,
    ) -> None:
        self.watch, self.recorder = Watch(), Recorder()
        core = SchedulerCore(CoreConfig(**{"overload": OverloadConfig(), **config}))
        worker = SimWorkerConfig(worker_id="w0", step_times=TIMES, max_num_seqs=16)
        monitor = Monitor(core, audit_every=500)
        cell = SimCell(core, [worker], observers=[self.recorder, self.watch, monitor])
        rng, began, number = random.Random(seed), 0.0, 0
        for seconds, load in phases:
            times = poisson(load * CAPACITY_PER_S, rng)
            for offset in itertools.takewhile(lambda at, end=seconds: at < end, times):  # type: ignore[misc]
                at = began + offset
                spec = request_of(
                    TraceRequest(0, rng.randint(40, 160), rng.randint(20, 100)), f"r{number}", number
                )
                cell.submit_at(at, replace(spec, **terms(rng, at)))
                number += 1
            began += seconds
        cell.loop.run()
        self.ended_at = cell.loop.now

    def between(self, start: float, end: float) -> list[SimResult]:
        return [one for one in self.recorder.results.values() if start <= one.arrival < end]

    def served(self, start: float, end: float) -> list[SimResult]:
        """Return those that came and had their first token in between: the rest of the queue came later."""
        return [one for one in self.between(start, end) if (one.first_token_at or end) < end]

    def good_per_s(self, start: float, end: float) -> float:
        good = [one for one in self.between(start, end) if one.completed and (one.ttft_s or 0.0) <= TTFT_S]
        return len(good) / (end - start)


def interactive(_: random.Random, at: float) -> dict[str, Any]:
    return {"priority": Priority.INTERACTIVE, "queue_deadline": at + TTFT_S, "ttft_deadline": at + TTFT_S}


def mixed(rng: random.Random, at: float) -> dict[str, Any]:
    priority = rng.choice(list(Priority))
    timeout = TIMEOUT_S[priority]
    return {"priority": priority, "queue_deadline": at + timeout if timeout else None}


def test_goodput_at_twice_the_capacity_is_no_less_than_below_it_and_comes_back_within_ten_seconds() -> None:
    run = Run((20, 0.9), (30, 2.0), (20, 0.5), terms=interactive)
    below, above = run.good_per_s(5, 20), run.good_per_s(25, 50)
    assert above >= 0.9 * below
    outcomes = Counter(one.outcome for one in run.between(20, 50))
    # Refused at the door rather than expired after a wait.
    assert outcomes["DEADLINE_INFEASIBLE"] > 5 * (outcomes["QUEUE_TIMEOUT"] + outcomes["TTFT_DEADLINE"])
    assert max(level for _, level in run.watch.levels) >= 2
    back_at, level = [(at, level) for at, level in run.watch.levels if at > 50][-1]
    assert level == 0
    assert back_at < 60
    assert all((one.ttft_s or 9.0) < 0.5 for one in run.between(54, 70))


def test_promises_come_true_within_a_fraction_of_a_second_on_average() -> None:
    run = Run((20, 0.8), (20, 1.5), terms=interactive)
    errors = [
        abs(one.ttft_s - run.watch.promised[one.request_id])
        for one in run.recorder.results.values()
        if one.ttft_s is not None and one.request_id in run.watch.promised
    ]
    assert len(errors) > 200
    assert sum(errors) / len(errors) < 0.15


def test_flood_of_every_class_keeps_the_higher_ones_served_and_logs_why_each_level_came() -> None:
    run = Run((10, 0.5), (40, 4.0), (30, 0.2), terms=mixed, max_waiting_requests=100)
    served = {
        priority: sum(one.completed for one in run.served(10, 50) if one.priority is priority)
        / sum(one.priority is priority for one in run.between(10, 50))
        for priority in Priority
    }
    assert served[Priority.INTERACTIVE] > served[Priority.STANDARD] > served[Priority.BATCH]
    levels = [level for _, level in run.watch.levels]
    assert max(levels) >= 3
    assert levels[-1] == 0
    assert all(abs(later - earlier) == 1 for earlier, later in itertools.pairwise([0, *levels]))
    assert {"cause", "backlog", "wait", "misses"} <= set.intersection(*map(set, run.watch.fields))
    # A level is a state, not a flicker: on average it lasts for seconds.
    assert len(levels) < 80 / 2


@pytest.mark.parametrize("policy", POLICIES)
def test_faults_of_every_kind_break_no_promise_of_a_core_that_degrades(policy: str) -> None:
    config = CoreConfig(
        step_watchdog_s=2.0, max_waiting_requests=12, policy=policy, overload=OverloadConfig(stall_s=1.0)
    )
    result = Chaos(SchedulerCore(config), seed=11).run(2500)
    assert result.steps >= 2500


def interactive_p99_s(backlog: int) -> float:
    """Return the P99 TTFT of interactive requests in front of a backlog of the batch class."""
    recorder = Recorder()
    core = SchedulerCore(CoreConfig(max_waiting_requests=20_000, overload=OverloadConfig()))
    worker = SimWorkerConfig(worker_id="w0", step_times=TIMES, max_num_seqs=16)
    cell = SimCell(core, [worker], observers=[recorder])
    for number in range(backlog):
        cell.submit(
            replace(request_of(TraceRequest(0, 64, 200), f"b{number}", number), priority=Priority.BATCH)
        )
    for number, at in enumerate(itertools.takewhile(lambda at: at < 60.0, poisson(4.0, random.Random(3)))):
        spec = request_of(TraceRequest(0, 80, 12), f"i{number}", 10**6 + number)
        cell.submit_at(1.0 + at, replace(spec, **interactive(random.Random(0), 1.0 + at)))
    cell.loop.run(until=64.0)
    waits = [one.ttft_s for one in recorder.results.values() if one.priority is Priority.INTERACTIVE]
    assert all(wait is not None for wait in waits)
    assert sum(len(lane) for lane in core._models["sim"].pool.queue.classes.values()) > backlog / 3
    return sorted(wait for wait in waits if wait is not None)[int(0.99 * len(waits))]


def test_interactive_requests_do_not_feel_how_long_the_batch_backlog_is() -> None:
    assert interactive_p99_s(10_000) <= 1.25 * interactive_p99_s(500)
