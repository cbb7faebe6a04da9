"""Paged KV memory: block pool, prefix cache over two tiers, pins."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

from octavo.protocol.steps import KeyEvents, PoolReport, RefuseReason

from worker_svc.kv.errors import OutOfBlocks, require
from worker_svc.kv.host import CopyCost, HostTier
from worker_svc.kv.memory import NO_STEP, Match, PinOutcome, Placement, PrefixLoad, Promotion, StepUse
from worker_svc.kv.pins import Pins
from worker_svc.kv.pool import BlockPool, EvictedBlock


class CacheTier(enum.Enum):
    """Where the contents of a key are. A key that is on the device counts as there only."""

    NOWHERE = 0
    DEVICE = 1
    HOST = 2


class PagedMemory:
    """Blocks go to sequences one by one and are shared through content keys.

    A key is in one tier at a time. What the device evicts is demoted to the host tier; a sequence
    that finds its keys there takes device blocks for them, which fill while others run. A block under
    way is held by the promotion itself too, so that it cannot be reused before the copy has ended.
    Sequences that want the same keys meanwhile share the block.
    """

    refusal = RefuseReason.NO_BLOCKS

    def __init__(
        self, pool: BlockPool, block_size: int, num_host_blocks: int, pin_budget_blocks: int
    ) -> None:
        self.cost = CopyCost(block_size)
        self._pool = pool
        self._block_size = block_size
        self._host = HostTier(num_host_blocks)
        self._pins = Pins(pool, pin_budget_blocks)
        self._ledger = KeyLedger(self._tier_of)
        self._demotions: dict[int, int] = {}
        self._queued: dict[bytes, Promotion] = {}
        self._under_way: dict[bytes, Promotion] = {}
        self._hit_tokens = 0
        self._miss_tokens = 0
        self._host_hit_tokens = 0

    # -- sequences

    def match(self, keys: Seq[bytes], num_tokens: int) -> Match:
        """Find what is cached of a sequence of `num_tokens`, at most all but its last token."""
        usable = keys[: (num_tokens - 1) // self._block_size]
        device_blocks = self._pool.match(usable)
        end = start = len(device_blocks)
        if self._host.num_blocks:
            # A key on the device again after one in the host tier is rare; it is computed again.
            while end < len(usable) and usable[end] in self._host and usable[end] not in self._pool:
                end += 1
        weighed = end - start
        if weighed and not self.cost.worth_copying(weighed):
            end = start
        return Match(keys, device_blocks, usable[start:end], self._pool.evictions, weighed)

    def admit(self, match: Match, num_tokens: int, reserve_tokens: int) -> Placement:
        """Take blocks for `num_tokens` and one more; see `KvMemory.admit`. Nothing is reserved."""
        if match.evictions != self._pool.evictions:
            match = self.match(match.keys, num_tokens)
        num_blocks = num_tokens // self._block_size + 1
        joined = [self._promotion_of(key) for key in match.host_keys]
        shared = match.device_blocks + [promotion.device_block for promotion in joined if promotion]
        fresh = [key for key, promotion in zip(match.host_keys, joined, strict=True) if not promotion]
        self._pool.acquire(shared)
        host_blocks = [self._host.lock(key) for key in fresh]
        try:
            blocks, evicted = self._pool.allocate(num_blocks - len(shared))
        except OutOfBlocks:
            self._pool.release(shared)
            for key in fresh:
                self._host.unlock(key)
            raise
        self.cost.decided(match.weighed_blocks)
        self._demote(evicted)
        return self._place(match, num_tokens, blocks, dict(zip(fresh, host_blocks, strict=True)))

    def grow(self, block_table: list[int]) -> None:
        """Append a block to a table; see `KvMemory.grow`."""
        blocks, evicted = self._pool.allocate(1)
        if evicted:
            self._demote(evicted)
        block_table.extend(blocks)

    def own_lost_blocks(self, block_table: list[int], load: PrefixLoad) -> None:
        """Put blocks that nobody else has in place of those that the sequence must compute again.

        A block behind the first one lost may have come and be shared; one that is lost may be computed
        by another sequence that waited for it. Once that one is gone, the block is this sequence's own.
        """
        replaced = [
            index
            for index in range(load.num_valid_blocks, load.num_blocks)
            if (index in load.taken_blocks and self._pool.ref_count(block_table[index]) > 1)
            or self._pool.key_of(block_table[index]) is not None
        ]
        old = [block_table[index] for index in replaced]
        self._pool.release(old)
        try:
            blocks, evicted = self._pool.allocate(len(old))
        except OutOfBlocks:
            self._pool.acquire(old)
            raise
        self._demote(evicted)
        for index, block in zip(replaced, blocks, strict=True):
            block_table[index] = block

    def release(self, block_table: list[int]) -> None:
        """Give up the blocks of a sequence and empty its table."""
        self._pool.release(block_table)
        block_table.clear()

    def publish(self, block: int, key: bytes) -> None:
        """Let others share a block whose every token has been computed. A duplicate stays private."""
        before = self._tier_of(key)
        if not self._pool.publish(block, key):
            return
        self._ledger.moving(key, before)
        if before is CacheTier.HOST and not self._host.is_locked(key):
            self._host.remove(key)
        self._pins.published(key, block)

    def evict(self, num_blocks: int) -> None:
        """Evict up to so many cached blocks that nobody uses."""
        self._demote(self._pool.evict(num_blocks))

    # -- tiers

    def take_demotions(self) -> list[tuple[int, int]]:
        """Return (device block, host block) of the copies due before the device blocks are written."""
        copies = [(device_block, host_block) for host_block, device_block in self._demotions.items()]
        self._demotions.clear()
        return copies

    def demotions_failed(self, copies: Seq[tuple[int, int]]) -> None:
        """Forget the contents that did not reach the host tier.

        Promotions of them that are not yet under way fail with them.
        """
        lost = {host_block for _, host_block in copies}
        self.promotions_failed([wait for wait in self._queued.values() if wait.host_block in lost])
        for key in self._host.keys_in(lost):
            self._drop_from_host(key)

    def drop_abandoned(self) -> None:
        """Give back blocks of queued promotions that no sequence waits for any more."""
        for key, promotion in list(self._queued.items()):
            if self._pool.ref_count(promotion.device_block) == 1:
                del self._queued[key]
                self._host.unlock(key)
                if key in self._pool:
                    # Somebody computed it meanwhile.
                    self._host.remove(key)
                self._pool.release([promotion.device_block])

    def start_promotions(self, at_most: int) -> list[Promotion]:
        """Return the promotions to start now, oldest first."""
        started = list(self._queued.values())[:at_most] if self._queued else []
        for promotion in started:
            self._under_way[promotion.key] = self._queued.pop(promotion.key)
        return started

    def promotions_done(self, promotions: Seq[Promotion]) -> None:
        """Publish what has arrived on the device, and move its keys there."""
        for promotion in promotions:
            self._end(promotion)
            self.publish(promotion.device_block, promotion.key)
            self._host.remove(promotion.key)
            if self._pool.key_of(promotion.device_block) is None:
                self._leave_to_first(promotion)
        self._pool.release([promotion.device_block for promotion in promotions])

    def promotions_failed(self, promotions: Seq[Promotion]) -> None:
        """Forget what did not arrive; the sequences compute it again, from the first such block on."""
        for promotion in promotions:
            self._end(promotion)
            for load, index in promotion.waiters:
                load.num_valid_blocks = min(load.num_valid_blocks, index)
            self._leave_to_first(promotion)
            self._drop_from_host(promotion.key)
        self._pool.release([promotion.device_block for promotion in promotions])

    # -- pins and figures

    def pin(self, name: str, keys: Seq[bytes]) -> PinOutcome:
        """Keep these blocks on the device, in place of what was pinned under this name."""
        wanted = len(frozenset(keys))
        if not self._pins.fits(name, keys):
            return PinOutcome(False, wanted, 0)
        self._pins.set(name, keys)
        return PinOutcome(True, wanted, self._pins.held_of(keys))

    def unpin(self, name: str) -> int:
        """End a pin; return how many blocks it held alone."""
        return len(self._pins.set(name, ()))

    def unpin_all(self) -> None:
        """End all pins; what they held stays cached."""
        self._pins.clear()

    def take_key_events(self) -> KeyEvents:
        """Return what became of cached keys since the last call."""
        return self._ledger.take()

    def cached_keys(self) -> tuple[list[bytes], list[bytes]]:
        """Return the keys on the device and in the host tier."""
        return list(self._pool.keys), [key for key in self._host.keys if key not in self._pool]

    @property
    def num_active(self) -> int:
        """Blocks that sequences hold."""
        return self._pool.num_active

    def report(self, unused_slots: int, step: StepUse = NO_STEP) -> PoolReport:
        """Return the figures of now, and those of the last step."""
        pool = self._pool
        return PoolReport(
            free=pool.num_free,
            evictable=pool.num_evictable,
            active=pool.num_active,
            pinned=self._pins.num_held,
            host_free=self._host.num_free,
            largest_free_run=pool.largest_free_run,
            unused_slots=unused_slots,
            step_active=step.active,
            step_unused_slots=step.unused_slots,
            hit_tokens=self._hit_tokens,
            miss_tokens=self._miss_tokens,
            host_hit_tokens=self._host_hit_tokens,
            copies=self.cost.report() if self._host.num_blocks else None,
        )

    def check_integrity(self, held: Mapping[int, int]) -> None:
        """Verify every invariant from scratch, given how many sequences hold each block."""
        self._pool.check_integrity()
        self._host.check_integrity()
        self._pins.check_integrity()
        promotions = {**self._queued, **self._under_way}
        require("a key is promoted once", len(promotions) == len(self._queued) + len(self._under_way))
        locked = {key for key in self._host.keys if self._host.is_locked(key)}
        require("the keys being promoted are locked", locked == promotions.keys())
        both = {key for key in self._host.keys if key in self._pool}
        require("a key is in one tier", both <= promotions.keys(), both)
        expected = Counter(held)
        expected.update(self._pins.held_blocks())
        expected.update(promotion.device_block for promotion in promotions.values())
        counts = {block: count for block, count in self._pool.ref_counts().items() if count}
        require("reference counts are the owners there are", counts == dict(expected), (counts, expected))

    # -- inner workings

    def _place(
        self, match: Match, num_tokens: int, blocks: list[int], host_blocks: dict[bytes, int]
    ) -> Placement:
        """Lay out the table of an admitted sequence and queue the promotions it waits for."""
        table = list(match.device_blocks)
        num_cached = len(match.device_blocks) + len(match.host_keys)
        load = PrefixLoad(len(match.host_keys), num_cached, num_cached)
        rest = iter(blocks)
        for key in match.host_keys:
            promotion = self._promotion_of(key)
            if promotion is None:
                promotion = Promotion(key, next(rest), host_blocks[key], [])
                self._pool.acquire([promotion.device_block])
                self._queued[key] = promotion
            promotion.waiters.append((load, len(table)))
            table.append(promotion.device_block)
        table.extend(rest)
        cached_tokens = len(match.device_blocks) * self._block_size
        host_cached_tokens = len(match.host_keys) * self._block_size
        self._hit_tokens += cached_tokens
        self._host_hit_tokens += host_cached_tokens
        self._miss_tokens += num_tokens - cached_tokens - host_cached_tokens
        return Placement(table, cached_tokens, host_cached_tokens, load if match.host_keys else None)

    def _demote(self, evicted: Seq[EvictedBlock]) -> None:
        """Move what was evicted from the device to the host tier, where that is worth the copy."""
        if not evicted:
            return
        keep = self._host.num_blocks > 0 and self.cost.worth_copying(len(evicted))
        if self._host.num_blocks:
            self.cost.decided(len(evicted))
        for device_block, key in evicted:
            self._ledger.moving(key, CacheTier.DEVICE)
            if not keep or key in self._host:
                continue
            host_block, dropped = self._host.put(key)
            if dropped is not None:
                self._ledger.moving(dropped, CacheTier.HOST)
            if host_block is not None:
                self._demotions[host_block] = device_block

    def _end(self, promotion: Promotion) -> None:
        if self._under_way.pop(promotion.key, None) is None:
            del self._queued[promotion.key]
        for load, _ in promotion.waiters:
            load.num_missing -= 1

    def _leave_to_first(self, promotion: Promotion) -> None:
        """A block without a key that several wait for: only the first of them may ever write it."""
        waiters = [waiter for waiter in promotion.waiters if not waiter[0].withdrawn]
        for load, index in waiters[1:]:
            load.taken_blocks.append(index)

    def _drop_from_host(self, key: bytes) -> None:
        self._ledger.moving(key, self._tier_of(key))
        self._host.remove(key)

    def _promotion_of(self, key: bytes) -> Promotion | None:
        return self._queued.get(key) or self._under_way.get(key)

    def _tier_of(self, key: bytes) -> CacheTier:
        if key in self._pool:
            return CacheTier.DEVICE
        return CacheTier.HOST if key in self._host else CacheTier.NOWHERE


class KeyLedger:
    """Nets the moves of each key, so that whoever applies the events holds exactly the keys of each tier."""

    def __init__(self, tier_of: Callable[[bytes], CacheTier]) -> None:
        self._tier_of = tier_of
        self._before: dict[bytes, CacheTier] = {}

    def moving(self, key: bytes, before: CacheTier) -> None:
        """Note that a key leaves `before`, where it is or has just been."""
        self._before.setdefault(key, before)

    def take(self) -> KeyEvents:
        """Return the net events since the last call."""
        if not self._before:
            return KeyEvents()
        stored: list[bytes] = []
        demoted: list[bytes] = []
        promoted: list[bytes] = []
        evicted: list[bytes] = []
        for key, before in self._before.items():
            now = self._tier_of(key)
            if now is before:
                continue
            if now is CacheTier.NOWHERE:
                evicted.append(key)
            elif now is CacheTier.HOST:
                demoted.append(key)
            elif before is CacheTier.HOST:
                promoted.append(key)
            else:
                stored.append(key)
        self._before.clear()
        return KeyEvents(tuple(stored), tuple(demoted), tuple(promoted), tuple(evicted))
