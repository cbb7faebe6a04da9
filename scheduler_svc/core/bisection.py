"""Finds the sequence that makes steps fail: halves of the batch are run again, alone.

A failed step freezes its worker: plans already queued are answered SKIPPED. Then each group of
suspects gets a step of its own; one that fails is split, and a sequence that fails alone is the culprit.
"""

from __future__ import annotations

from scheduler_svc.core.planning import Draft
from scheduler_svc.core.request import Sequence, Status
from scheduler_svc.core.worker import Bisection, InFlight, WorkerState


def _runs_on(worker: WorkerState, sequence: Sequence) -> bool:
    return sequence.status is Status.RUNNING and sequence.worker is worker


def _halves(group: list[Sequence]) -> list[list[Sequence]]:
    middle = (len(group) + 1) // 2
    return [half for half in (group[:middle], group[middle:]) if half]


def step_failed(worker: WorkerState, flight: InFlight) -> Sequence | None:
    """Take note of a failed step; return the culprit when it is known."""
    bisection = worker.bisection
    if bisection is None:
        skipped = set(flight.plan.skip)
        batch = [s for handle, s in worker.decoding.items() if handle not in skipped]
        prefilled = (worker.sequences.get(handle) for handle, _ in flight.plan.prefill)
        batch.extend(s for s in prefilled if s is not None and s.handle not in worker.decoding)
        suspects = [sequence for sequence in batch if _runs_on(worker, sequence)]
        bisection = worker.bisection = Bisection(None, [])
    else:
        suspects = [sequence for sequence in bisection.on_trial if _runs_on(worker, sequence)]
        bisection.on_trial = []
    bisection.resume_after = flight.plan.step
    if len(suspects) == 1:
        return suspects[0]
    bisection.groups = _halves(suspects) + bisection.groups
    return None


def step_passed(worker: WorkerState) -> None:
    """The group on trial has run without a failure."""
    if worker.bisection is not None:
        worker.bisection.on_trial = []


def draft_trial(worker: WorkerState) -> Draft | None:
    """Return a draft that runs the next group alone; None when the search is over.

    The search ends with a plan of its own even when no suspect is left, since the worker waits for
    the step number after which it goes on.
    """
    bisection = worker.bisection
    if bisection is None:
        return None
    while bisection.groups:
        group = [sequence for sequence in bisection.groups.pop(0) if _runs_on(worker, sequence)]
        if group:
            bisection.on_trial = group
            break
    if not bisection.on_trial and bisection.resume_after is None:
        worker.bisection = None
        return None
    draft = Draft(worker, worker.next_step, worker.token_budget, worker.available_blocks())
    draft.released.extend(worker.pending_release)
    worker.pending_release.clear()
    chosen = {sequence.handle for sequence in bisection.on_trial}
    for handle, sequence in worker.decoding.items():
        if handle in chosen:
            draft.decodes += 1
        else:
            draft.skip.append(handle)
            worker.delay_growth(sequence)
    draft.budget -= draft.decodes
    for sequence in bisection.on_trial:
        left = sequence.left_to_plan
        if sequence.handle in worker.prefilling and left > 0 and draft.budget > 0:
            draft.compute(sequence, min(left, draft.budget))
    draft.take_blocks(worker.growth[draft.step % worker.block_size])
    return draft
