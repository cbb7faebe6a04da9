"""The block pool: reference counts, index of content keys, eviction, and runs of free blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import cast

from worker_svc.kv.errors import DoubleFree, ForeignBlock, OutOfBlocks, UseAfterFree, require

EvictedBlock = tuple[int, bytes]
"""A block that was taken away from the cache, and the key it had."""


class BlockPool:
    """Blocks `first_block` .. `first_block + num_blocks - 1`, each in exactly one state.

    - free: nobody holds it, it has no key;
    - evictable: nobody holds it, its contents stay in the cache under its key, least recently used
      first;
    - active: held by `ref_count` owners.

    A held block may have a key, too; then others may share it. Every operation either succeeds or
    raises and changes nothing.
    """

    def __init__(self, num_blocks: int, first_block: int = 0) -> None:
        self.num_blocks = num_blocks
        self.first_block = first_block
        self.evictions = 0
        """Blocks evicted since the start. A match is good for as long as this stands still."""
        end = first_block + num_blocks
        self._ref_counts = [0] * end
        self._keys: list[bytes | None] = [None] * end
        self._block_of: dict[bytes, int] = {}
        self._num_evictable = 0
        self._lru: OrderedDict[int, None] = OrderedDict()
        """Every evictable block, least recently released first; blocks in use may stand among them, so
        that to take a cached block costs nothing here."""
        self._free = FreeRuns(first_block, num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return self._free.num_free

    @property
    def num_evictable(self) -> int:
        """Blocks that hold cached contents and nobody uses."""
        return self._num_evictable

    @property
    def num_active(self) -> int:
        """Blocks in use."""
        return self.num_blocks - self._free.num_free - self._num_evictable

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give."""
        return self._free.num_free + self._num_evictable

    @property
    def largest_free_run(self) -> int:
        """Length of the longest run of free neighbours."""
        return self._free.longest

    @property
    def keys(self) -> Iterable[bytes]:
        """Keys in the cache, in use or not."""
        return self._block_of.keys()

    def __contains__(self, key: bytes) -> bool:
        return key in self._block_of

    def block_of(self, key: bytes) -> int | None:
        """Return the block that holds the contents of `key`."""
        return self._block_of.get(key)

    def key_of(self, block: int) -> bytes | None:
        """Return the key under which a block was published."""
        self._counts_of((block,))
        return self._keys[block]

    def ref_count(self, block: int) -> int:
        """Return how many owners hold a block."""
        return self._counts_of((block,))[0]

    def ref_counts(self) -> dict[int, int]:
        """Return the reference count of every block; for audits."""
        return dict(enumerate(self._ref_counts[self.first_block :], self.first_block))

    def match(self, keys: Seq[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix of a chain of keys."""
        found = list(map(self._block_of.get, keys))
        if None in found:
            del found[found.index(None) :]
        return cast("list[int]", found)

    def acquire(self, blocks: Seq[int]) -> None:
        """Become one more owner of each of these distinct blocks.

        Raises:
            UseAfterFree: one of them is free.
            ForeignBlock: one of them is not of this pool.
        """
        ref_counts = self._ref_counts
        counts = self._counts_of(blocks)
        num_unheld = counts.count(0)
        if num_unheld:
            key_of = self._keys.__getitem__
            # The first question is cheap, and answers the second as a rule.
            if not all(map(key_of, blocks)) and any(
                count == 0 and key_of(block) is None for block, count in zip(blocks, counts, strict=True)
            ):
                raise UseAfterFree(f"not all of blocks {blocks} are in use or cached")
            self._num_evictable -= num_unheld
        for block, count in zip(blocks, counts, strict=True):
            ref_counts[block] = count + 1

    def allocate(self, count: int) -> tuple[list[int], list[EvictedBlock]]:
        """Take `count` blocks, evicting cached ones where free ones do not suffice.

        Returns the blocks and what was evicted from some of them: whoever wants to keep that must
        copy it before the blocks are written.

        Raises:
            OutOfBlocks: there are not so many; nothing was taken.
        """
        missing = count - self._free.num_free
        if missing > self._num_evictable:
            raise OutOfBlocks(count, self.num_available)
        if missing <= 0:
            blocks = self._free.take(count)
            evicted: list[EvictedBlock] = []
        else:
            evicted = self._evict(missing)
            blocks = self._free.take(self._free.num_free)
            blocks.extend(block for block, _ in evicted)
        ref_counts = self._ref_counts
        for block in blocks:
            ref_counts[block] = 1
        return blocks, evicted

    def release(self, blocks: Seq[int]) -> None:
        """Give up one ownership of each of these distinct blocks of a sequence, given head first.

        Blocks go tail first, so that eviction takes the tail of a chain before its head.

        Raises:
            DoubleFree: nobody holds one of them.
            ForeignBlock: one of them is not of this pool.
        """
        ref_counts = self._ref_counts
        keys = self._keys
        lru = self._lru
        freed: list[int] = []
        num_cached = 0
        counts = self._counts_of(blocks)
        if 0 in counts:
            raise DoubleFree(f"block {blocks[counts.index(0)]} is not held")
        for block, count in zip(reversed(blocks), reversed(counts), strict=True):
            ref_counts[block] = count - 1
            if count == 1:
                if keys[block] is None:
                    freed.append(block)
                else:
                    num_cached += 1
                    lru[block] = None
                    lru.move_to_end(block)
        self._num_evictable += num_cached
        if freed:
            self._free.give(freed)

    def publish(self, block: int, key: bytes) -> bool:
        """Let others find a held block under `key`. Return False, and change nothing, when the key is
        taken or the block has one.

        Raises:
            UseAfterFree: nobody holds the block.
            ForeignBlock: it is not of this pool.
        """
        keys = self._keys
        if not self.first_block <= block < len(keys):
            raise ForeignBlock(f"block {block} is not in [{self.first_block}, {len(keys)})")
        if not self._ref_counts[block]:
            raise UseAfterFree(f"block {block} is free")
        if keys[block] is not None or key in self._block_of:
            return False
        keys[block] = key
        self._block_of[key] = block
        return True

    def evict(self, count: int) -> list[EvictedBlock]:
        """Turn the `count` least recently used evictable blocks, or as many as there are, into free ones."""
        evicted = self._evict(min(count, self._num_evictable))
        self._free.give([block for block, _ in evicted])
        return evicted

    def check_integrity(self) -> None:
        """Verify every invariant from scratch; raise IntegrityError naming the one that is broken."""
        known = range(self.first_block, self.first_block + self.num_blocks)
        self._free.check_integrity()
        free = set(self._free.blocks())
        active = {block for block in known if self._ref_counts[block]}
        keyed = {block: key for block in known if (key := self._keys[block]) is not None}
        evictable = keyed.keys() - active
        require("free blocks belong to the pool", free <= set(known), free - set(known))
        require("no active block is free", free.isdisjoint(active), free & active)
        require("free blocks have no key", free.isdisjoint(keyed), free & keyed.keys())
        require("evictable blocks are counted", len(evictable) == self._num_evictable, self._num_evictable)
        counted = len(free) + len(evictable) + len(active)
        require("free + evictable + active == total", counted == self.num_blocks, counted)
        require("no count is negative", all(self._ref_counts[block] >= 0 for block in known))
        require("reserved blocks are never held", not any(self._ref_counts[: self.first_block]))
        require("every evictable block can be found", evictable <= self._lru.keys())
        require("what else is found is in use", self._lru.keys() <= evictable | active)
        index = {key: block for block, key in keyed.items()}
        require("index and blocks agree on keys", index == self._block_of and len(index) == len(keyed))

    def _evict(self, count: int) -> list[EvictedBlock]:
        """Take the least recently used `count` blocks out of the cache; they are in no state then."""
        evicted: list[EvictedBlock] = []
        pop, keys, ref_counts = self._lru.popitem, self._keys, self._ref_counts
        while len(evicted) < count:
            block, _ = pop(last=False)
            if ref_counts[block]:
                continue
            key = keys[block]
            assert key is not None, "evictable blocks have a key"
            keys[block] = None
            del self._block_of[key]
            evicted.append((block, key))
        self._num_evictable -= count
        self.evictions += count
        return evicted

    def _counts_of(self, blocks: Seq[int]) -> list[int]:
        """Return the reference counts of blocks, which all must be of this pool."""
        ref_counts = self._ref_counts
        try:
            counts = [ref_counts[block] for block in blocks]
        except IndexError:
            counts = []
        if len(counts) != len(blocks) or (counts and min(blocks) < self.first_block):
            raise ForeignBlock(f"not all of {blocks} are in [{self.first_block}, {len(ref_counts)})")
        return counts


class FreeRuns:
    """The free blocks of a pool as maximal runs of consecutive ids.

    Both allocators stand on it: the paged one takes any blocks, the contiguous one a run. Blocks
    always leave from the front of a run, which is what makes every operation O(1) per block and the
    longest run known at all times.
    """

    def __init__(self, first: int, count: int) -> None:
        self.num_free = 0
        self._length_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}
        self._runs_of_length = [0] * (count + 1)
        self._longest = 0
        if count:
            self._insert(first, count)
            self.num_free = count

    @property
    def longest(self) -> int:
        """Length of the longest run."""
        return self._longest

    def take(self, count: int) -> list[int]:
        """Take `count` blocks from the runs that changed last; the caller knows that there are enough."""
        taken: list[int] = []
        self.num_free -= count
        while count:
            start, length = self._length_at.popitem()
            used = min(count, length)
            self._cut_front(start, length, used)
            taken.extend(range(start, start + used))
            count -= used
        return taken

    def take_run(self, count: int) -> int | None:
        """Take the lowest run of `count` blocks (first fit) and return its first block, if there is one."""
        if count > self._longest:
            return None
        start = min(start for start, length in self._length_at.items() if length >= count)
        self._cut_front(start, self._length_at.pop(start), count)
        self.num_free -= count
        return start

    def give(self, blocks: Iterable[int]) -> None:
        """Add blocks that are not free now."""
        length_at, start_before, counts = self._length_at, self._start_before, self._runs_of_length
        longest = self._longest
        # In order, so that neighbours are joined before they are looked up; what ends them is no block.
        ordered = sorted(blocks)
        self.num_free += len(ordered)
        ordered.append(-1)
        start = end = ordered[0]
        for block in ordered:
            if block == end:
                end += 1
                continue
            run_end = end
            if start in start_before:
                start = start_before.pop(start)
                counts[length_at.pop(start)] -= 1
            if end in length_at:
                length = length_at.pop(end)
                counts[length] -= 1
                run_end += length
            length = run_end - start
            length_at[start] = length
            start_before[run_end] = start
            counts[length] += 1
            if length > longest:  # noqa: PLR1730  max() costs a third of this loop
                longest = length
            start, end = block, block + 1
        self._longest = longest

    def give_run(self, start: int, end: int) -> None:
        """Add the blocks [start, end), none of them free now."""
        self.give(range(start, end))

    def blocks(self) -> Iterable[int]:
        """Yield every free block; for audits."""
        for start, length in self._length_at.items():
            yield from range(start, start + length)

    def check_integrity(self) -> None:
        """Raise IntegrityError when the runs are not what the free blocks say."""
        blocks = sorted(self.blocks())
        require("free blocks are distinct", len(blocks) == len(set(blocks)), blocks)
        require("the free count is the sum of the runs", len(blocks) == self.num_free, self.num_free)
        runs: dict[int, int] = {}
        start = previous = None
        for block in blocks:
            if start is None or previous is None or block != previous + 1:
                start = block
            runs[start] = runs.get(start, 0) + 1
            previous = block
        require("free runs are maximal", runs == self._length_at, self._length_at)
        ends = {start + length: start for start, length in runs.items()}
        require("free runs are known by their ends", ends == self._start_before, self._start_before)
        require("the longest run is known", max(runs.values(), default=0) == self._longest, self._longest)

    def _insert(self, start: int, length: int) -> None:
        self._length_at[start] = length
        self._start_before[start + length] = start
        self._runs_of_length[length] += 1
        self._longest = max(self._longest, length)

    def _cut_front(self, start: int, length: int, used: int) -> None:
        """Put back what is left of a run after its first `used` blocks were taken."""
        self._runs_of_length[length] -= 1
        if used < length:
            self._insert(start + used, length - used)
        else:
            del self._start_before[start + length]
        # What is left of the longest run bounds this search by `used`.
        counts = self._runs_of_length
        while self._longest and not counts[self._longest]:
            self._longest -= 1
