"""What a queue policy is, and what it may use."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator
from itertools import takewhile
from typing import ClassVar, Protocol

from scheduler_svc.core.events import AdmissionRequest
from scheduler_svc.core.request import Sequence


class Charges:
    """What each tenant has used, for all classes of a model. This one, for most policies, keeps nothing."""

    def charge(self, tenant: str, tokens: float) -> None:
        """Add tokens that are computed for a tenant; take off, when negative, what was not after all."""

    def level(self, tenant: str, tokens: float = 0.0) -> float:
        """Return what a tenant has used, and would have used after so many more tokens."""
        return 0.0

    def join(self, tenant: str) -> None:
        """One more of a tenant's sequences is live."""

    def leave(self, tenant: str) -> None:
        """One of a tenant's sequences has ended."""


class Policy(Protocol):
    """Who is next among the waiting of one class. To push or remove costs O(log n) or less.

    A lower `order` goes first, among all or, in a policy that is fair, among the requests of a tenant; but
    nobody new goes before those that have waited for `starvation_age_s`.

    It sees whole sequences: `request.tenant`, the deadlines of `request.spec`, `num_tokens` (those known),
    `waiting.num_tokens` (of these, to be computed), `num_remaining_tokens` (to be computed or generated),
    `request.max_total_tokens`. Sequences that ran before are not its business: they stand in front.
    """

    charges_tenants: ClassVar[bool]
    """Whether it reads what tenants have used, so that they are charged for what each step computes."""

    def __init__(self, charges: Charges, starvation_age_s: float) -> None:
        """Take the charges of the tenants, and the wait past which nobody new may go ahead."""

    def push(self, sequence: Sequence) -> None:
        """Take a sequence in."""

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that was pushed."""

    def order(self, now: float) -> Iterator[Sequence]:
        """Yield the waiting, best first; the caller stops early and changes nothing meanwhile."""

    def ahead_of(self, newcomer: AdmissionRequest, now: float) -> int:
        """Return how many of the waiting would go before a newcomer."""


Entry = tuple[int, float, int]
"""Order, key, and a number that grows with each arrival."""


class SortedSequences:
    """Sequences by their order, then by a key, the smallest first, and by arrival where both are equal.

    Those that have waited for `starvation_age_s` go before all others, by arrival. `key_ages`: the key sees
    to that itself, as long as all have the same order.
    """

    def __init__(self, starvation_age_s: float, *, key_ages: bool = False) -> None:
        self._starvation_age_s = starvation_age_s
        self._key_ages = key_ages
        self._orders: Counter[int] = Counter()
        self._entries: list[Entry] = []
        self._sequences: dict[Entry, Sequence] = {}
        self._entry_of: dict[Sequence, Entry] = {}
        """In order of arrival."""
        self._count = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, sequence: Sequence, key: float = 0.0) -> None:
        """Take a sequence in."""
        self._count += 1
        order = sequence.request.spec.order
        self._orders[order] += 1
        entry = (order, key, self._count)
        bisect.insort(self._entries, entry)
        self._sequences[entry] = sequence
        self._entry_of[sequence] = entry

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out."""
        entry = self._entry_of.pop(sequence)
        del self._sequences[entry]
        del self._entries[bisect.bisect_left(self._entries, entry)]
        self._orders[entry[0]] -= 1
        if not self._orders[entry[0]]:
            del self._orders[entry[0]]

    def order(self, now: float) -> Iterator[Sequence]:
        """Yield those that have waited too long, then by order and key."""
        yielded = set()
        for sequence in self._starving(now):
            yielded.add(sequence)
            yield sequence
        for entry in self._entries:
            sequence = self._sequences[entry]
            if sequence not in yielded:
                yield sequence

    def ahead_of(self, newcomer: AdmissionRequest, now: float, key: float = 0.0) -> int:
        """Return how many would go before one that comes now with this key."""
        newest = (newcomer.order, key, self._count)
        sooner = bisect.bisect_right(self._entries, newest)
        if sooner == len(self._entries):
            return sooner
        return sooner + sum(self._entry_of[sequence] > newest for sequence in self._starving(now))

    def _starving(self, now: float) -> Iterator[Sequence]:
        if self._key_ages and len(self._orders) < 2:
            return iter(())
        since = now - self._starvation_age_s
        return takewhile(lambda sequence: sequence.request.arrival <= since, self._entry_of)
