"""What happened lately, in constant space however much it is."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, NoReturn

from octavo.v1 import operations_pb2

RATE_WINDOW_S: Final = 10.0
HISTORY_INTERVAL_S: Final = 2.0
_HISTORY_POINTS: Final = 300
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


class RecentSum:
    """A sum over the last ten seconds, kept by tenths: however much is added, it does not grow."""

    def __init__(self) -> None:
        self._sums: deque[tuple[int, float]] = deque()

    def add(self, now: float, value: float) -> None:
        """Take a value."""
        tenth, sums = int(now * 10), self._sums
        if sums and sums[-1][0] == tenth:
            sums[-1] = (tenth, sums[-1][1] + value)
            return
        sums.append((tenth, value))
        while sums[0][0] < tenth - 10 * RATE_WINDOW_S:
            sums.popleft()

    def per_s(self, now: float) -> float:
        """Return the sum per second."""
        since = int(now * 10) - 10 * RATE_WINDOW_S
        return sum(value for tenth, value in self._sums if tenth >= since) / RATE_WINDOW_S


class History:
    """What a graph needs of the status: one point each two seconds, for the last ten minutes."""

    def __init__(self, status: Callable[[], operations_pb2.Status]) -> None:
        self._status = status
        self._points: deque[operations_pb2.HistoryPoint] = deque(maxlen=_HISTORY_POINTS)

    async def run(self) -> NoReturn:
        """Sample until cancelled."""
        while True:
            await asyncio.sleep(HISTORY_INTERVAL_S)
            self.sample()

    def sample(self) -> None:
        """Add a point for the moment."""
        status = self._status()
        self._points.append(
            operations_pb2.HistoryPoint(
                uptime_s=status.uptime_s,
                level=status.level,
                live_requests=status.live_requests,
                waiting=sum(queue.waiting for queue in status.queues),
                running=sum(worker.running for worker in status.workers),
                rates=status.rates,
            )
        )

    def since(self, uptime_s: float) -> Iterable[operations_pb2.HistoryPoint]:
        """Return the points after a time, oldest first."""
        return [point for point in self._points if point.uptime_s > uptime_s]
