"""What processes cost that have nothing to do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import psutil

from tests.e2e.scheduler_stack import until

WATCHED_S = 10.0


async def idle_share(processes: Sequence[psutil.Process]) -> float:
    """Return the CPU time that these processes use in ten idle seconds, as a share of what they used before.

    A slow machine takes longer for both.
    """
    await until(lambda: _is_quiet(processes))
    before = _cpu_s(processes)
    await asyncio.sleep(WATCHED_S)  # What is measured here is that nothing happens while time passes.
    return (_cpu_s(processes) - before) / before


async def _is_quiet(processes: Sequence[psutil.Process]) -> bool:
    """Whether start-up is over: hardly any CPU time for half a second."""
    before = _cpu_s(processes)
    await asyncio.sleep(0.5)
    return _cpu_s(processes) - before < 0.01 * before


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)
