"""Who may hold how many of something of which there is a fixed number."""

from __future__ import annotations

import asyncio
from collections import Counter, deque


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
    """Lets so many of each go on at once; the others wait for their turn, in order."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def take(self, who: str) -> None:
        """Wait for a turn."""
        if self._running[who] < self._at_once:
            self._running[who] += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(who, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(who)
            raise

    def leave(self, who: str) -> None:
        """Give a turn to the next one."""
        waiting = self._waiting.get(who) or deque()
        while waiting:
            turn = waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._waiting.pop(who, None)
        self._running[who] -= 1
        if not self._running[who]:
            del self._running[who]
