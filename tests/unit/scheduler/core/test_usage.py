"""The time of every step is split over those in it: nothing is lost, and who costs more pays more."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from octavo.protocol.steps import Report
from octavo.steptimes import StepTimes
from octavo_lab.sim import SimCell, SimWorkerConfig, request_of
from octavo_lab.sim.chaos import Chaos, ChaosSetting
from octavo_lab.sim.worker import SimWorker
from octavo_lab.traces import TraceRequest

from scheduler_svc.core import CoreConfig, Effect, SchedulerCore, WorkerInfo
from scheduler_svc.core.usage import UsageSnapshot

TENANTS = {"chat": (60, 120), "rag": (900, 20), "batch": (30, 300), "agent": (300, 60)}
"""Prompt and output tokens of what each asks, time and again."""


class Wide(SimWorker):
    """A worker of several devices."""

    def __init__(self, config: SimWorkerConfig, devices: int) -> None:
        super().__init__(config)
        self._devices = devices

    def welcome(self) -> WorkerInfo:
        return replace(super().welcome(), devices=self._devices)


class StepTimesCore(SchedulerCore):
    """A core that adds up what workers report."""

    total_us = 0

    def report(self, worker_id: str, report: Report, now: float) -> list[Effect]:
        timing = report.timing
        self.total_us += timing.execute_us + timing.overhead_us + timing.copy_us
        return super().report(worker_id, report, now)


def serve(tenants: list[str], *, devices: int = 1) -> tuple[UsageSnapshot, float, float]:
    """Run each tenant's work at full load; return who paid, the time of steps and when all was done."""
    core = StepTimesCore(CoreConfig(max_waiting_requests=10**6, policy="fair"))
    worker = SimWorkerConfig(worker_id="w0", step_times=StepTimes.builtin(), max_num_seqs=16)
    cell = SimCell(core, [worker], machine=lambda config: Wide(config, devices))
    for tenant in tenants:
        prompt, output = TENANTS[tenant]
        for index in range(9600 // (prompt // 8 + output)):
            request = request_of(TraceRequest(0.0, prompt, output), f"{tenant}-{index}", seed=index)
            cell.submit_at(0.001, replace(request, tenant=tenant))
    cell.loop.run(stop=lambda: cell.loop.now > 1.0 and not core.requests)
    return core.snapshot(cell.loop.now).usage, core.total_us / 1e6, cell.loop.now


def test_shares_of_four_tenants_are_the_time_of_all_steps_and_what_each_needs_alone() -> None:
    together, steps_s, _ = serve(list(TENANTS))
    alone = {tenant: serve([tenant])[0].tenants[tenant] for tenant in TENANTS}

    assert sum(together.tenants.values()) == pytest.approx(steps_s, rel=1e-9)
    for tenant, seconds in alone.items():
        assert together.tenants[tenant] == pytest.approx(seconds, rel=0.1), (tenant, together.tenants, alone)


def test_a_worker_of_four_devices_costs_four_times_its_time() -> None:
    used, steps_s, until = serve(["chat", "agent"], devices=4)

    assert sum(used.tenants.values()) == pytest.approx(4 * steps_s, rel=1e-9)
    assert used.total_s == pytest.approx(4 * until, rel=0.01)


def test_books_close_over_faults_of_every_kind() -> None:
    """Stalls, failed steps, lost workers, preemptions; the monitor compares loads meanwhile."""
    chaos = Chaos(None, ChaosSetting(rate_per_s=5.0, audit_every=1), seed=5)
    chaos.run(5_000)
    usage = chaos.core.snapshot(chaos.cell.loop.now).usage

    assert set(usage.tenants) == set("abc")
    assert min(*usage.tenants.values(), usage.unassigned_s, usage.idle_s) > 0
    assert usage.total_s <= len(chaos.cell.hosts) * chaos.cell.loop.now * (1 + 1e-9)


def test_idle_time_is_its_own_line_and_never_goes_back() -> None:
    core = SchedulerCore(CoreConfig())
    cell = SimCell(core, [SimWorkerConfig(worker_id="w0", step_times=StepTimes.builtin())])
    seen = []
    for index in range(5):
        cell.submit_at(10.0 * index + 5.0, request_of(TraceRequest(0.0, 50, 20), f"r{index}", seed=index))
    for tick in range(1, 5000):
        cell.loop.run(until=tick * 0.01)
        seen.append(core.snapshot(cell.loop.now).usage)

    assert all(later.idle_s >= sooner.idle_s for sooner, later in itertools.pairwise(seen))
    assert seen[-1].total_s == pytest.approx(cell.loop.now, rel=0.01)
    assert seen[-1].idle_s > 0.5 * seen[-1].total_s
