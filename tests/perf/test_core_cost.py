"""The plan of a steady decode costs what changes; the scorecard measures the time that it takes."""

from __future__ import annotations

from octavo_lab.scorecard.core_workload import steady_decode


def test_plan_of_a_steady_decode_is_empty_whatever_runs() -> None:
    """The message grows with what changes: of 64 sequences none is named, save for blocks that filled."""
    core = steady_decode(1, 64, 100)
    (worker,) = core._workers.values()
    plan = worker.pipeline.in_flight[-1].plan
    assert (plan.admit, plan.prefill, plan.skip, plan.release) == ((), (), (), ())
    assert len(plan.seal) <= 2 * 64 / worker.block_size * 2
