"""The watchdog of the event loop."""

import asyncio
import time

from octavo.service.loop_lag import LoopLag
from prometheus_client import CollectorRegistry


async def test_loop_lag_counts_a_pause_for_as_long_as_it_was() -> None:
    registry = CollectorRegistry()
    lag = LoopLag(registry)
    lag.start()
    await asyncio.sleep(0)
    time.sleep(0.5)  # noqa: ASYNC251 - the pause
    while not registry.get_sample_value("octavo_event_loop_lag_seconds_count"):  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0)
    lag.stop()

    assert registry.get_sample_value("octavo_event_loop_lag_seconds_bucket", {"le": "0.1"}) == 0
    assert (registry.get_sample_value("octavo_event_loop_lag_seconds_sum") or 0) >= 0.35
