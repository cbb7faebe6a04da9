"""Who may hold how many of something of which there is a fixed number."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Places:
    """A number of places, of which nobody can take the last.

    One may hold `share` times as many as are free: with a share of 3, one alone gets three quarters, and
    where two want all, each gets three sevenths.
    """

    def __init__(self, size: int, share: float) -> None:
        self.size = size
        self._share = share
        self._taken = 0
        self._held: Counter[str] = Counter()

    def take(self, who: str) -> bool:
        """Take a place, unless there is none for `who`."""
        held = self._held[who]
        if held >= self._share * (self.size - self._taken) and (held or self._taken >= self.size):
            return False
        self._held[who] = held + 1
        self._taken += 1
        return True

    def leave(self, who: str) -> None:
        """Give a place back."""
        self._taken -= 1
        self._held[who] -= 1
        if not self._held[who]:
            del self._held[who]


class Turns:
    """Lets so many of each go on at once; the others wait for their turn."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._of: dict[str, tuple[asyncio.Semaphore, int]] = {}

    @asynccontextmanager
    async def of(self, who: str) -> AsyncIterator[None]:
        """Wait for a turn, and have it."""
        turn, waiting = self._of.get(who) or (asyncio.Semaphore(self._at_once), 0)
        self._of[who] = turn, waiting + 1
        try:
            async with turn:
                yield
        finally:
            turn, waiting = self._of[who]
            if waiting == 1:
                del self._of[who]
            else:
                self._of[who] = turn, waiting - 1
