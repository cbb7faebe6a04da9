"""A watchdog of the event loop: how late it comes to what is due, which is how long everybody waits."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from prometheus_client import CollectorRegistry, Histogram

_INTERVAL_S: Final = 0.1
_BUCKETS: Final = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class LoopLag:
    """Wakes up every 100 ms and observes how much later than that it was."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lag = Histogram(
            "octavo_event_loop_lag_seconds",
            "How late the event loop came to a timer that fires every 100 ms.",
            buckets=_BUCKETS,
            registry=registry,
        )
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to watch the running loop, until `stop`."""
        self._arm(asyncio.get_running_loop())

    def stop(self) -> None:
        """Watch no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(_INTERVAL_S, self._fire, loop, time.monotonic() + _INTERVAL_S)

    def _fire(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        # uvloop counts in milliseconds and may be early by a part of one.
        self._lag.observe(max(0.0, time.monotonic() - due))
        self._arm(loop)
