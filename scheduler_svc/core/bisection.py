"""Finds the sequence that makes steps fail: halves of the batch are run again, alone.

A failed step freezes its worker: plans already queued are answered SKIPPED until one names the failed
step. Then each group of suspects gets a step of its own; one that fails is split. A sequence is
the culprit when the worker names it, or when it fails alone after it was part of a step that failed.
"""

from __future__ import annotations

from octavo.protocol.steps import StepError

from scheduler_svc.core.pipeline import Bisection, InFlight
from scheduler_svc.core.plan_builder import PlanBuilder
from scheduler_svc.core.request import Sequence, SequenceStatus
from scheduler_svc.core.worker import WorkerState


def _runs_on(worker: WorkerState, sequence: Sequence) -> bool:
    return (
        sequence.status is SequenceStatus.RUNNING
        and worker.sequences.get(sequence.binding.handle) is sequence
    )


def step_failed(worker: WorkerState, flight: InFlight, errors: tuple[StepError, ...]) -> list[Sequence]:
    """Take note of a failed step; return the culprits that are known."""
    worker.pipeline.resume_after = flight.plan.step
    named = {handle for error in errors for handle in error.handles}
    culprits = [s for handle, s in worker.sequences.items() if handle in named and _runs_on(worker, s)]
    search = worker.pipeline.bisection
    if search is not None:
        suspects = [s for s in search.on_trial if _runs_on(worker, s) and s not in culprits]
        search.on_trial = []
        if len(suspects) == 1 and not culprits:
            return suspects
        search.groups[:0] = _halves(suspects)
    elif not culprits:
        # A lone sequence is tried once more: what failed may have passed.
        worker.pipeline.bisection = Bisection(_halves(_batch(worker, flight)))
    return culprits


def step_passed(worker: WorkerState) -> None:
    """The group on trial has run without a failure."""
    if worker.pipeline.bisection is not None:
        worker.pipeline.bisection.on_trial = []


def plan_trial(worker: WorkerState) -> PlanBuilder | None:
    """Return a plan that runs the next group alone; None when the search is over, or there is none."""
    search = worker.pipeline.bisection
    if search is None:
        return None
    group: list[Sequence] = []
    while search.groups and not group:
        group = [sequence for sequence in search.groups.pop(0) if _runs_on(worker, sequence)]
    if not group:
        worker.pipeline.bisection = None
        return None
    search.on_trial = group
    builder = PlanBuilder.for_next_step(worker)
    chosen = {sequence.binding.handle for sequence in group}
    for handle, sequence in worker.sequences.items():
        if handle not in chosen:
            # Rows that are held after their end are computed too, unless they are skipped.
            builder.skip.append(handle)
            worker.blocks.delay_growth(sequence)
        elif handle in worker.decoding:
            builder.decodes += 1
    builder.budget -= builder.decodes
    for sequence in group:
        left = sequence.left_to_plan
        if sequence.binding.handle in worker.prefilling and left > 0 and builder.budget > 0:
            builder.compute(sequence, min(left, builder.budget))
    builder.take_blocks(worker.growth_in(builder.step))
    return builder


def _batch(worker: WorkerState, flight: InFlight) -> list[Sequence]:
    """Return what a step computed, as far as it still runs."""
    skipped = set(flight.plan.skip)
    batch = [sequence for handle, sequence in worker.decoding.items() if handle not in skipped]
    prefilled = (worker.sequences.get(handle) for handle, _ in flight.plan.prefill)
    batch.extend(s for s in prefilled if s is not None and s.binding.handle not in worker.decoding)
    return [sequence for sequence in batch if _runs_on(worker, sequence)]


def _halves(group: list[Sequence]) -> list[list[Sequence]]:
    middle = (len(group) + 1) // 2
    return [half for half in (group[:middle], group[middle:]) if half]
