"""Operations on KV memory as an engine makes them, with a model beside it that knows what must hold.

The model keeps the contents of every block, as the key of what was computed into it, and the key sets that an
observer of the key events would have. Tests choose the operations with Hypothesis, the scorecard at random.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from worker_svc.kv.errors import OutOfBlocks, require
from worker_svc.kv.memory import PrefixLoad, Promotion
from worker_svc.kv.paged import PagedMemory
from worker_svc.kv.pool import BlockPool

NUM_CHAINS = 16
_DEPTH = 4


def key_of(chain: int, index: int) -> bytes:
    """Return the key of a chain's block: chains share their heads and part on the way."""
    node = chain >> max(0, _DEPTH - 1 - index // 2)
    return bytes((node, index % 256, index // 256)).ljust(16, b"k")


def _keys(chain: int, count: int) -> list[bytes]:
    return [key_of(chain, index) for index in range(count)]


@dataclass(slots=True, eq=False)
class BlockHolder:
    """A sequence that holds blocks."""

    chain: int
    table: list[int]
    computed: int
    load: PrefixLoad | None


class MemoryWorkload:
    """A `PagedMemory`, sequences that use it, and the model of both.

    Operations take numbers that say what they pick, if there is something. They raise IntegrityError when an
    expectation is violated.
    """

    def __init__(
        self, block_size: int, num_blocks: int, num_host_blocks: int, pin_budget: int, first_block: int = 0
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        pool = BlockPool(num_blocks, first_block)
        self.memory = PagedMemory(pool, block_size, num_host_blocks, pin_budget)
        self.holders: list[BlockHolder] = []
        self.outcomes: Counter[str] = Counter()
        """How often what came to pass."""
        self._landing: list[list[Promotion]] = []
        self._device: dict[int, bytes | None] = {}
        self._host: dict[int, bytes | None] = {}
        self._seen_device: set[bytes] = set()
        self._seen_host: set[bytes] = set()

    def admit(self, chain: int, num_tokens: int) -> None:
        """Take in a sequence, or be refused."""
        size = self.block_size
        match = self.memory.match(_keys(chain, num_tokens // size), num_tokens)
        if num_tokens % 5 == 0:
            # An eviction between the match and its use must not matter.
            self.memory.evict(num_tokens % 7)
        before = self.memory.report(0)
        try:
            placement = self.memory.admit(match, num_tokens, num_tokens)
        except OutOfBlocks:
            self.outcomes["refused"] += 1
            after = self.memory.report(0)
            require("a refusal takes nothing", before == after, (before, after))
            return
        table, cached, on_host = placement.block_table, placement.cached_tokens, placement.host_cached_tokens
        require("admission takes one slot more", len(table) == num_tokens // size + 1)
        require("something is left to compute", cached + on_host < num_tokens)
        self.outcomes["hit blocks"] += cached // size
        self.outcomes["host hit blocks"] += on_host // size
        self.holders.append(BlockHolder(chain, table, cached, placement.load))

    def compute(self, pick: int, num_tokens: int) -> None:
        """Copy what is due, then compute tokens of a sequence and publish the blocks that they fill."""
        if not self.holders:
            return
        holder = self.holders[pick % len(self.holders)]
        self.copy_out(failed=False)
        if holder.load is not None:
            if holder.load.num_missing:
                return
            try:
                self.memory.own_lost_blocks(holder.table, holder.load)
            except OutOfBlocks:
                self.outcomes["waits for a block"] += 1
                return
            self.copy_out(failed=False)
            holder.computed = holder.load.num_valid_blocks * self.block_size
            holder.load = None
        end = min(holder.computed + num_tokens, len(holder.table) * self.block_size)
        self._check_contents(holder)
        for index in range(holder.computed // self.block_size, -(-end // self.block_size)):
            block, key = holder.table[index], key_of(holder.chain, index)
            users = [other for other in self.holders if block in other.table and other.load is None]
            require("what is written belongs to one", users == [holder], block)
            whole = end >= (index + 1) * self.block_size
            self._device[block] = key if whole else None
            if whole:
                self.memory.publish(block, key)
        holder.computed = max(end, holder.computed)

    def grow(self, pick: int) -> None:
        """Give a sequence one more block, if there is one."""
        if self.holders:
            try:
                self.memory.grow(self.holders[pick % len(self.holders)].table)
            except OutOfBlocks:
                report = self.memory.report(0)
                require("blocks are refused only when there is none", report.free + report.evictable == 0)

    def release(self, pick: int) -> None:
        """Let a sequence go, whatever it waits for."""
        if self.holders:
            holder = self.holders.pop(pick % len(self.holders))
            if holder.load is not None:
                holder.load.withdrawn = True
            self.memory.release(holder.table)
            self.memory.drop_abandoned()

    def copy_out(self, *, failed: bool) -> None:
        """Perform the demotions that are due, or fail to."""
        copies = self.memory.take_demotions()
        self.outcomes["failed demotions" if failed else "demotions"] += len(copies)
        if failed:
            self.memory.demotions_failed(copies)
            return
        for device_block, host_block in copies:
            self._host[host_block] = self._device.get(device_block)

    def start_promotions(self, at_most: int) -> None:
        """Start copies to the device; demotions go first."""
        self.copy_out(failed=False)
        if promotions := self.memory.start_promotions(at_most):
            self._landing.append(promotions)

    def land(self, pick: int, *, failed: bool) -> None:
        """End a group of copies to the device."""
        if not self._landing:
            return
        promotions = self._landing.pop(pick % len(self._landing))
        self.outcomes["failed promotions" if failed else "promotions"] += len(promotions)
        if failed:
            self.memory.promotions_failed(promotions)
            return
        for promotion in promotions:
            require("what arrives is what was left", self._host[promotion.host_block] == promotion.key)
            self._device[promotion.device_block] = promotion.key
        self.memory.promotions_done(promotions)

    def pin(self, name: int, chain: int, num_blocks: int) -> None:
        """Pin the head of a chain under a name, or unpin the name."""
        if num_blocks:
            self.outcomes["pins"] += self.memory.pin(str(name), _keys(chain, num_blocks)).accepted
        else:
            self.memory.unpin(str(name))

    def observe(self) -> None:
        """Apply the key events and compare the key sets with those of the memory."""
        events = self.memory.take_key_events()
        self._seen_device.difference_update(events.demoted, events.evicted)
        self._seen_device.update(events.promoted, events.stored)
        self._seen_host.update(events.demoted)
        self._seen_host.difference_update(events.evicted, events.promoted)
        device, host = self.memory.cached_keys()
        require("key events add up to the device's keys", self._seen_device == set(device))
        require("key events add up to the host's keys", self._seen_host == set(host))

    def check(self) -> None:
        """Audit everything from scratch."""
        self.memory.check_integrity(Counter(block for holder in self.holders for block in holder.table))
        for holder in self.holders:
            self._check_contents(holder)
        self.observe()

    def drain(self) -> None:
        """Let everything go and check that every block is back."""
        while self.holders:
            self.release(0)
        while self._landing:
            self.land(0, failed=False)
        for name in range(4):
            self.memory.unpin(str(name))
        self.check()
        report = self.memory.report(0)
        require("every block is back", report.free + report.evictable == self.num_blocks, report)

    def random_operation(self, rng: random.Random) -> None:
        """Make one operation that an engine could make now."""
        pick = rng.randrange(1 << 16)
        operations: dict[Callable[[], None], int] = {
            lambda: self.admit(rng.randrange(NUM_CHAINS), rng.randint(1, 12 * self.block_size)): 15,
            lambda: self.compute(pick, rng.randint(1, 2 * self.block_size)): 40,
            lambda: self.grow(pick): 10,
            lambda: self.release(pick): 13,
            lambda: self.memory.evict(rng.randrange(4)): 2,
            lambda: self.start_promotions(rng.randrange(1, 5)): 8,
            lambda: self.land(pick, failed=rng.random() < 0.1): 7,
            lambda: self.copy_out(failed=rng.random() < 0.5): 3,
            lambda: self.pin(rng.randrange(3), rng.randrange(NUM_CHAINS), rng.randrange(4)): 1,
            self.observe: 1,
        }
        (operation,) = rng.choices([*operations], [*operations.values()])
        operation()

    def _check_contents(self, holder: BlockHolder) -> None:
        keys = _keys(holder.chain, holder.computed // self.block_size)
        for block, key in zip(holder.table, keys, strict=False):
            require("a sequence reads what it computed", self._device.get(block) == key, block)
