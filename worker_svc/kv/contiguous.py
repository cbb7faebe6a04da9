"""Contiguous KV memory: the control arm of experiments."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from octavo.protocol.steps import KeyEvents, PoolReport, RefuseReason

from worker_svc.kv.errors import DoubleFree, OutOfBlocks, require
from worker_svc.kv.host import CopyCost
from worker_svc.kv.memory import NO_STEP, Match, PinOutcome, Placement, PrefixLoad, Promotion, StepUse
from worker_svc.kv.pool import FreeRuns


class ContiguousMemory:
    """Each sequence gets one run of blocks for all it may ever need, first fit, and shares nothing.

    So there is no cache to match, publish, pin or demote, and a table never grows.
    """

    refusal = RefuseReason.NO_CONTIGUOUS_RUN

    def __init__(self, num_blocks: int, block_size: int, first_block: int = 0) -> None:
        self.cost = CopyCost(block_size)
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._free = FreeRuns(first_block, num_blocks)
        self._runs: dict[int, int] = {}
        self._miss_tokens = 0

    def match(self, keys: Seq[bytes], num_tokens: int) -> Match:
        """Nothing is cached."""
        return Match()

    def admit(self, match: Match, num_tokens: int, reserve_tokens: int) -> Placement:
        """Reserve one run for `reserve_tokens`, at least for `num_tokens` and one more."""
        num_blocks = -(-max(num_tokens + 1, reserve_tokens) // self._block_size)
        start = self._free.take_run(num_blocks)
        if start is None:
            raise OutOfBlocks(num_blocks, self._free.longest)
        self._runs[start] = num_blocks
        self._miss_tokens += num_tokens
        return Placement(list(range(start, start + num_blocks)))

    def grow(self, block_table: list[int]) -> None:
        """Refuse: what was reserved is all there is."""
        raise OutOfBlocks(len(block_table) + 1, len(block_table))

    def own_lost_blocks(self, block_table: list[int], load: PrefixLoad) -> None:
        """Nothing is on its way."""

    def release(self, block_table: list[int]) -> None:
        """Give up the run of a sequence and empty its table."""
        num_blocks = self._runs.pop(block_table[0], None) if block_table else None
        if num_blocks is None or num_blocks != len(block_table):
            raise DoubleFree(f"blocks {block_table} are not a run that was reserved")
        self._free.give_run(block_table[0], block_table[0] + num_blocks)
        block_table.clear()

    def publish(self, block: int, key: bytes) -> None:
        """Do nothing: runs are not shared."""

    def evict(self, num_blocks: int) -> None:
        """Do nothing: nothing is cached."""

    def drop_abandoned(self) -> None:
        """Do nothing: nothing is on its way."""

    def take_demotions(self) -> list[tuple[int, int]]:
        """There is one tier."""
        return []

    def demotions_failed(self, copies: Seq[tuple[int, int]]) -> None:
        """There is one tier."""

    def start_promotions(self, at_most: int) -> list[Promotion]:
        """There is one tier."""
        return []

    def promotions_done(self, promotions: Seq[Promotion]) -> None:
        """There is one tier."""

    def promotions_failed(self, promotions: Seq[Promotion]) -> None:
        """There is one tier."""

    def pin(self, name: str, keys: Seq[bytes]) -> PinOutcome:
        """Refuse: runs cannot be pinned."""
        return PinOutcome(not keys, len(frozenset(keys)), 0)

    def unpin(self, name: str) -> int:
        """Nothing is pinned."""
        return 0

    def unpin_all(self) -> None:
        """Nothing is pinned."""

    def take_key_events(self) -> KeyEvents:
        """Nothing is cached."""
        return KeyEvents()

    def cached_keys(self) -> tuple[list[bytes], list[bytes]]:
        """Nothing is cached."""
        return [], []

    @property
    def num_active(self) -> int:
        """Blocks that sequences hold."""
        return self._num_blocks - self._free.num_free

    def report(self, unused_slots: int, step: StepUse = NO_STEP) -> PoolReport:
        """Return the figures of now, and those of the last step."""
        return PoolReport(
            free=self._free.num_free,
            evictable=0,
            active=self.num_active,
            largest_free_run=self._free.longest,
            unused_slots=unused_slots,
            step_active=step.active,
            step_unused_slots=step.unused_slots,
            miss_tokens=self._miss_tokens,
        )

    def check_integrity(self, held: Mapping[int, int]) -> None:
        """Verify that free blocks and runs make up the pool, and that sequences hold the runs."""
        self._free.check_integrity()
        reserved = [block for start, count in self._runs.items() for block in range(start, start + count)]
        require("runs do not overlap", len(reserved) == len(set(reserved)), reserved)
        require("no reserved block is free", set(reserved).isdisjoint(self._free.blocks()))
        require("free + active == total", len(reserved) + self._free.num_free == self._num_blocks)
        require("each reserved block is held once", dict.fromkeys(reserved, 1) == dict(held))
