"""Orders within a priority class. To add a policy, add a class and its line in `POLICIES`."""

from __future__ import annotations

import bisect
import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import ClassVar, Protocol

from scheduler_svc.core.request import Sequence

_IDLE_TENANTS = 64
"""Tenants without work that are remembered before those that need not be are forgotten."""


class Charges(Protocol):
    """Where `fair` reads and writes what each tenant has used; shared by all classes of a model."""

    def charge(self, tenant: str, tokens: float) -> None:
        """Add tokens that are computed for a tenant; take off, when negative, what was not after all."""

    def level(self, tenant: str, tokens: float = 0.0) -> float:
        """Return a tenant's virtual token counter as it would be after so many more tokens."""

    def join(self, tenant: str) -> None:
        """A tenant has work again after a pause."""

    def leave(self, tenant: str) -> None:
        """One of a tenant's sequences has ended."""


class Policy(Protocol):
    """Who is next among the waiting of one class. To push or remove costs O(log n) or less."""

    charges_tenants: ClassVar[bool]
    """Whether it reads what tenants have used, so that they are charged for what each step computes."""

    def __init__(self, charges: Charges, starvation_age_s: float) -> None:
        """Take the charges of the tenants, and the wait past which nobody new may go ahead."""

    def push(self, sequence: Sequence) -> None:
        """Take a sequence in."""

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that was pushed."""

    def order(self) -> Iterator[Sequence]:
        """Yield the waiting, best first; the caller stops early and changes nothing meanwhile."""

    def ahead_of(self, tenant: str, deadline: float) -> int:
        """Return how many of the waiting would go before a newcomer with this next deadline."""


class Fcfs:
    """First come, first served."""

    charges_tenants: ClassVar[bool] = False

    def __init__(self, charges: Charges, starvation_age_s: float) -> None:
        self._waiting: OrderedDict[Sequence, None] = OrderedDict()

    def push(self, sequence: Sequence) -> None:
        """Take a sequence in."""
        self._waiting[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that was pushed."""
        del self._waiting[sequence]

    def order(self) -> Iterator[Sequence]:
        """Yield in order of arrival."""
        return iter(self._waiting)

    def ahead_of(self, tenant: str, deadline: float) -> int:
        """Return all."""
        return len(self._waiting)


class Edf:
    """Earliest deadline first: by the next deadline that the request can miss, then by arrival.

    A deadline that is far away, or none, counts as one at `starvation_age_s` after the arrival, so
    that nobody is passed by requests that come later than that.
    """

    charges_tenants: ClassVar[bool] = False

    def __init__(self, charges: Charges, starvation_age_s: float) -> None:
        self._starvation_age_s = starvation_age_s
        self._keys: list[tuple[float, int]] = []
        self._waiting: dict[tuple[float, int], Sequence] = {}
        self._key_of: dict[Sequence, tuple[float, int]] = {}
        self._count = 0

    def push(self, sequence: Sequence) -> None:
        """Take a sequence in."""
        request = sequence.request
        spec = request.spec
        deadlines = (spec.ttft_deadline, spec.deadline, request.arrival + self._starvation_age_s)
        self._count += 1
        key = (min(at for at in deadlines if at is not None), self._count)
        bisect.insort(self._keys, key)
        self._waiting[key] = sequence
        self._key_of[sequence] = key

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that was pushed."""
        key = self._key_of.pop(sequence)
        del self._waiting[key]
        del self._keys[bisect.bisect_left(self._keys, key)]

    def order(self) -> Iterator[Sequence]:
        """Yield by deadline."""
        return (self._waiting[key] for key in self._keys)

    def ahead_of(self, tenant: str, deadline: float) -> int:
        """Return those whose deadline comes first."""
        return bisect.bisect_right(self._keys, (deadline, self._count))


class Fair:
    """Fair among tenants: the one with the smallest virtual token counter is next.

    Counters follow Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): they grow
    with the tokens actually computed for a tenant, each step, divided by its weight.
    """

    charges_tenants: ClassVar[bool] = True

    def __init__(self, charges: Charges, starvation_age_s: float) -> None:
        self._charges = charges
        self._by_tenant: dict[str, OrderedDict[Sequence, None]] = {}

    def push(self, sequence: Sequence) -> None:
        """Take a sequence in."""
        self._by_tenant.setdefault(sequence.request.tenant, OrderedDict())[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that was pushed."""
        tenant = sequence.request.tenant
        waiting = self._by_tenant[tenant]
        del waiting[sequence]
        if not waiting:
            del self._by_tenant[tenant]

    def order(self) -> Iterator[Sequence]:
        """Yield as if each one yielded were charged its prompt at once."""
        level = self._charges.level
        lines = {tenant: iter(waiting) for tenant, waiting in self._by_tenant.items()}
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

    def ahead_of(self, tenant: str, deadline: float) -> int:
        """Return as many of each tenant as this one has with the newcomer: they take turns."""
        own = len(self._by_tenant.get(tenant, ()))
        others = (len(waiting) for other, waiting in self._by_tenant.items() if other != tenant)
        return own + sum(min(count, own + 1) for count in others)


class NoCharges:
    """For policies that do not look at tenants."""

    def charge(self, tenant: str, tokens: float) -> None:
        """Ignore."""

    def level(self, tenant: str, tokens: float = 0.0) -> float:
        """Return zero."""
        return 0.0

    def join(self, tenant: str) -> None:
        """Ignore."""

    def leave(self, tenant: str) -> None:
        """Ignore."""


class VirtualTokenCounters:
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


POLICIES: dict[str, type[Policy]] = {"fcfs": Fcfs, "edf": Edf, "fair": Fair}


def make_charges(policy: str, weights: dict[str, float]) -> Charges:
    """Return the counters that a policy reads."""
    return VirtualTokenCounters(weights) if POLICIES[policy].charges_tenants else NoCharges()
