"""Prefixes that stay on the device whatever the load."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from worker_svc.kv.errors import require
from worker_svc.kv.pool import BlockPool


class Pins:
    """Named sets of keys. A block with a pinned key is held for as long as the pin lasts.

    A key need not be cached when it is pinned: its block is held from the moment it is published.
    """

    def __init__(self, pool: BlockPool, budget_blocks: int) -> None:
        self.budget_blocks = budget_blocks
        self._pool = pool
        self._keys_of: dict[str, tuple[bytes, ...]] = {}
        self._wanted: dict[bytes, int] = {}
        self._held: dict[bytes, int] = {}

    @property
    def num_held(self) -> int:
        """Blocks that pins hold."""
        return len(self._held)

    def fits(self, name: str, keys: Seq[bytes]) -> bool:
        """Return whether the budget allows these keys in place of what `name` pins now."""
        others = (keys_of for other, keys_of in self._keys_of.items() if other != name)
        return len(frozenset(keys).union(*others)) <= self.budget_blocks

    def set(self, name: str, keys: Seq[bytes]) -> list[bytes]:
        """Pin these keys, given head first, under `name` instead of what it pinned; no keys end the pin.

        Returns the keys of blocks that are no longer held.
        """
        old = self._keys_of.pop(name, ())
        new = tuple(dict.fromkeys(keys))
        if new:
            self._keys_of[name] = new
        for key in new:
            self._wanted[key] = self._wanted.get(key, 0) + 1
        for key in new:
            block = self._pool.block_of(key)
            if block is not None:
                self.published(key, block)
        for key in old:
            self._wanted[key] -= 1
            if not self._wanted[key]:
                del self._wanted[key]
        released = [key for key in old if key not in self._wanted and key in self._held]
        self._pool.release([self._held.pop(key) for key in released])
        return released

    def clear(self) -> None:
        """End all pins."""
        for name in list(self._keys_of):
            self.set(name, ())

    def published(self, key: bytes, block: int) -> None:
        """Hold a published block if its key is pinned."""
        if key in self._wanted and key not in self._held:
            self._pool.acquire([block])
            self._held[key] = block

    def held_of(self, keys: Seq[bytes]) -> int:
        """Return how many of these keys are held."""
        return sum(key in self._held for key in keys)

    def held_blocks(self) -> list[int]:
        """Return the blocks that pins hold."""
        return list(self._held.values())

    def check_integrity(self) -> None:
        """Raise IntegrityError when what is held is not what is pinned."""
        wanted: dict[bytes, int] = {}
        for keys in self._keys_of.values():
            for key in keys:
                wanted[key] = wanted.get(key, 0) + 1
        require("pinned keys are counted by their pins", wanted == self._wanted)
        require("pins stay within their budget", len(wanted) <= self.budget_blocks, len(wanted))
        on_device = {key: block for key in wanted if (block := self._pool.block_of(key)) is not None}
        require("every pinned key on the device is held", on_device == self._held)
