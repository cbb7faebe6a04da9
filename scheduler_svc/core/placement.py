"""Which workers hold a prefix."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq


class PrefixIndex:
    """Content keys of the fleet: key -> workers that have it, on the device or in the host tier.

    To bring a block back from the host costs little next to computing it again.
    """

    def __init__(self) -> None:
        self._holders: dict[bytes, set[str]] = {}
        self._keys_of: dict[str, set[bytes]] = {}

    def keys_of(self, worker_id: str) -> set[bytes]:
        """Return the keys that a worker holds; not to be changed."""
        return self._keys_of.get(worker_id, set())

    def add(self, worker_id: str, keys: Iterable[bytes]) -> None:
        """Record keys that a worker has stored."""
        own = self._keys_of.setdefault(worker_id, set())
        for key in keys:
            own.add(key)
            holders = self._holders.get(key)
            if holders is None:
                self._holders[key] = {worker_id}
            else:
                holders.add(worker_id)

    def discard(self, worker_id: str, keys: Iterable[bytes]) -> None:
        """Record keys that a worker has lost."""
        own = self._keys_of.setdefault(worker_id, set())
        for key in keys:
            if key in own:
                own.remove(key)
                self._drop(worker_id, key)

    def forget(self, worker_id: str) -> None:
        """Drop all that is known of a worker."""
        for key in self._keys_of.pop(worker_id, ()):
            self._drop(worker_id, key)

    def _drop(self, worker_id: str, key: bytes) -> None:
        holders = self._holders[key]
        holders.remove(worker_id)
        if not holders:
            del self._holders[key]

    def match(self, worker_id: str, keys: Seq[bytes]) -> int:
        """Return how many leading keys a worker holds.

        A bisection: workers evict the tail of a chain before its head, so what is held is a prefix.
        Where that ever fails the answer is a guess that the worker corrects at admission.
        """
        own = self._keys_of.get(worker_id)
        if not own:
            return 0
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in own:
                low = middle + 1
            else:
                high = middle
        return low

    def deepest(self, keys: Seq[bytes]) -> tuple[int, frozenset[str]]:
        """Return the longest prefix that any worker holds, in keys, and those that hold it."""
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in self._holders:
                low = middle + 1
            else:
                high = middle
        return (low, frozenset(self._holders[keys[low - 1]])) if low else (0, frozenset())
