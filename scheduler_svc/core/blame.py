"""Who is to blame when a worker is lost: sequences are tried in groups, then one by one.

A request may kill its workers; but workers are taken away for many reasons, and the two look the same. So a
sequence is judged by chance: that a worker which computed nothing else was lost just there, again, though
the sequence had nothing to do with it. Losses of other workers, and those that it outlived, tell how likely
that is.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from scheduler_svc.core.request import Deaths, Sequence, SequenceStatus
from scheduler_svc.core.worker import WorkerState

_LONG_S = 600.0
"""Without any loss, one is expected in this time; evidence fades by e in it, too."""
_SHORT_S = 30.0
"""Losses in so short a time tell when workers have begun to be lost."""
_MIN_EXPOSURE_S = 0.01
_MAX_NOTED = 4096
_ENOUGH = -math.log(1e-6)
"""Evidence that quarantines: an innocent comes to it once in a million seconds, at any rate of loss."""
_HARDLY = 0.02
_OFTEN = 4
"""One under which workers die again, by so little a chance or so often, harms no neighbours any more."""
_PARTS = 4
"""Those that a worker computed when it died are tried in so many parts."""


@dataclass(slots=True, eq=False)
class Losses:
    """The losses of late among the workers of one model."""

    times: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_NOTED))

    def note(self, now: float) -> None:
        """A worker is lost, and nobody said beforehand that it would go."""
        self.times.append(now)

    def rate(self, now: float, num_workers: int, but: int) -> float:
        """Return losses per worker and second, without so many that a sequence is under suspicion of."""
        ages = [now - at for at in self.times]
        long = sum(age < _LONG_S for age in ages) - but
        short = sum(age < _SHORT_S for age in ages) - but
        return max((1 + max(long, 0)) / _LONG_S, short / _SHORT_S) / num_workers


@dataclass(frozen=True, slots=True)
class Blamed:
    """A sequence under which a worker died, by name: nothing of it is kept alive."""

    request_id: str
    arrival: float
    choice: int
    evidence: float | None
    """What was added to the evidence against it; None when it was not alone."""


def blame(worker: WorkerState, losses: Losses, num_workers: int, now: float) -> list[Blamed]:
    """Take note of a loss; return those that the worker computed, by now under suspicion.

    Those on trial are blamed alone, if there are any. Nobody is for a worker that was to go, or was idle.
    """
    if worker.draining:
        return []
    losses.note(now)
    if not worker.pipeline.in_flight:
        return []
    computed = [
        sequence
        for handle, sequence in worker.sequences.items()
        if sequence.status is not SequenceStatus.FINISHED
        and (handle in worker.decoding or handle in worker.prefilling)
    ]
    group = list(worker.suspects.values()) or computed
    alone = len(worker.sequences) == 1
    # A hang is noticed late: what counts is how long it took to come to it.
    until = min(now, worker.ends_at())
    blamed = []
    for sequence in group:
        deaths = sequence.deaths
        deaths.count += 1
        # Two steps may have been under way, so it must get past both.
        deaths.proven_at_len = sequence.num_tokens + 2
        deaths.max_on_trial = max(1, len(group) // _PARTS) if deaths.count == 1 else 1
        # The first one could have come anywhere on its way: that counts as a second.
        seconds = max(until - sequence.binding.admitted_at, _MIN_EXPOSURE_S) if deaths.count > 1 else 1.0
        chance = losses.rate(now, num_workers, deaths.count) * seconds
        if deaths.count > 1:
            deaths.exclusive |= chance <= _HARDLY or deaths.count >= _OFTEN
        evidence = None
        if alone:
            evidence = max(-math.log(chance), 0.0)
            deaths.evidence *= math.exp((deaths.last_at - now) / _LONG_S)
            deaths.evidence += evidence
            deaths.alone += 1
        deaths.last_at = now
        request = sequence.request
        blamed.append(Blamed(request.request_id, request.arrival, sequence.choice, evidence))
    return blamed


def forgive(sequence: Sequence, blamed: Blamed) -> None:
    """The worker lives: only its stream had broken."""
    deaths = sequence.deaths
    if deaths.count < 2:
        sequence.deaths = Deaths()
        return
    deaths.count -= 1
    if blamed.evidence is not None and deaths.alone:
        deaths.alone -= 1
        deaths.evidence -= blamed.evidence


def is_poison(sequence: Sequence, max_worker_deaths: int) -> bool:
    """Return whether workers died while they computed a sequence alone, and that can be no chance."""
    return sequence.deaths.alone >= max_worker_deaths and sequence.deaths.evidence >= _ENOUGH
