"""First come, first served."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import ClassVar

from scheduler_svc.core.events import AdmissionRequest
from scheduler_svc.core.policies.base import Charges
from scheduler_svc.core.request import Sequence


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

    def order(self, now: float) -> Iterator[Sequence]:
        """Yield in order of arrival."""
        return iter(self._waiting)

    def ahead_of(self, newcomer: AdmissionRequest, now: float) -> int:
        """Return all."""
        return len(self._waiting)
