"""Fair among tenants."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import ClassVar

from scheduler_svc.core.events import AdmissionRequest
from scheduler_svc.core.policies.base import Charges, SortedSequences
from scheduler_svc.core.request import Sequence

_IDLE_TENANTS = 64
"""Tenants without work that are remembered before those that need not be are forgotten."""


class Fair:
    """Fair among tenants: the one with the smallest virtual token counter is next.

    Counters follow Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): they grow
    with the tokens that a tenant pays for (docs/tenants.md), each step, divided by its weight.
    """

    charges_tenants: ClassVar[bool] = True

    def __init__(self, charges: Charges, starvation_age_s: float) -> None:
        self._charges = charges
        self._starvation_age_s = starvation_age_s
        self._by_tenant: dict[str, SortedSequences] = {}

    def push(self, sequence: Sequence) -> None:
        """Take a sequence in."""
        tenant = sequence.request.tenant
        if tenant not in self._by_tenant:
            self._by_tenant[tenant] = SortedSequences(self._starvation_age_s)
        self._by_tenant[tenant].add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that was pushed."""
        tenant = sequence.request.tenant
        waiting = self._by_tenant[tenant]
        waiting.remove(sequence)
        if not waiting:
            del self._by_tenant[tenant]

    def order(self, now: float) -> Iterator[Sequence]:
        """Yield as if each one yielded were charged its prompt at once."""
        level = self._charges.level
        lines = {tenant: waiting.order(now) for tenant, waiting in self._by_tenant.items()}
        charged = dict.fromkeys(lines, 0.0)
        heap = [(level(tenant), number, tenant) for number, tenant in enumerate(lines)]
        heapq.heapify(heap)
        while heap:
            _, number, tenant = heap[0]
            sequence = next(lines[tenant], None)
            if sequence is None:
                heapq.heappop(heap)
                continue
            charged[tenant] += sequence.num_tokens
            heapq.heapreplace(heap, (level(tenant, charged[tenant]), number, tenant))
            yield sequence

    def ahead_of(self, newcomer: AdmissionRequest, now: float) -> int:
        """Return as many of each tenant as this one has with the newcomer: they take turns."""
        mine = self._by_tenant.get(newcomer.tenant)
        own = mine.ahead_of(newcomer, now) if mine is not None else 0
        others = (len(waiting) for other, waiting in self._by_tenant.items() if other != newcomer.tenant)
        return own + sum(min(count, own + 1) for count in others)


class VirtualTokenCounters(Charges):
    """Virtual token counters of the tenants: tokens over weight, 1 for tenants that have none.

    `weights` may change at any time; it counts for what is charged from then on.

    A tenant that comes back is lifted to the least counter of those with work: idle time earns no
    credit. What such a lift would undo need not be remembered.
    """

    def __init__(self, weights: dict[str, float]) -> None:
        self._weights = weights
        self._levels: dict[str, float] = {}
        self._live: dict[str, int] = {}

    def charge(self, tenant: str, tokens: float) -> None:
        """Add tokens that are computed for a tenant."""
        self._levels[tenant] = self.level(tenant, tokens)

    def level(self, tenant: str, tokens: float = 0.0) -> float:
        """Return a tenant's virtual token counter as it would be after so many more tokens."""
        return self._levels.get(tenant, 0.0) + tokens / self._weights.get(tenant, 1.0)

    def join(self, tenant: str) -> None:
        """Count one more live sequence of a tenant."""
        if tenant not in self._live:
            self._levels[tenant] = max(self.level(tenant), self._least_busy())
            self._live[tenant] = 0
        self._live[tenant] += 1

    def leave(self, tenant: str) -> None:
        """Count one live sequence less."""
        self._live[tenant] -= 1
        if self._live[tenant]:
            return
        del self._live[tenant]
        if not self._live:
            self._levels.clear()
        elif len(self._levels) > 2 * len(self._live) + _IDLE_TENANTS:
            least = self._least_busy()
            self._levels = {
                other: level for other, level in self._levels.items() if other in self._live or level > least
            }

    def _least_busy(self) -> float:
        return min((self._levels[tenant] for tenant in self._live), default=0.0)
