"""A hashed timing wheel: arm, disarm and fire cost O(1) each."""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

RESOLUTION_S = 0.005
"""Width of a bucket. A timer fires at the end of its bucket: never early, at most this late."""


class TimerWheel(Generic[K]):
    """At most one timer per key.

    Buckets are made on demand; the heap holds one entry per bucket, not per timer. (Varghese and
    Lauck, "Hashed and Hierarchical Timing Wheels", 1987, with a heap in place of the turning wheel.)
    """

    def __init__(self) -> None:
        self._buckets: dict[int, dict[K, None]] = {}
        self._bucket_of: dict[K, int] = {}
        self._order: list[int] = []

    def __len__(self) -> int:
        return len(self._bucket_of)

    def arm(self, key: K, at: float) -> None:
        """Set or move the timer of `key`."""
        slot = math.ceil(at / RESOLUTION_S)
        if self._bucket_of.get(key) == slot:
            return
        self.disarm(key)
        bucket = self._buckets.get(slot)
        if bucket is None:
            bucket = self._buckets[slot] = {}
            heapq.heappush(self._order, slot)
        bucket[key] = None
        self._bucket_of[key] = slot

    def disarm(self, key: K) -> None:
        """Remove the timer of `key`, if any."""
        slot = self._bucket_of.pop(key, None)
        if slot is not None:
            del self._buckets[slot][key]

    def next_at(self) -> float | None:
        """Return when `expire` is due next."""
        while self._order:
            slot = self._order[0]
            if self._buckets[slot]:
                return slot * RESOLUTION_S
            heapq.heappop(self._order)
            del self._buckets[slot]
        return None

    def expire(self, now: float) -> list[K]:
        """Remove and return the keys whose time has come, in the order of their buckets."""
        due: list[K] = []
        while self._order and self._order[0] * RESOLUTION_S <= now:
            bucket = self._buckets.pop(heapq.heappop(self._order))
            for key in bucket:
                del self._bucket_of[key]
                due.append(key)
        return due
