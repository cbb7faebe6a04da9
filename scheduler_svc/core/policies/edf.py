"""Earliest deadline first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from scheduler_svc.core.events import AdmissionRequest, NewRequest
from scheduler_svc.core.policies.base import Charges, SortedSequences
from scheduler_svc.core.request import Sequence


class Edf:
    """Earliest deadline first: by the next deadline that the request can miss, then by arrival.

    A deadline that is far away, or none, counts as one at `starvation_age_s` after the arrival, so
    that nobody is passed by requests that come later than that.
    """

    charges_tenants: ClassVar[bool] = False

    def __init__(self, charges: Charges, starvation_age_s: float) -> None:
        self._starvation_age_s = starvation_age_s
        self._waiting = SortedSequences(starvation_age_s, key_ages=True)

    def push(self, sequence: Sequence) -> None:
        """Take a sequence in."""
        request = sequence.request
        self._waiting.add(sequence, self._due_at(request.spec, request.arrival))

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that was pushed."""
        self._waiting.remove(sequence)

    def order(self, now: float) -> Iterator[Sequence]:
        """Yield by deadline."""
        return self._waiting.order(now)

    def ahead_of(self, newcomer: AdmissionRequest, now: float) -> int:
        """Return those whose deadline comes first."""
        return self._waiting.ahead_of(newcomer, now, self._due_at(newcomer, now))

    def _due_at(self, request: NewRequest | AdmissionRequest, arrival: float) -> float:
        deadlines = (request.ttft_deadline, request.deadline, arrival + self._starvation_age_s)
        return min(at for at in deadlines if at is not None)
