"""Orders within a priority class. To add a policy, add a class and its line in `POLICIES`."""

from __future__ import annotations

import bisect
import math
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from scheduler_svc.core.request import Sequence


class Charges(Protocol):
    """Where `fair` reads and writes what each tenant has used; shared by all classes of a model."""

    def charge(self, tenant: str, tokens: float) -> None:
        """Add tokens that were computed for a tenant."""

    def level(self, tenant: str) -> float:
        """Return a tenant's virtual token counter."""

    def join(self, tenant: str) -> None:
        """A tenant has work again after a pause."""

    def leave(self, tenant: str) -> None:
        """One of a tenant's sequences has ended."""


class Policy(Protocol):
    """Who is next among the waiting of one class. All operations are O(log n) or better."""

    def push(self, sequence: Sequence) -> None:
        """Take a sequence in."""

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that was pushed."""

    def order(self) -> Iterator[Sequence]:
        """Yield the waiting, best first; the caller stops early and changes nothing meanwhile."""


class Fcfs:
    """First come, first served."""

    def __init__(self, charges: Charges) -> None:
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


class Edf:
    """Earliest deadline first: by the next deadline that the request can miss, then by arrival."""

    def __init__(self, charges: Charges) -> None:
        self._keys: list[tuple[float, int]] = []
        self._waiting: dict[tuple[float, int], Sequence] = {}
        self._key_of: dict[Sequence, tuple[float, int]] = {}
        self._count = 0

    def push(self, sequence: Sequence) -> None:
        """Take a sequence in."""
        spec = sequence.request.spec
        deadlines = [at for at in (spec.ttft_deadline, spec.deadline) if at is not None]
        self._count += 1
        key = (min(deadlines, default=math.inf), self._count)
        bisect.insort(self._keys, key)
        self._waiting[key] = sequence
        self._key_of[sequence] = key

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that was pushed."""
        key = self._key_of.pop(sequence)
        del self._waiting[key]
        del self._keys[bisect.bisect_left(self._keys, key)]

    def order(self) -> Iterator[Sequence]:
        """Yield by deadline; those without one come last."""
        return (self._waiting[key] for key in self._keys)


class Fair:
    """Fair among tenants: the one with the smallest virtual token counter is next.

    Counters follow Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): they grow
    with the tokens actually computed for a tenant, each step, divided by its weight.
    """

    def __init__(self, charges: Charges) -> None:
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
        heads = {tenant: iter(waiting) for tenant, waiting in self._by_tenant.items()}
        levels = {tenant: self._charges.level(tenant) for tenant in heads}
        while levels:
            tenant = min(levels, key=levels.__getitem__)
            sequence = next(heads[tenant], None)
            if sequence is None:
                del levels[tenant]
                continue
            levels[tenant] += sequence.num_tokens
            yield sequence


class NoCharges:
    """For policies that do not look at tenants."""

    def charge(self, tenant: str, tokens: float) -> None:
        """Ignore."""

    def level(self, tenant: str) -> float:
        """Return zero."""
        return 0.0

    def join(self, tenant: str) -> None:
        """Ignore."""

    def leave(self, tenant: str) -> None:
        """Ignore."""


class VirtualTokenCounters:
    """Virtual token counters of the tenants.

    A tenant that comes back is lifted to the least counter of those with work: idle time earns no credit.
    """

    def __init__(self, weights: dict[str, float]) -> None:
        self._weights = weights
        self._levels: dict[str, float] = {}
        self._live: dict[str, int] = {}

    def charge(self, tenant: str, tokens: float) -> None:
        """Add tokens that were computed for a tenant."""
        self._levels[tenant] = self._levels.get(tenant, 0.0) + tokens / self._weights.get(tenant, 1.0)

    def level(self, tenant: str) -> float:
        """Return a tenant's virtual token counter."""
        return self._levels.get(tenant, 0.0)

    def join(self, tenant: str) -> None:
        """Count one more live sequence of a tenant."""
        if not self._live.get(tenant):
            busy = [self._levels.get(other, 0.0) for other, count in self._live.items() if count]
            self._levels[tenant] = max(self.level(tenant), min(busy, default=0.0))
        self._live[tenant] = self._live.get(tenant, 0) + 1

    def leave(self, tenant: str) -> None:
        """Count one live sequence less; a tenant far behind everybody may be forgotten."""
        self._live[tenant] -= 1
        if not self._live[tenant]:
            del self._live[tenant]
            if not self._live:
                self._levels.clear()


POLICIES: dict[str, type[Fcfs | Edf | Fair]] = {"fcfs": Fcfs, "edf": Edf, "fair": Fair}


def make_charges(policy: str, weights: dict[str, float]) -> Charges:
    """Return the counters that a policy reads."""
    return VirtualTokenCounters(weights) if policy == "fair" else NoCharges()
