"""Shortest remaining first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from scheduler_svc.core.events import AdmissionRequest
from scheduler_svc.core.policies.base import Charges, SortedSequences
from scheduler_svc.core.request import Sequence


class ShortestRemainingFirst:
    """Whoever has the fewest tokens left to compute and to generate at most, then by arrival.

    Those that have waited for `starvation_age_s` go before all others, by arrival.
    """

    charges_tenants: ClassVar[bool] = False

    def __init__(self, charges: Charges, starvation_age_s: float) -> None:
        self._waiting = SortedSequences(starvation_age_s)

    def push(self, sequence: Sequence) -> None:
        """Take a sequence in."""
        self._waiting.add(sequence, sequence.num_remaining_tokens)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that was pushed."""
        self._waiting.remove(sequence)

    def order(self, now: float) -> Iterator[Sequence]:
        """Yield those that have waited too long, then by what remains."""
        return self._waiting.order(now)

    def ahead_of(self, newcomer: AdmissionRequest, now: float) -> int:
        """Return those with less to do, and those with more that have waited too long."""
        return self._waiting.ahead_of(newcomer, now, newcomer.prompt_tokens + newcomer.max_tokens)
