"""What the core costs, with room for a busy machine; the scorecard holds the figures to their targets."""

from __future__ import annotations

import statistics

import pytest
from octavo.scorecard.core_workload import admissions, steady_decode

pytestmark = pytest.mark.slow


def test_step_of_256_decodes_is_read_and_planned_in_well_under_a_step() -> None:
    assert min(steady_decode(1, 256, 120).step_us() for _ in range(3)) < 2400


def test_cost_of_a_step_hardly_depends_on_the_number_of_workers() -> None:
    ratios = [steady_decode(200, 8, 1500).step_us() / steady_decode(1, 8, 1500).step_us() for _ in range(3)]
    assert min(ratios) < 2.5


def test_admission_hardly_depends_on_the_number_of_workers() -> None:
    few, many = (min(statistics.median(admissions(n, 40).submit_s) for _ in range(2)) for n in (100, 800))
    assert many < 4e-3
    assert many / few < 4


def test_plan_of_a_steady_decode_is_empty_whatever_runs() -> None:
    """The message grows with what changes: of 64 sequences none is named, save for blocks that filled."""
    core = steady_decode(1, 64, 100)
    (worker,) = core._workers.values()
    plan = worker.in_flight[-1].plan
    assert (plan.admit, plan.prefill, plan.skip, plan.release) == ((), (), (), ())
    assert len(plan.seal) <= 2 * 64 / worker.block_size * 2
