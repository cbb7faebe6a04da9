"""For whom a worker is kept that no scheduler holds."""

from __future__ import annotations

import time
from collections.abc import Callable


class Reservation:
    """Keeps the worker for the preferred scheduler for a while.

    At first for one of rank 0, then for one as good as the last: who has lost its stream, or is
    started together with the worker, gets it before a standby that asks four times a second.
    """

    def __init__(self, grace_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._grace_s = grace_s
        self.clock = clock
        self._rank = 0
        self._until = clock() + grace_s

    def renew(self, rank: int) -> None:
        """A scheduler of this rank has lost the worker."""
        self._rank = rank
        self._until = self.clock() + self._grace_s

    def end(self) -> None:
        """Whoever comes may have the worker."""
        self._until = self.clock()

    def left_s(self, rank: int) -> float:
        """Return for how long a scheduler of this rank has to wait; 0 when it need not."""
        return max(0.0, self._until - self.clock()) if rank > self._rank else 0.0
