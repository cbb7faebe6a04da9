"""A block pool that only counts: which block a token lies in never matters to a scheduler."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from octavo.protocol.steps import KeyEvents, PoolReport


class CountingPool:
    """Blocks by count, published ones by key with reference counts, those nobody uses in LRU order."""

    def __init__(self, num_blocks: int, *, caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self._caching = caching
        self._free = num_blocks
        self._refs: dict[bytes, int] = {}
        self._evictable: OrderedDict[bytes, None] = OrderedDict()
        self._stored: list[bytes] = []
        self._evicted: list[bytes] = []

    @property
    def keys(self) -> tuple[bytes, ...]:
        """Every published key."""
        return (*self._refs, *self._evictable)

    @property
    def obtainable(self) -> int:
        """Blocks that can be taken."""
        return self._free + len(self._evictable)

    def take(self, count: int) -> bool:
        """Take unpublished blocks, evicting the least recently used; False and no change if too few."""
        if count > self._free:
            if count > self.obtainable:
                return False
            while self._free < count:
                key, _ = self._evictable.popitem(last=False)
                self._evicted.append(key)
                self._free += 1
        self._free -= count
        return True

    def share(self, keys: Seq[bytes], limit: int) -> list[bytes]:
        """Take references on the leading published blocks of a chain, `limit` at most."""
        hits: list[bytes] = []
        for key in keys[:limit]:
            if key in self._refs:
                self._refs[key] += 1
            elif key in self._evictable:
                del self._evictable[key]
                self._refs[key] = 1
            else:
                break
            hits.append(key)
        return hits

    def publish(self, key: bytes) -> bool:
        """Publish a taken block; False if the key has a block already, so that this one stays private."""
        if not self._caching or key in self._refs or key in self._evictable:
            return False
        self._refs[key] = 1
        self._stored.append(key)
        return True

    def give_back(self, private: int, shared: Iterable[bytes]) -> None:
        """Return unpublished blocks, and references from the tail of a chain to its head."""
        self._free += private
        for key in shared:
            if self._refs[key] == 1:
                del self._refs[key]
                self._evictable[key] = None
            else:
                self._refs[key] -= 1

    def report(self) -> PoolReport:
        """Return the figures of the moment."""
        active = self.num_blocks - self.obtainable
        return PoolReport(self._free, len(self._evictable), active, largest_free_run=self._free)

    def take_events(self) -> KeyEvents:
        """Return what became of keys since the last call."""
        events = KeyEvents(stored=tuple(self._stored), evicted=tuple(self._evicted))
        self._stored.clear()
        self._evicted.clear()
        return events
