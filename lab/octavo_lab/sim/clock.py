"""Virtual time: callbacks run in the order of their times, and nothing ever waits."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable


class EventLoop:
    """Callbacks by virtual time, in seconds; those of one moment run in the order they were set."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, when: float, callback: Callable[[], None]) -> None:
        """Run `callback` at `when`, or now if that has passed."""
        self._count += 1
        heapq.heappush(self._heap, (max(when, self.now), self._count, callback))

    def after(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Run `callback` after a delay."""
        self.at(self.now + delay_s, callback)

    def step(self) -> bool:
        """Run the next callback; return whether there was one."""
        if not self._heap:
            return False
        self.now, _, callback = heapq.heappop(self._heap)
        callback()
        return True

    def run(self, until: float = math.inf, stop: Callable[[], bool] | None = None) -> None:
        """Run all callbacks due up to `until`, or until `stop` says so or nothing is left."""
        while self._heap and self._heap[0][0] <= until:
            if stop is not None and stop():
                return
            self.step()
        if until < math.inf:
            self.now = max(self.now, until)
