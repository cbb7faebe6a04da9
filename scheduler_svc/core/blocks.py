"""The blocks of one worker: what it last reported, and what its running sequences hold and will take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from octavo.protocol.steps import Geometry, PoolReport

from scheduler_svc.core.request import Sequence


@dataclass(slots=True, eq=False)
class BlockLedger:
    """Counts blocks without walking the sequences that hold them."""

    geometry: Geometry
    pool: PoolReport
    """By the last report."""
    growth: list[int] = field(default_factory=list)
    """growth[step % block_size]: decoding sequences that take a block in that step."""
    coming: int = 0
    """Blocks that releases in flight give back."""
    active_keys: Counter[bytes] = field(default_factory=Counter)
    """Keys of blocks that are in use for certain, by the running sequences that hold them."""

    def needed_for(self, num_tokens: int) -> int:
        """Return the blocks that hold so many tokens."""
        return -(-num_tokens // self.geometry.block_size)

    def needed_to_admit(self, sequence: Sequence) -> int:
        """Return the blocks that a sequence takes when it is admitted, if none of them is cached.

        Contiguous memory cannot grow: room for all that the sequence may become is taken at once.
        """
        if self.geometry.paged:
            return self.needed_for(sequence.num_tokens + 1)
        return self.needed_for(sequence.request.max_total_tokens)

    def freed_by(self, sequence: Sequence) -> int:
        """Return the blocks that come free when a running sequence is released: those it shares do not."""
        if not self.geometry.paged:
            return self.needed_to_admit(sequence)
        own = sequence.binding.num_hit_blocks
        shared = sum(self.active_keys[key] > (i < own) for i, key in enumerate(sequence.keys))
        return self.needed_for(sequence.num_tokens) - shared

    # Keys in use ---------------------------------------------------------------------------------

    def active_hits(self, keys: Seq[bytes]) -> int:
        """Return how many leading keys are of blocks that are in use for certain."""
        count = 0
        for key in keys:
            if key not in self.active_keys:
                break
            count += 1
        return count

    def hold_keys(self, sequence: Sequence, num_blocks: int) -> None:
        """The first blocks of a sequence are published: they are in use while it runs."""
        held = sequence.keys[sequence.binding.num_hit_blocks : num_blocks]
        self.active_keys.update(held)
        sequence.binding.num_hit_blocks += len(held)

    def drop_keys(self, sequence: Sequence) -> list[bytes]:
        """A sequence is gone; return the keys that no running sequence holds any more."""
        unused = []
        for key in sequence.keys[: sequence.binding.num_hit_blocks]:
            if self.active_keys[key] > 1:
                self.active_keys[key] -= 1
            else:
                del self.active_keys[key]
                unused.append(key)
        sequence.binding.num_hit_blocks = 0
        return unused

    # Growth --------------------------------------------------------------------------------------

    def start_growth(self, sequence: Sequence, step: int) -> None:
        """A sequence has its first token in `step` and decodes from the next one on.

        With L tokens after step p it holds L - 1 computed ones; in step q it needs a new block when
        (L + q - p - 2) is a multiple of the block size.
        """
        bucket = (step + 2 - sequence.num_tokens) % self.geometry.block_size
        sequence.binding.growth_bucket = bucket
        self.growth[bucket] += 1

    def delay_growth(self, sequence: Sequence) -> None:
        """A decode sat out one step."""
        binding = sequence.binding
        if binding.growth_bucket is not None:
            self.growth[binding.growth_bucket] -= 1
            binding.growth_bucket = (binding.growth_bucket + 1) % self.geometry.block_size
            self.growth[binding.growth_bucket] += 1

    def stop_growth(self, sequence: Sequence) -> None:
        """A sequence decodes no longer, if it did."""
        binding = sequence.binding
        if binding.growth_bucket is not None:
            self.growth[binding.growth_bucket] -= 1
            binding.growth_bucket = None
