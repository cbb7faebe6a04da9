"""What a queue policy is, and what it may use."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
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


class SortedSequences:
    """Sequences by a key, the smallest first, and by order of arrival where keys are equal."""

    def __init__(self) -> None:
        self._keys: list[tuple[float, int]] = []
        self._sequences: dict[tuple[float, int], Sequence] = {}
        self._key_of: dict[Sequence, tuple[float, int]] = {}
        self._count = 0

    def add(self, sequence: Sequence, key: float) -> None:
        """Take a sequence in."""
        self._count += 1
        entry = (key, self._count)
        bisect.insort(self._keys, entry)
        self._sequences[entry] = sequence
        self._key_of[sequence] = entry

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out."""
        entry = self._key_of.pop(sequence)
        del self._sequences[entry]
        del self._keys[bisect.bisect_left(self._keys, entry)]

    def __iter__(self) -> Iterator[Sequence]:
        return (self._sequences[entry] for entry in self._keys)

    def num_up_to(self, key: float) -> int:
        """Return how many would go before one that comes now with this key."""
        return bisect.bisect_right(self._keys, (key, self._count))
