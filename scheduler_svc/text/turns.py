"""Who is next among those that have jobs for the tokenizers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

# What a job costs besides its bytes, in bytes that cost as much.
_JOB_BYTES: Final = 256
_IDLE_LANES: Final = 64


class Queued(Protocol):
    """What waits for its turn."""

    @property
    def lane(self) -> str:
        """Whose it is, and of what kind."""

    @property
    def size_bytes(self) -> int:
        """What it costs."""

    @property
    def since(self) -> float:
        """When it came."""


T = TypeVar("T", bound=Queued)


class TokenizerTurns(Generic[T]):
    """Jobs in lanes: the lane that has had the fewest bytes is next, and in it who came first.

    A lane that comes back begins where the others are: idle time earns no credit.
    """

    def __init__(self) -> None:
        self._lanes: dict[str, deque[T]] = {}
        self._had: dict[str, int] = {}
        self._level = 0
        """What the lane had that was served last."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, job: T) -> None:
        """Take a job in."""
        lane = self._lanes.get(job.lane)
        if lane is None:
            lane = self._lanes[job.lane] = deque()
            self._had[job.lane] = max(self._had.get(job.lane, 0), self._level)
        lane.append(job)
        self._count += 1

    def pop(self) -> T | None:
        """Return the next job, or None."""
        if not self._lanes:
            return None
        name = min(self._lanes, key=self._had.__getitem__)
        self._level = self._had[name]
        job = self._take(name, deque.popleft)
        self._had[name] += _JOB_BYTES + job.size_bytes
        return job

    def pop_newest(self, lane: str) -> T | None:
        """Return the job of a lane that came last, or None."""
        return self._take(lane, deque.pop) if lane in self._lanes else None

    def pop_older(self, until: float) -> T | None:
        """Return a job that came before a time, or None."""
        name = next((name for name, lane in self._lanes.items() if lane[0].since <= until), None)
        return self._take(name, deque.popleft) if name is not None else None

    def _take(self, name: str, end: Callable[[deque[T]], T]) -> T:
        lane = self._lanes[name]
        job = end(lane)
        self._count -= 1
        if not lane:
            del self._lanes[name]
            if len(self._had) > 2 * len(self._lanes) + _IDLE_LANES:
                kept = {n: had for n, had in self._had.items() if n in self._lanes or had > self._level}
                self._had = {**kept, name: self._had[name]}
        return job
