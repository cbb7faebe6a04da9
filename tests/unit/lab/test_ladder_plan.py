"""How a ladder sets its rungs and spends its time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from octavo_lab.ladder.config import ARMS, CONTROL, FULL, QUICK, RUNGS, SUBJECT, LadderConfig, StaticSettings
from octavo_lab.ladder.plan import (
    DRAIN_S,
    MIN_WINDOW_S,
    SATURATED_BATCHES,
    CellPlan,
    Loads,
    loads_of,
    plan_cells,
)
from octavo_lab.load.statistics import needed
from octavo_lab.stored import read_record, write_record

from scheduler_svc.config import SchedulerSettings
from worker_svc.config import WorkerSettings

CAPACITIES = {
    "static": 2.0,
    "static-buckets": 2.4,
    "static-nowaste": 3.5,
    "static-buckets-nowaste": 4.0,
    "continuous": 5.0,
    "continuous-prefix": 5.5,
    "continuous-chunked": 5.2,
    "continuous-chunked-prefix": 6.0,
}
STATIC = [name for name, arm in ARMS.items() if arm.static]


def loads() -> Loads:
    return loads_of(FULL, CAPACITIES)


def test_rungs_are_absolute_rates_that_follow_from_the_capacities() -> None:
    assert loads().rungs == {"baseline": 1.0, "middle": 2.0, "best-static": 4.0, "best": 6.0, "overload": 9.0}
    assert loads().control_rung == "middle"


def test_rungs_when_the_control_is_the_best_static_arm_still_rise() -> None:
    rates = loads_of(FULL, {**CAPACITIES, "static": 4.0})
    assert rates.control_rung == "best-static"
    assert list(rates.rungs.values()) == sorted(set(rates.rungs.values()))


def test_plan_runs_every_arm_at_every_rung_of_every_repeat_in_turns() -> None:
    plan = plan_cells(FULL, loads(), 3 * 3600.0)
    assert Counter((cell.arm, cell.rung) for cell in plan.cells) == dict.fromkeys(
        ((arm, rung) for arm in ARMS for rung in RUNGS), FULL.repeats
    )
    turns = [
        [cell.arm for cell in plan.cells[at : at + len(ARMS)]] for at in range(0, len(plan.cells), len(ARMS))
    ]
    assert all(sorted(turn) == sorted(ARMS) for turn in turns)
    assert len({tuple(turn) for turn in turns}) > 1


def test_plan_gives_all_arms_the_same_traffic() -> None:
    by_turn: dict[tuple[str, int], set[tuple[int, float]]] = {}
    for cell in plan_cells(FULL, loads(), 3600.0).cells:
        by_turn.setdefault((cell.rung, cell.repeat), set()).add((cell.seed, cell.rate_per_s))
    assert all(len(seeds) == 1 for seeds in by_turn.values())
    assert len({next(iter(seeds)) for seeds in by_turn.values()}) == len(by_turn)


@pytest.mark.parametrize("minutes", [30, 60, 180])
def test_plan_keeps_to_the_budget_or_says_that_it_cannot(minutes: int) -> None:
    available = minutes * 60.0
    plan = plan_cells(FULL, loads(), available)
    spent = sum(cell.warm_up_s + cell.window_s + DRAIN_S for cell in plan.cells)
    assert spent == pytest.approx(plan.expected_s)
    assert spent <= available + 1 or any("longer than the budget" in note for note in plan.notes)


def test_plan_has_requests_for_a_p99_of_the_comparison_where_there_is_time() -> None:
    plan = plan_cells(FULL, loads(), 3 * 3600.0)
    for arm in (CONTROL, SUBJECT):
        windows = [cell.window_s for cell in plan.cells if (cell.arm, cell.rung) == (arm, "middle")]
        assert sum(windows) * loads().rungs["middle"] >= needed(0.99)
    assert plan.notes == ()


def test_plan_with_little_time_gives_up_repeats_first_and_says_what_is_missing() -> None:
    plan = plan_cells(FULL, loads(), 15 * 60.0)
    assert plan.repeats == 2
    assert min(cell.window_s for cell in plan.cells) >= MIN_WINDOW_S
    told = " ".join(plan.notes)
    assert "2 repeats instead of 3" in told
    assert "no P99" in told


@pytest.mark.parametrize(("minutes", "batch_s"), [(75, 6.0), (75, 15.0), (180, 30.0)])
def test_plan_sees_three_of_the_longest_batches_of_a_saturated_arm(minutes: int, batch_s: float) -> None:
    plan = plan_cells(FULL, replace(loads(), longest_batch_s=batch_s), 60.0 * minutes)
    others = [cell.window_s for cell in plan.cells if cell.rung == "overload"]
    assert min(others) >= SATURATED_BATCHES * batch_s - 1e-9
    assert plan.expected_s <= 60.0 * minutes + 1
    assert min(cell.window_s for cell in plan.cells) >= MIN_WINDOW_S


def test_plan_without_the_time_for_three_batches_says_so() -> None:
    plan = plan_cells(FULL, replace(loads(), longest_batch_s=60.0), 75 * 60.0)
    assert plan.expected_s <= 75 * 60.0 + 1
    assert any("shorter than 3 of the longest batches (180 s)" in note for note in plan.notes)


def test_plan_waits_for_answers_only_where_an_arm_keeps_up() -> None:
    cells = {(cell.arm, cell.rung): cell for cell in plan_cells(FULL, loads(), 3600.0).cells}
    assert cells["static", "middle"].drain_s > 10 > cells["static", "overload"].drain_s


def test_plan_survives_its_file(tmp_path: Path) -> None:
    plan = plan_cells(QUICK, loads_of(QUICK, CAPACITIES), 300.0)
    write_record(tmp_path / "plan.json", plan)
    assert read_record(tmp_path / "plan.json", CellPlan) == plan


@pytest.mark.parametrize("config", [QUICK, FULL, replace(FULL, extra_worker_args=("--num-threads=1",))])
def test_config_survives_its_file(config: LadderConfig, tmp_path: Path) -> None:
    write_record(tmp_path / "config.json", config)
    assert read_record(tmp_path / "config.json", LadderConfig) == config


@pytest.mark.parametrize("arm", ARMS.values(), ids=lambda arm: arm.name)
@pytest.mark.parametrize("runner", ["torch", "sim"])
def test_arm_asks_for_settings_that_services_know(arm: object, runner: str) -> None:
    name = arm.name  # type: ignore[attr-defined]
    config = replace(FULL, runner=runner)
    worker = WorkerSettings.load(flags(config.worker_args(ARMS[name])))
    tuned = StaticSettings(batch_size=16, timeout_s=0.25)
    core = SchedulerSettings.load(flags(config.scheduler_args(ARMS[name], tuned))).core_config()
    assert (worker.kv.kv_layout == "contiguous") is ARMS[name].static
    assert worker.backend.padded is ARMS[name].wasteful
    assert (core.static is not None) is ARMS[name].static
    if core.static is not None:
        assert (core.static.batch_size, core.static.timeout_s) == (16, 0.25)
        assert bool(core.static.bucket_bounds) is ARMS[name].buckets
        assert core.static.hold_finished is ARMS[name].wasteful
    else:
        assert core.chunked_prefill is ARMS[name].chunked
        assert core.prefix_caching is ARMS[name].prefix


def flags(arguments: tuple[str, ...]) -> dict[str, object]:
    """Settings as the command line makes them of flags."""
    given: dict[str, object] = {}
    words = list(arguments)
    while words:
        name, equals, value = words.pop(0).removeprefix("--").partition("=")
        if not equals and words and not words[0].startswith("--"):
            given[name.replace("-", "_")] = words.pop(0)
        elif equals:
            given[name.replace("-", "_")] = value
        else:
            given[name.removeprefix("no-").replace("-", "_")] = not name.startswith("no-")
    return given
