"""Shortest remaining first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import takewhile
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
        self._starvation_age_s = starvation_age_s
        self._by_remaining = SortedSequences()
        self._by_arrival: OrderedDict[Sequence, None] = OrderedDict()

    def push(self, sequence: Sequence) -> None:
        """Take a sequence in."""
        self._by_remaining.add(sequence, sequence.num_remaining_tokens)
        self._by_arrival[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that was pushed."""
        self._by_remaining.remove(sequence)
        del self._by_arrival[sequence]

    def order(self, now: float) -> Iterator[Sequence]:
        """Yield those that have waited too long, then by what remains."""
        starving = dict.fromkeys(self._starving(now))
        yield from starving
        yield from (sequence for sequence in self._by_remaining if sequence not in starving)

    def ahead_of(self, newcomer: AdmissionRequest, now: float) -> int:
        """Return those with less to do, and those with more that have waited too long."""
        remaining = newcomer.prompt_tokens + newcomer.max_tokens
        longer = sum(sequence.num_remaining_tokens > remaining for sequence in self._starving(now))
        return self._by_remaining.num_up_to(remaining) + longer

    def _starving(self, now: float) -> Iterator[Sequence]:
        since = now - self._starvation_age_s
        return takewhile(lambda sequence: sequence.request.arrival <= since, self._by_arrival)
