"""The host tier: contents of evicted device blocks, in a bounded pool of host blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from worker_svc.kv.errors import require


class HostTier:
    """Keys and the host blocks `0 .. num_blocks - 1` that hold their contents.

    The least recently used key makes room for a new one, except while it is locked: then its block
    is being read.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[bytes, int] = OrderedDict()
        self._locked: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def keys(self) -> Iterable[bytes]:
        """Keys in this tier."""
        return [*self._idle, *self._locked]

    def __contains__(self, key: bytes) -> bool:
        return key in self._idle or key in self._locked

    def put(self, key: bytes) -> tuple[int | None, bytes | None]:
        """Make room for a key that is not in this tier.

        Returns its block, or None when every block is locked, and the key that had to go for it.
        """
        dropped: bytes | None = None
        if self._free:
            block = self._free.pop()
        elif self._idle:
            dropped, block = self._idle.popitem(last=False)
        else:
            return None, None
        self._idle[key] = block
        return block, dropped

    def lock(self, key: bytes) -> int:
        """Protect an idle key from eviction; return its block."""
        block = self._idle.pop(key)
        self._locked[key] = block
        return block

    def unlock(self, key: bytes) -> None:
        """End the protection; the key counts as just used."""
        self._idle[key] = self._locked.pop(key)

    def is_locked(self, key: bytes) -> bool:
        """Return whether a key's block is being read."""
        return key in self._locked

    def remove(self, key: bytes) -> None:
        """Forget a key, locked or not, and free its block."""
        block = self._idle.pop(key, None)
        self._free.append(self._locked.pop(key) if block is None else block)

    def keys_in(self, blocks: AbstractSet[int]) -> list[bytes]:
        """Return the keys whose contents are in these blocks."""
        return [key for key, block in [*self._idle.items(), *self._locked.items()] if block in blocks]

    def check_integrity(self) -> None:
        """Raise IntegrityError when blocks are lost or in two states."""
        require("no host key is idle and locked", self._idle.keys().isdisjoint(self._locked))
        blocks = sorted([*self._free, *self._idle.values(), *self._locked.values()])
        require("each host block is in one state", blocks == list(range(self.num_blocks)), blocks)
