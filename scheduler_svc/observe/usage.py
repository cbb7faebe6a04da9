"""Who has used the devices, minute by minute, in bounded space."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, NoReturn

from octavo.v1 import operations_pb2

from scheduler_svc.core.usage import UsageSnapshot

_MINUTE_S: Final = 60.0
_MINUTES: Final = 24 * 60
_ROWS: Final = 100_000
"""Of all minutes together, one for each tenant that used anything in it."""


class TenantTotal(NamedTuple):
    """What a tenant has used since start."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    device_s: float = 0.0


class UsageTotals(NamedTuple):
    """What everybody has used since start, and what nobody has."""

    tenants: dict[str, TenantTotal]
    idle_s: float = 0.0
    unassigned_s: float = 0.0


def totals_of(counts: Mapping[str, tuple[int, int, int]], usage: UsageSnapshot) -> UsageTotals:
    """Put requests, prompt and output tokens of tenants together with their time."""
    tenants = {
        name: TenantTotal(*counts.get(name, (0, 0, 0)), usage.tenants.get(name, 0.0))
        for name in sorted({*counts, *usage.tenants})
    }
    return UsageTotals(tenants, usage.idle_s, usage.unassigned_s)


def usage_between(
    before: UsageTotals, after: UsageTotals, from_unix_s: float, until_unix_s: float
) -> operations_pb2.UsageMinute:
    """Return what was used between two moments, by those who used anything."""
    minute = operations_pb2.UsageMinute(
        from_unix_ms=round(from_unix_s * 1000),
        until_unix_ms=round(until_unix_s * 1000),
        idle_device_s=max(0.0, after.idle_s - before.idle_s),
        unassigned_device_s=after.unassigned_s - before.unassigned_s,
    )
    for name, total in after.tenants.items():
        former = before.tenants.get(name, TenantTotal())
        # A tenant that was forgotten and is back counts its tokens from nothing.
        requests, prompt, output = (
            max(0, now - then) for now, then in zip(total[:3], former[:3], strict=True)
        )
        device_s = total.device_s - former.device_s
        if requests or prompt or output or device_s:
            minute.tenants.add(
                tenant=name, requests=requests, prompt_tokens=prompt, output_tokens=output, device_s=device_s
            )
    return minute


class UsageHistory:
    """One bucket a minute, for a day; less where very many tenants are busy."""

    def __init__(
        self,
        totals: Callable[[], UsageTotals],
        price_per_gpu_hour: float | None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._totals = totals
        self._price_per_gpu_hour = price_per_gpu_hour
        self._wall = wall
        self._minutes: deque[operations_pb2.UsageMinute] = deque()
        self._rows = 0
        self._last = UsageTotals({})
        self._last_at = wall()

    async def run(self) -> NoReturn:
        """End a bucket each minute until cancelled."""
        while True:
            await asyncio.sleep(_MINUTE_S)
            self.end_minute()

    def end_minute(self) -> None:
        """Keep what was used since the last bucket."""
        minute, totals = self._running()
        self._minutes.append(minute)
        self._rows += len(minute.tenants)
        self._last, self._last_at = totals, self._wall()
        while len(self._minutes) > _MINUTES or (self._rows > _ROWS and len(self._minutes) > 1):
            self._rows -= len(self._minutes.popleft().tenants)

    def since(self, seconds: float) -> operations_pb2.GetUsageResponse:
        """Return the buckets that end within the last so many seconds, and the one that runs."""
        after_ms = (self._wall() - seconds) * 1000
        minutes = [minute for minute in self._minutes if minute.until_unix_ms > after_ms]
        return operations_pb2.GetUsageResponse(
            minutes=[*minutes, self._running()[0]], price_per_gpu_hour=self._price_per_gpu_hour
        )

    def _running(self) -> tuple[operations_pb2.UsageMinute, UsageTotals]:
        totals = self._totals()
        return usage_between(self._last, totals, self._last_at, self._wall()), totals
