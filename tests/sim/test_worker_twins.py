"""The simulated worker against the real engine: the same plans, and every report must be the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from octavo.protocol.steps import Plan, PoolReport, Report, StepError
from octavo_lab.sim import SimWorker, SimWorkerConfig
from octavo_lab.sim.chaos import CHAOS, CHAOS_CONFIG, Chaos, ChaosSetting, chaos_workers
from octavo_lab.sim.faults import FaultRates
from octavo_lab.sim.worker import StepFault, WorkerCrashedError, no_fault

from scheduler_svc.core import CoreConfig, SchedulerCore, StaticConfig, WorkerInfo
from tests.sim.engine_machine import EngineMachine

LISTS = ("admitted", "refused", "released", "stalled", "finished", "errors", "prefilled")


class OneTier(EngineMachine):
    num_host_blocks = 0


class Twins:
    """A `StepMachine` that runs every plan on both, and compares what they say."""

    def __init__(self, config: SimWorkerConfig) -> None:
        self._twins = SimWorker(config), OneTier(config)
        self._faults: dict[frozenset[int], tuple[StepError, ...] | None] = {}
        """Of this step, by what was computed; None is a crash."""
        self.step_fault: StepFault = no_fault
        self.seen: Counter[str] = Counter()
        for twin in self._twins:
            twin.step_fault = self._one_fault

    def _one_fault(self, seeds: frozenset[int]) -> tuple[StepError, ...]:
        """Let the same go wrong with both."""
        if seeds not in self._faults:
            try:
                errors = self.step_fault(seeds)
                # Named culprits the engine leaves out, and the simulated worker does not.
                self._faults[seeds] = tuple(replace(error, handles=()) for error in errors)
            except WorkerCrashedError:
                self._faults[seeds] = None
        fault = self._faults[seeds]
        if fault is None:
            raise WorkerCrashedError
        return fault

    def _same(self, question: Callable[[Any], Any]) -> Any:
        ours, theirs = map(question, self._twins)
        assert ours == theirs
        return ours

    def run(self, plan: Plan, bubble_us: int = 0) -> Report:
        self._faults.clear()
        reports: list[Report] = []
        crashes = 0
        for twin in self._twins:
            try:
                reports.append(twin.run(plan, bubble_us))
            except WorkerCrashedError:
                crashes += 1
        if crashes:
            assert (crashes, reports) == (2, [])
            raise WorkerCrashedError
        ours, theirs = map(comparable, reports)
        assert ours == theirs
        if not reports[0].errors:
            assert reports[0].timing.execute_us == pytest.approx(reports[1].timing.execute_us, abs=1)
        for name in LISTS:
            self.seen[name] += len(ours[name])
        self.seen["stored"] += len(ours["key_events"][0])
        self.seen["evicted"] += len(ours["key_events"][1])
        return reports[0]

    def welcome(self) -> WorkerInfo:
        def told(twin: Any) -> WorkerInfo:
            info: WorkerInfo = twin.welcome()
            pool = PoolReport(info.pool.free, info.pool.evictable, info.pool.active)
            return replace(info, pool=pool, device_keys=tuple(sorted(info.device_keys)))

        self._same(told)
        return self._twins[0].welcome()

    def restart(self) -> None:
        self._same(lambda twin: twin.restart())

    def cancel(self, handles: tuple[int, ...]) -> None:
        self._same(lambda twin: twin.cancel(handles))

    def has(self, seed: int, choice: int) -> bool:
        return bool(self._same(lambda twin: twin.has(seed, choice)))

    def handles_of(self, seeds: frozenset[int]) -> tuple[int, ...]:
        # Asked in the middle of a step, when the other has not come so far.
        return self._twins[0].handles_of(seeds)

    @property
    def num_seqs(self) -> int:
        return int(self._same(lambda twin: twin.num_seqs))

    @property
    def quiet(self) -> bool:
        return bool(self._same(lambda twin: twin.quiet))

    @property
    def draining(self) -> bool:
        return bool(self._same(lambda twin: twin.draining))

    @draining.setter
    def draining(self, value: bool) -> None:
        for twin in self._twins:
            twin.draining = value

    @property
    def refuse_next(self) -> int:
        return int(self._same(lambda twin: twin.refuse_next))

    @refuse_next.setter
    def refuse_next(self, value: int) -> None:
        for twin in self._twins:
            twin.refuse_next = value


def comparable(report: Report) -> dict[str, Any]:
    """Return what a scheduler goes by; the order within a step says nothing."""
    pool, timing, keys = report.pool, report.timing, report.key_events
    return {
        "step": report.step,
        "status": report.status,
        "pool": (pool.free, pool.evictable, pool.active),
        "live": (report.live_count, report.digest),
        "tokens": sorted(zip(report.token_handles, report.first_positions, report.token_ids, strict=True)),
        "finished": sorted(report.finished, key=lambda one: one.handle),
        "stalled": sorted(report.stalled),
        "refused": report.refused,
        "admitted": report.admitted,
        "released": sorted(report.released),
        "prefilled": sorted(report.prefilled),
        # One that was evicted and stored again is where it was.
        "key_events": (sorted({*keys.stored} - {*keys.evicted}), sorted({*keys.evicted} - {*keys.stored})),
        "errors": [(sorted(error.handles), error.message) for error in report.errors],
        "load": ()
        if report.errors
        else (timing.num_decodes, timing.num_prefill_tokens, timing.context_tokens),
    }


MODES: dict[str, dict[str, Any]] = {
    "fcfs": {},
    "fair": {"policy": "fair"},
    "whole prompts": {"chunked_prefill": False},
    "no prefix caching": {"prefix_caching": False},
    "static": {"static": StaticConfig(bucket_bounds=(64, 200)), "prefix_caching": False},
}
FAULTS = {field.name: 10 * getattr(CHAOS, field.name) for field in fields(FaultRates)}


def compare(mode: str, rates: FaultRates, steps: int, seed: int = 5) -> Counter[str]:
    """Run a busy system on twins; return how much of what they have reported."""
    config: CoreConfig = replace(CHAOS_CONFIG, **MODES[mode])
    workers = [replace(worker, prefix_caching=config.prefix_caching) for worker in chaos_workers(3)]
    setting = ChaosSetting(workers=workers, machine=Twins, rates=rates, rate_per_s=30.0)
    chaos = Chaos(SchedulerCore(config), setting, seed=seed)
    assert chaos.run(steps).mean_running >= 6
    seen: Counter[str] = Counter()
    for host in chaos.cell.hosts.values():
        assert isinstance(host.machine, Twins)
        seen += host.machine.seen
    return seen


@pytest.mark.parametrize("mode", MODES)
def test_simulated_worker_reports_what_the_engine_reports(mode: str) -> None:
    compare(mode, FaultRates(), 600)


@pytest.mark.parametrize("mode", MODES)
def test_simulated_worker_reports_what_the_engine_reports_when_much_goes_wrong(mode: str) -> None:
    compare(mode, FaultRates(**FAULTS), 600)


def test_twins_are_compared_in_all_that_a_report_can_tell() -> None:
    seen = compare("fcfs", FaultRates(**FAULTS | {"crash": 0.0}), 1000, seed=6)
    assert {"stored", "evicted", *LISTS} == set(seen), seen
