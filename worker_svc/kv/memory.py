"""What the engine asks of KV memory, paged or contiguous."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Final, Protocol

from octavo.protocol.steps import KeyEvents, PoolReport, RefuseReason

from worker_svc.kv.host import CopyCost


@dataclass(slots=True)
class PrefixLoad:
    """Cached blocks of one sequence that are on their way from the host tier."""

    num_missing: int
    num_blocks: int
    """Leading blocks of the sequence that are cached, those on the device included."""
    num_valid_blocks: int
    """Of these, how many in a row will be good once none is missing; fewer when copies fail."""
    taken_blocks: list[int] = field(default_factory=list)
    """Indices of blocks that did not come and that another sequence computes."""
    withdrawn: bool = False
    """The sequence is gone."""


@dataclass(frozen=True, slots=True)
class StepUse:
    """What was in use while a step ran, before what it finished was freed."""

    active: int = 0
    """Blocks that sequences held."""
    unused_slots: int = 0
    """Of these, token slots that held nothing when the step had run."""


NO_STEP: Final = StepUse()


@dataclass(frozen=True, slots=True)
class Match:
    """What of a sequence is cached: a run of blocks on the device, then a run of keys in the host tier.

    Good until the next eviction, which `evictions` tells.
    """

    keys: Seq[bytes] = ()
    device_blocks: list[int] = field(default_factory=list)
    host_keys: Seq[bytes] = ()
    evictions: int = 0
    weighed_blocks: int = 0
    """Blocks in the host tier that were held against computing them again."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The block table of an admitted sequence and how much of it is cached."""

    block_table: list[int]
    cached_tokens: int = 0
    """On the device, to be used at once."""
    host_cached_tokens: int = 0
    """After those, to be used when `load` is complete."""
    load: PrefixLoad | None = None


@dataclass(slots=True)
class Promotion:
    """A block on its way from the host tier, and the sequences that wait for it."""

    key: bytes
    device_block: int
    host_block: int
    waiters: list[tuple[PrefixLoad, int]]
    """Each with the index of the block in its sequence."""


@dataclass(frozen=True, slots=True)
class PinOutcome:
    """What came of a pin: refused as a whole when the budget is too small."""

    accepted: bool
    wanted_blocks: int
    held_blocks: int
    """On the device now; the others are held as soon as they are computed."""


class KvMemory(Protocol):
    """Blocks of KV memory and what is cached in them."""

    refusal: RefuseReason
    """Why a sequence is refused when there is no room for it."""
    cost: CopyCost

    def match(self, keys: Seq[bytes], num_tokens: int) -> Match:
        """Find what is cached of a sequence of `num_tokens`, at most all but its last token."""

    def admit(self, match: Match, num_tokens: int, reserve_tokens: int) -> Placement:
        """Take blocks for `num_tokens` and one more.

        Raises:
            OutOfBlocks: there is no room; nothing was taken.
        """

    def grow(self, block_table: list[int]) -> None:
        """Append a block to a table.

        Raises:
            OutOfBlocks: there is none.
        """

    def own_lost_blocks(self, block_table: list[int], load: PrefixLoad) -> None:
        """Put blocks that nobody else has in place of those that the sequence must compute again.

        Raises:
            OutOfBlocks: there are not so many; nothing changed.
        """

    def release(self, block_table: list[int]) -> None:
        """Give up the blocks of a sequence and empty its table."""

    def publish(self, block: int, key: bytes) -> None:
        """Let others share a block whose every token has been computed."""

    def evict(self, num_blocks: int) -> None:
        """Evict up to so many cached blocks that nobody uses."""

    def drop_abandoned(self) -> None:
        """Give back blocks whose contents were to come from the host tier for sequences that are gone."""

    def take_demotions(self) -> list[tuple[int, int]]:
        """Return (device block, host block) of the copies due before the device blocks are written."""

    def demotions_failed(self, copies: Seq[tuple[int, int]]) -> None:
        """Forget the contents that did not reach the host tier."""

    def start_promotions(self, at_most: int) -> list[Promotion]:
        """Return the promotions to start now."""

    def promotions_done(self, promotions: Seq[Promotion]) -> None:
        """Publish what has arrived on the device."""

    def promotions_failed(self, promotions: Seq[Promotion]) -> None:
        """Forget what did not arrive; the sequences compute it again."""

    def pin(self, name: str, keys: Seq[bytes]) -> PinOutcome:
        """Keep these blocks on the device, in place of what was pinned under this name."""

    def unpin(self, name: str) -> int:
        """End a pin; return how many blocks it held alone."""

    def unpin_all(self) -> None:
        """End all pins; what they held stays cached."""

    def take_key_events(self) -> KeyEvents:
        """Return what became of cached keys since the last call."""

    def cached_keys(self) -> tuple[list[bytes], list[bytes]]:
        """Return the keys on the device and in the host tier."""

    @property
    def num_active(self) -> int:
        """Blocks that sequences hold."""

    def report(self, unused_slots: int, step: StepUse = NO_STEP) -> PoolReport:
        """Return the figures of now, and those of the last step."""

    def check_integrity(self, held: Mapping[int, int]) -> None:
        """Verify every invariant, given how many sequences hold each block."""
