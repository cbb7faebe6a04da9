"""What happened lately, in constant space however much it is."""

from __future__ import annotations

import math
from typing import Final

_SLOTS: Final = 10
_SLOT_S: Final = 1.0
# From 10 microseconds to an hour, each bound 5 per cent above the one before.
_LEAST_S: Final = 1e-5
_STEP: Final = math.log(1.05)
_BUCKETS: Final = 1 + math.ceil(math.log(3600 / _LEAST_S) / _STEP)


class RecentTimes:
    """Durations of the last ten seconds, many equal ones at a time; quantiles are within 3 per cent."""

    def __init__(self) -> None:
        self._slots: list[tuple[int, dict[int, int]]] = [(-1, {})] * _SLOTS

    def add(self, now: float, seconds: float, count: int = 1) -> None:
        """Take a duration this often."""
        number = int(now / _SLOT_S)
        at, counts = self._slots[number % _SLOTS]
        if at != number:
            counts = {}
            self._slots[number % _SLOTS] = (number, counts)
        bucket = 0
        if seconds > _LEAST_S:
            bucket = min(_BUCKETS, 1 + int(math.log(seconds / _LEAST_S) / _STEP))
        counts[bucket] = counts.get(bucket, 0) + count

    def quantile(self, share: float, now: float) -> float:
        """Return a quantile in seconds, 0 when there are no values."""
        oldest = int(now / _SLOT_S) - _SLOTS
        merged: dict[int, int] = {}
        for at, counts in self._slots:
            if at > oldest:
                for bucket, count in counts.items():
                    merged[bucket] = merged.get(bucket, 0) + count
        left = share * sum(merged.values())
        for bucket in sorted(merged):
            left -= merged[bucket]
            if left < 0 or bucket == max(merged):
                return _LEAST_S * math.exp((bucket - 0.5) * _STEP) if bucket else _LEAST_S
        return 0.0
