"""A hierarchical timing wheel: arm, disarm and fire cost O(1) each, whatever is armed."""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

RESOLUTION_S = 0.005
"""Width of the finest slots. A timer fires at the end of its slot: never early, at most this late."""
_SPAN = 64
"""Slots of one ring ahead of now; each ring's slots are this much wider than those of the one before."""
_RINGS = 6
"""The last ring reaches 64^6 fine slots ahead: ten years. What is beyond waits in its last slot."""

_Slot = tuple[int, int]
"""Fine tick at which a slot is due, and its ring."""


class TimerWheel(Generic[K]):
    """At most one timer per key.

    A timer far ahead lies in a wide slot; when that is due, its timers move to finer ones: at most
    once per ring. So there are never more than some hundreds of slots, however many timers come and
    go and however far ahead they are, and the heap that orders the slots costs a constant. (Varghese
    and Lauck, "Hashed and Hierarchical Timing Wheels", 1987, with a heap in place of turning wheels.)
    """

    def __init__(self) -> None:
        self._slots: dict[_Slot, dict[K, int]] = {}
        """Keys of each slot, with the fine tick at which each fires."""
        self._slot_of: dict[K, _Slot] = {}
        self._order: list[_Slot] = []
        self._tick = 0
        """Fine ticks that have passed at the last `expire`."""

    def __len__(self) -> int:
        return len(self._slot_of)

    @property
    def num_slots(self) -> int:
        """Slots that are kept, empty ones included."""
        return len(self._slots)

    def arm(self, key: K, at: float) -> None:
        """Set or move the timer of `key`."""
        self.disarm(key)
        tick = math.ceil(at / RESOLUTION_S)
        # A division may round down to just before the time.
        self._put(key, tick + (tick * RESOLUTION_S < at))

    def disarm(self, key: K) -> None:
        """Remove the timer of `key`, if any."""
        slot = self._slot_of.pop(key, None)
        if slot is not None:
            del self._slots[slot][key]

    def next_at(self) -> float | None:
        """Return when `expire` is due next: not always to fire something."""
        while self._order:
            slot = self._order[0]
            if self._slots[slot]:
                return slot[0] * RESOLUTION_S
            heapq.heappop(self._order)
            del self._slots[slot]
        return None

    def expire(self, now: float) -> list[K]:
        """Remove and return the keys whose time has come."""
        fired: list[K] = []
        # The last tick that is not after now, as times are made from ticks: a division may be off by one.
        tick = math.floor(now / RESOLUTION_S) + 1
        while tick * RESOLUTION_S > now:
            tick -= 1
        self._tick = max(self._tick, tick)
        while self._order and self._order[0][0] <= self._tick:
            slot = heapq.heappop(self._order)
            for key, at in self._slots.pop(slot).items():
                del self._slot_of[key]
                if at <= self._tick:
                    fired.append(key)
                else:
                    self._put(key, at)
        return fired

    def _put(self, key: K, tick: int) -> None:
        slot = self._slot(tick)
        keys = self._slots.get(slot)
        if keys is None:
            keys = self._slots[slot] = {}
            heapq.heappush(self._order, slot)
        keys[key] = tick
        self._slot_of[key] = slot

    def _slot(self, tick: int) -> _Slot:
        """Return the slot of a timer: the finest ring that reaches it. A wide slot is due when it begins."""
        ahead, width = tick - self._tick, 1
        for ring in range(_RINGS):
            if ahead < _SPAN * width:
                return (tick // width * width, ring)
            width *= _SPAN
        width //= _SPAN
        return ((self._tick // width + _SPAN - 1) * width, _RINGS - 1)
