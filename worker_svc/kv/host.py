"""The host tier: contents of evicted device blocks, and whether to copy a block or to compute it again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from octavo.protocol.steps import TierCopies

from worker_svc.kv.errors import require

_WEIGHT = 0.1
"""Of a new measurement in the running average."""
_PROBE_EVERY = 64
"""Of so many blocks that would be computed again one is copied, lest an old measurement rule for ever."""


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


@dataclass(slots=True)
class CopyCost:
    """Running averages of what copying and computing cost, and the decision between them."""

    block_size: int
    out_us_per_block: float | None = None
    """Device to host."""
    in_us_per_block: float | None = None
    """Host to device."""
    prefill_us_per_token: float | None = None
    decode_us_per_step: float | None = None
    copied_out_blocks: int = 0
    copied_in_blocks: int = 0
    skipped_blocks: int = 0
    """Blocks that were not copied because computing them again was cheaper."""

    @property
    def is_dear(self) -> bool:
        """Whether to compute a block again is cheaper. Without measurements copying is worth a try."""
        if self.prefill_us_per_token is None or self.in_us_per_block is None:
            return False
        copy_us = self.in_us_per_block + (self.out_us_per_block or 0.0)
        return copy_us > self.block_size * self.prefill_us_per_token

    def worth_copying(self, num_blocks: int) -> bool:
        """Return whether to copy a group of blocks; tell `decided` when that is done or left."""
        if not self.is_dear:
            return True
        return (self.skipped_blocks + num_blocks) // _PROBE_EVERY > self.skipped_blocks // _PROBE_EVERY

    def decided(self, num_blocks: int) -> None:
        """Note that a group was copied or not, as `worth_copying` said."""
        if self.is_dear:
            self.skipped_blocks += num_blocks

    def copied_out(self, num_blocks: int, elapsed_us: float) -> None:
        """Note a copy from device to host."""
        self.copied_out_blocks += num_blocks
        self.out_us_per_block = _averaged(self.out_us_per_block, elapsed_us / num_blocks)

    def copied_in(self, num_blocks: int, elapsed_us: float) -> None:
        """Note a copy from host to device."""
        self.copied_in_blocks += num_blocks
        self.in_us_per_block = _averaged(self.in_us_per_block, elapsed_us / num_blocks)

    def executed(self, num_decodes: int, num_prefill_tokens: int, elapsed_us: float) -> None:
        """Note a step. What a step costs beyond an average decode step is what its prefill costs."""
        if not num_prefill_tokens:
            if num_decodes:
                self.decode_us_per_step = _averaged(self.decode_us_per_step, elapsed_us)
            return
        decode_us = (self.decode_us_per_step or 0.0) if num_decodes else 0.0
        prefill_us = max(elapsed_us - decode_us, 0.0)
        self.prefill_us_per_token = _averaged(self.prefill_us_per_token, prefill_us / num_prefill_tokens)

    def report(self) -> TierCopies:
        """Return the figures of now."""
        return TierCopies(
            out_blocks=self.copied_out_blocks,
            in_blocks=self.copied_in_blocks,
            skipped_blocks=self.skipped_blocks,
            out_us_per_block=self.out_us_per_block or 0.0,
            in_us_per_block=self.in_us_per_block or 0.0,
        )


def _averaged(average: float | None, value: float) -> float:
    return value if average is None else average + _WEIGHT * (value - average)
