"""Operations on KV memory as an engine makes them, with a model beside it that knows what must hold.

The model keeps the contents of every block, as the key of what was computed into it, and the key sets that an
observer of the key events would have. Tests choose the operations with Hypothesis, the scorecard
at random.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from worker_svc.kv.errors import IntegrityError, OutOfBlocks, require
from worker_svc.kv.memory import PrefixLoad, Promotion
from worker_svc.kv.paged import PagedMemory
from worker_svc.kv.pool import BlockPool

NUM_CHAINS = 16
_DEPTH = 4


def key_of(chain: int, index: int) -> bytes:
    """Return the key of a chain's block: chains share their heads and part on the way."""
    node = chain >> max(0, _DEPTH - 1 - index // 2)
    return bytes((node, index % 256, index // 256)).ljust(16, b"k")


@dataclass(slots=True, eq=False)
class Tenant:
    """A sequence that holds blocks."""

    chain: int
    num_tokens: int
    table: list[int] = field(default_factory=list)
    computed: int = 0
    load: PrefixLoad | None = None


class MemoryWorkload:
    """A `PagedMemory`, sequences that use it, and the model of both.

    Each operation takes numbers that say what it picks; it does nothing when there is nothing to
    pick. A violated expectation raises IntegrityError.
    """

    def __init__(
        self, block_size: int, num_blocks: int, num_host_blocks: int, pin_budget: int, first_block: int = 0
    ) -> None:
        pool = BlockPool(num_blocks, first_block)
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.memory = PagedMemory(pool, block_size, num_host_blocks, pin_budget)
        self.tenants: list[Tenant] = []
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
        keys = [key_of(chain, index) for index in range(num_tokens // size)]
        match = self.memory.match(keys, num_tokens)
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
        tenant = Tenant(chain, num_tokens, placement.block_table, placement.cached_tokens, placement.load)
        require("admission takes one slot more", len(tenant.table) == num_tokens // size + 1)
        cached = placement.cached_tokens + placement.host_cached_tokens
        require("something is left to compute", cached < num_tokens)
        self.outcomes["hit blocks"] += placement.cached_tokens // size
        self.outcomes["host hit blocks"] += placement.host_cached_tokens // size
        self.tenants.append(tenant)

    def compute(self, pick: int, num_tokens: int) -> None:
        """Copy what is due, then compute tokens of a sequence and publish the blocks that they fill."""
        if not self.tenants:
            return
        tenant = self.tenants[pick % len(self.tenants)]
        self.copy_out(failed=False)
        if tenant.load is not None:
            if tenant.load.num_missing:
                return
            try:
                self.memory.own_lost_blocks(tenant.table, tenant.load)
            except OutOfBlocks:
                self.outcomes["waits for a block"] += 1
                return
            self.copy_out(failed=False)
            tenant.computed = tenant.load.num_valid_blocks * self.block_size
            tenant.load = None
        end = min(tenant.computed + num_tokens, len(tenant.table) * self.block_size)
        self._check_contents(tenant)
        for index in range(tenant.computed // self.block_size, -(-end // self.block_size)):
            block, key = tenant.table[index], key_of(tenant.chain, index)
            users = [other for other in self.tenants if block in other.table and other.load is None]
            require("what is written belongs to one", users == [tenant], block)
            whole = end >= (index + 1) * self.block_size
            self._device[block] = key if whole else None
            if whole:
                self.memory.publish(block, key)
        tenant.computed = max(end, tenant.computed)

    def grow(self, pick: int) -> None:
        """Give a sequence one more block, if there is one."""
        if not self.tenants:
            return
        table = self.tenants[pick % len(self.tenants)].table
        try:
            self.memory.grow(table)
        except OutOfBlocks:
            report = self.memory.report(0)
            require("blocks are refused only when there is none", report.free + report.evictable == 0)

    def release(self, pick: int) -> None:
        """Let a sequence go, whatever it waits for."""
        if self.tenants:
            tenant = self.tenants.pop(pick % len(self.tenants))
            if tenant.load is not None:
                tenant.load.withdrawn = True
            self.memory.release(tenant.table)
            self.memory.drop_abandoned()

    def evict(self, num_blocks: int) -> None:
        """Evict cached blocks."""
        self.memory.evict(num_blocks)

    def copy_out(self, *, failed: bool) -> None:
        """Perform the demotions that are due, or fail to."""
        copies = self.memory.take_demotions()
        if failed and copies:
            self.memory.demotions_failed(copies)
            self.outcomes["failed demotions"] += len(copies)
            return
        for device_block, host_block in copies:
            self._host[host_block] = self._device.get(device_block)
        self.outcomes["demotions"] += len(copies)

    def start_promotions(self, at_most: int) -> None:
        """Start copies to the device; demotions go first."""
        self.copy_out(failed=False)
        promotions = self.memory.start_promotions(at_most)
        if promotions:
            self._landing.append(promotions)

    def land(self, pick: int, *, failed: bool) -> None:
        """End a group of copies to the device."""
        if not self._landing:
            return
        promotions = self._landing.pop(pick % len(self._landing))
        if failed:
            self.memory.promotions_failed(promotions)
            self.outcomes["failed promotions"] += len(promotions)
            return
        for promotion in promotions:
            require("what arrives is what was left", self._host[promotion.host_block] == promotion.key)
            self._device[promotion.device_block] = promotion.key
        self.memory.promotions_done(promotions)
        self.outcomes["promotions"] += len(promotions)

    def pin(self, name: int, chain: int, num_blocks: int) -> None:
        """Pin the head of a chain under a name, or unpin the name."""
        if num_blocks:
            keys = [key_of(chain, index) for index in range(num_blocks)]
            self.outcomes["pins"] += self.memory.pin(str(name), keys).accepted
        else:
            self.memory.unpin(str(name))

    def observe(self) -> None:
        """Apply the key events and compare the key sets with those of the memory."""
        events = self.memory.take_key_events()
        for key in events.demoted:
            self._seen_device.discard(key)
            self._seen_host.add(key)
        for key in events.evicted:
            self._seen_device.discard(key)
            self._seen_host.discard(key)
        for key in events.promoted:
            self._seen_host.discard(key)
            self._seen_device.add(key)
        self._seen_device.update(events.stored)
        device, host = self.memory.cached_keys()
        require("key events add up to the device's keys", self._seen_device == set(device))
        require("key events add up to the host's keys", self._seen_host == set(host))

    def check(self) -> None:
        """Audit everything from scratch."""
        self.memory.check_integrity(Counter(block for tenant in self.tenants for block in tenant.table))
        for tenant in self.tenants:
            self._check_contents(tenant)
        self.observe()

    def drain(self) -> None:
        """Let everything go and check that every block is back."""
        while self.tenants:
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
        draw = rng.random()
        pick = rng.randrange(1 << 16)
        if draw < 0.15:
            self.admit(rng.randrange(NUM_CHAINS), rng.randint(1, 12 * self.block_size))
        elif draw < 0.55:
            self.compute(pick, rng.randint(1, 2 * self.block_size))
        elif draw < 0.65:
            self.grow(pick)
        elif draw < 0.78:
            self.release(pick)
        elif draw < 0.80:
            self.evict(rng.randrange(4))
        elif draw < 0.88:
            self.start_promotions(rng.randrange(1, 5))
        elif draw < 0.95:
            self.land(pick, failed=rng.random() < 0.1)
        elif draw < 0.96:
            self.copy_out(failed=rng.random() < 0.5)
        elif draw < 0.97:
            self.pin(rng.randrange(3), rng.randrange(NUM_CHAINS), rng.randrange(4))
        else:
            self.observe()

    def _check_contents(self, tenant: Tenant) -> None:
        for index in range(tenant.computed // self.block_size):
            held = self._device.get(tenant.table[index])
            if held != key_of(tenant.chain, index):
                raise IntegrityError("a sequence reads what it computed", f"block {tenant.table[index]}")
