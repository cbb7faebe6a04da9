"""First come, first served."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from scheduler_svc.core.events import AdmissionRequest
from scheduler_svc.core.policies.base import Charges, SortedSequences
from scheduler_svc.core.request import Sequence


class Fcfs:
    """First come, first served."""

    charges_tenants: ClassVar[bool] = False

    def __init__(self, charges: Charges, starvation_age_s: float) -> None:
        self._waiting = SortedSequences(starvation_age_s)

    def push(self, sequence: Sequence) -> None:
        """Take a sequence in."""
        self._waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that was pushed."""
        self._waiting.remove(sequence)

    def order(self, now: float) -> Iterator[Sequence]:
        """Yield in order of arrival."""
        return self._waiting.order(now)

    def ahead_of(self, newcomer: AdmissionRequest, now: float) -> int:
        """Return all whose order is not higher."""
        return self._waiting.ahead_of(newcomer, now)
