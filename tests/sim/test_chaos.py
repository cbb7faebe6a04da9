"""Every mode of the core under load, with faults and without: the monitor finds nothing to object to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from octavo_lab.sim.chaos import CHAOS, CHAOS_CONFIG, Chaos, ChaosResult, ChaosSetting, chaos_workers
from octavo_lab.sim.faults import FaultRates

from scheduler_svc.core import CoreConfig, StaticConfig
from scheduler_svc.core.policies import POLICIES
from tests.sim.books import AuditedCore
from tests.sim.engine_machine import EngineMachine

NO_FAULTS = FaultRates()
MODES: dict[str, dict[str, Any]] = {
    **{policy: {"policy": policy, "tenant_weights": {"a": 2.0}} for policy in POLICIES},
    "whole prompts": {"chunked_prefill": False},
    "no prefix caching": {"prefix_caching": False},
    "one plan at a time": {"window": 1},
    "three plans": {"window": 3},
    "latency critical": {"target_itl_s": 0.03},
    "contiguous": {"prefix_caching": False, "paged": False},
    "static": {"static": StaticConfig(bucket_bounds=(64, 200)), "prefix_caching": False, "paged": False},
    "static, no holding": {"static": StaticConfig(hold_finished=False), "prefix_caching": False},
}


def run(mode: str, rates: FaultRates, steps: int, **setting: Any) -> ChaosResult:
    changes = dict(MODES[mode])
    paged = changes.pop("paged", True)
    config: CoreConfig = replace(CHAOS_CONFIG, **changes)
    caching = config.prefix_caching
    workers = [replace(worker, paged=paged, prefix_caching=caching) for worker in chaos_workers(4)]
    wanted = ChaosSetting(workers=workers, rates=rates, rate_per_s=35.0, audit_every=8, **setting)
    core = AuditedCore(config)
    result = Chaos(core, wanted, seed=3).run(steps)
    core.check_ended()
    assert core.charged
    return result


@pytest.mark.parametrize("mode", MODES)
def test_busy_system_with_faults_keeps_every_promise(mode: str) -> None:
    result = run(mode, CHAOS, 1500)
    assert result.mean_running >= 8
    assert sum(result.outcomes.values()) == result.requests


@pytest.mark.parametrize("mode", MODES)
def test_busy_system_without_faults_fails_no_innocent_and_no_plan_asks_too_much(mode: str) -> None:
    result = run(mode, NO_FAULTS, 1500)
    assert result.innocents == 0
    assert result.surprises.get("refused", 0) == 0
    if not mode.startswith(("static", "whole")):
        assert result.surprises.get("over_budget", 0) == 0


@pytest.mark.parametrize("mode", [*POLICIES, "whole prompts", "contiguous", "static"])
@pytest.mark.parametrize("rates", [NO_FAULTS, CHAOS], ids=["sound", "faulty"])
def test_core_and_the_workers_own_engine_keep_the_same_books(mode: str, rates: FaultRates) -> None:
    result = run(mode, rates, 600, machine=EngineMachine)
    assert result.mean_running >= 8
    assert sum(result.outcomes.values()) == result.requests


def test_same_seed_gives_the_same_run() -> None:
    first, second = (run("fcfs", CHAOS, 500) for _ in range(2))
    assert replace(first, cpu_s=0.0) == replace(second, cpu_s=0.0)
