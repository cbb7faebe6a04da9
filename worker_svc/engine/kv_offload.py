"""Performs the copies between device and host that KV memory asks for, and measures them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from worker_svc.errors import DeviceLost
from worker_svc.kv.memory import KvMemory, Promotion
from worker_svc.runner.base import BlockCopy, CopyTicket, ModelRunner

_US_PER_S = 1e6


@dataclass(frozen=True, slots=True)
class _UnderWay:
    promotions: list[Promotion]
    ticket: CopyTicket


class KvOffload:
    """Copies out before a step overwrites the blocks, copies in beside the steps."""

    def __init__(self, runner: ModelRunner, memory: KvMemory, promote_blocks_per_step: int) -> None:
        self._runner = runner
        self._memory = memory
        self._promote_blocks_per_step = promote_blocks_per_step
        self._under_way: list[_UnderWay] = []

    def poll(self) -> None:
        """Take in what has arrived on the device."""
        if not self._under_way:
            return
        waiting = []
        for group in self._under_way:
            if group.ticket.done():
                elapsed_us = group.ticket.elapsed_s() * _US_PER_S
                self._memory.cost.copied_in(len(group.promotions), elapsed_us)
                self._memory.promotions_done(group.promotions)
            else:
                waiting.append(group)
        self._under_way = waiting

    def perform(self, clock: Callable[[], float]) -> None:
        """Copy out what is about to be overwritten, then start to copy in what is waited for.

        A copy that fails costs the cached contents, not the step.
        """
        demotions = self._memory.take_demotions()
        if demotions:
            started = clock()
            try:
                self._runner.copy_to_host([BlockCopy(device, host) for device, host in demotions])
            except DeviceLost:
                raise
            except Exception:  # noqa: BLE001  whatever it is, the contents are lost and the step is not
                self._memory.demotions_failed(demotions)
            else:
                self._memory.cost.copied_out(len(demotions), (clock() - started) * _US_PER_S)
        promotions = self._memory.start_promotions(self._promote_blocks_per_step)
        if promotions:
            copies = [BlockCopy(wait.device_block, wait.host_block) for wait in promotions]
            try:
                ticket = self._runner.copy_to_device(copies)
            except DeviceLost:
                raise
            except Exception:  # noqa: BLE001  whatever it is, it is computed again instead
                self._memory.promotions_failed(promotions)
            else:
                self._under_way.append(_UnderWay(promotions, ticket))
                self.poll()
