"""Latency, throughput, cost and level over the last ten minutes, one point each two seconds."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, NoReturn

from octavo.v1 import operations_pb2

INTERVAL_S: Final = 2.0
_POINTS: Final = 300


class History:
    """Samples a status again and again, and keeps what a graph needs of it."""

    def __init__(self, status: Callable[[], operations_pb2.Status]) -> None:
        self._status = status
        self._points: deque[operations_pb2.HistoryPoint] = deque(maxlen=_POINTS)

    async def run(self) -> NoReturn:
        """Sample until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
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
