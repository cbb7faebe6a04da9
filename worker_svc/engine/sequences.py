"""The sequences that run on this worker and their books: blocks, progress, digest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from octavo.protocol.steps import DIGEST_MASK, Admit, Finished, FinishReason, digest_of

from worker_svc.engine.step import Outcome, Step
from worker_svc.kv.errors import OutOfBlocks, require
from worker_svc.kv.memory import Arrival, KvMemory, Placement
from worker_svc.runner.base import Row, Sequence


@dataclass(slots=True)
class Live:
    """One live sequence. Derived limits are worked out once, not per token."""

    sequence: Sequence
    keys: dict[int, bytes]
    """Keys of blocks that are not published yet, by index in the block table."""
    stop_ids: frozenset[int]
    """Tokens that end it."""
    stops_from: int
    """Position of the first token that may end it."""
    max_len: int
    """Tokens at most, prompt included."""
    capacity: int
    """Tokens that its blocks hold."""
    row: Row
    """Its share of a decode step."""
    introduced: bool = False
    """The runner knows it."""
    arrival: Arrival | None = None
    """Cached blocks that are still on their way."""
    lost_tokens: int = 0
    """Reported as cached, but their copy failed: they are computed beyond what plans ask for."""


def live_from(admit: Admit, eos_token_ids: frozenset[int], max_model_len: int) -> Live:
    """Return a sequence as it was admitted, without blocks."""
    sampling = admit.sampling
    sequence = Sequence(
        handle=admit.handle,
        token_ids=list(admit.token_ids),
        prompt_len=admit.prompt_len,
        sampling=sampling,
        choice=admit.choice,
        priority=admit.priority,
        adapter=admit.adapter,
        hold_after_finish=admit.hold_after_finish,
    )
    stop_ids = frozenset(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        stop_ids |= eos_token_ids
    max_len = max_model_len
    if sampling.max_tokens is not None:
        max_len = min(max_len, admit.prompt_len + sampling.max_tokens)
    return Live(
        sequence=sequence,
        keys=dict(enumerate(admit.keys)),
        stop_ids=stop_ids,
        stops_from=admit.prompt_len + (sampling.min_tokens or 0),
        max_len=max_len,
        capacity=0,
        row=Row(sequence, 0, 1, sample=True),
    )


class Roster:
    """The sequences that live on this worker, in the order in which they were admitted.

    The sums that each report carries are kept as things change, so that a step costs what happened
    in it and not what exists.
    """

    def __init__(self, memory: KvMemory, block_size: int) -> None:
        self.live: dict[int, Live] = {}
        self.starved: dict[int, Live] = {}
        """Those whose next token does not fit into their blocks."""
        self.arriving: dict[int, Live] = {}
        """Those whose cached blocks are on their way from the host tier."""
        self.removed: list[int] = []
        """Handles that the runner may forget."""
        self.unused_slots = 0
        """Token slots of their blocks that hold nothing."""
        self.dropped_unused_slots = 0
        """The same of sequences that were dropped, since their last step began to be settled."""
        self._memory = memory
        self._block_size = block_size
        self._digest = 0
        self._late_seals: list[tuple[int, int]] = []
        """(handle, block index) of seals that came after their block had been computed."""

    @property
    def digest(self) -> int:
        """Sum of handle * length, modulo 2^64."""
        return self._digest & DIGEST_MASK

    def add(self, live: Live, placement: Placement) -> None:
        """Take in a sequence with the blocks that it was given."""
        sequence = live.sequence
        sequence.block_table = placement.block_table
        sequence.num_computed_tokens = placement.cached_tokens
        live.capacity = len(placement.block_table) * self._block_size
        for index in range(placement.cached_tokens // self._block_size):
            live.keys.pop(index, None)
        self.live[sequence.handle] = live
        if placement.arrival is not None:
            live.arrival = placement.arrival
            self.arriving[sequence.handle] = live
        self._digest += sequence.handle * len(sequence.token_ids)
        self.unused_slots += live.capacity - placement.cached_tokens

    def drop(self, handle: int) -> bool:
        """Let go of a sequence and its blocks; return whether it was there."""
        live = self.live.pop(handle, None)
        if live is None:
            return False
        self.starved.pop(handle, None)
        if live.arrival is not None:
            live.arrival.withdrawn = True
            del self.arriving[handle]
        self.removed.append(handle)
        sequence = live.sequence
        self._digest -= handle * len(sequence.token_ids)
        unused = live.capacity - sequence.num_computed_tokens
        self.unused_slots -= unused
        self.dropped_unused_slots += unused
        self._memory.release(sequence.block_table)
        return True

    def drop_all(self) -> None:
        """Let go of all sequences."""
        for handle in list(self.live):
            self.drop(handle)
        self._late_seals.clear()

    def grow(self, live: Live) -> None:
        """Give a starved sequence one more block.

        Raises:
            OutOfBlocks: there is none.
        """
        self._memory.grow(live.sequence.block_table)
        live.capacity += self._block_size
        self.unused_slots += self._block_size
        del self.starved[live.sequence.handle]

    def take_arrivals(self) -> None:
        """Let sequences go on whose cached blocks have all come, as far as their contents are good."""
        for handle, live in list(self.arriving.items()):
            arrival = live.arrival
            assert arrival is not None
            sequence = live.sequence
            if arrival.num_missing or not self._own_lost_blocks(sequence.block_table, arrival):
                continue
            computed = arrival.num_valid_blocks * self._block_size
            self.unused_slots -= computed - sequence.num_computed_tokens
            sequence.num_computed_tokens = computed
            live.lost_tokens = (arrival.num_blocks - arrival.num_valid_blocks) * self._block_size
            live.arrival = None
            del self.arriving[handle]

    def take_seals(self, seals: Iterable[tuple[int, int, bytes]]) -> None:
        """Note the keys under which blocks are to be published. Those of gone sequences are dropped."""
        for handle, index, key in seals:
            live = self.live.get(handle)
            if live is None:
                continue
            live.keys[index] = key
            if (index + 1) * self._block_size <= live.sequence.num_computed_tokens:
                self._late_seals.append((handle, index))

    def settle(self, outcome: Outcome, step: Step) -> None:
        """Advance the sequences by what was computed; the hottest loop of the worker."""
        token_ids = outcome.token_ids
        block_size = self._block_size
        self._publish_late()
        for row in outcome.rows:
            sequence = row.sequence
            if sequence.held:
                continue
            handle = sequence.handle
            live = self.live[handle]
            start = row.start
            end = start + row.num_tokens
            sequence.num_computed_tokens = end
            if live.keys and end // block_size != start // block_size:
                self._publish(live, start // block_size, end // block_size)
            self.unused_slots -= row.num_tokens
            if not sequence.prefill_done:
                self._count_prefill(live, row.num_tokens, step)
                sequence.prefill_done = row.sample
            if not row.sample:
                continue
            token_id = token_ids[handle]
            sequence.token_ids.append(token_id)
            self._digest += handle
            step.token_handles.append(handle)
            step.first_positions.append(end)
            step.token_ids.append(token_id)
            if end + 1 >= live.max_len or token_id in live.stop_ids:
                self._end(live, token_id, step)
            elif end >= live.capacity:
                self.starved[handle] = live
        for handle in outcome.culprits:
            step.finished.append(Finished(handle, FinishReason.ERROR))
            self.drop(handle)

    def check_integrity(self) -> None:
        """Verify the books of sequences and of memory from scratch."""
        held: Counter[int] = Counter()
        unused = 0
        for handle, live in self.live.items():
            sequence = live.sequence
            held.update(sequence.block_table)
            capacity = len(sequence.block_table) * self._block_size
            computed, known = sequence.num_computed_tokens, len(sequence.token_ids)
            unused += capacity - computed
            distinct = len(set(sequence.block_table)) == len(sequence.block_table)
            require("a table names a block once", distinct, sequence.block_table)
            require("capacity is what the blocks hold", capacity == live.capacity, handle)
            require("computed tokens are known and have slots", computed <= min(known, capacity), handle)
            require("a decode lags one token", computed == known - 1 or not sequence.prefill_done, handle)
            require("prefill cannot stall", known < capacity or sequence.prefill_done, handle)
            starved = sequence.prefill_done and known > capacity and not sequence.held
            require("who lacks a block is known", starved == (handle in self.starved), handle)
            require("who waits is known", (live.arrival is None) != (handle in self.arriving), handle)
        require("starved sequences live", self.starved.keys() <= self.live.keys())
        require("unused slots are counted", unused == self.unused_slots, (unused, self.unused_slots))
        lengths = {handle: len(live.sequence.token_ids) for handle, live in self.live.items()}
        require("the digest is over the live sequences", digest_of(lengths) == self.digest)
        self._memory.check_integrity(held)

    def _end(self, live: Live, token_id: int, step: Step) -> None:
        """End a sequence if its newest token does so; it may be one of its stop tokens too early."""
        sequence = live.sequence
        handle, known = sequence.handle, len(sequence.token_ids)
        if token_id in live.stop_ids and known > live.stops_from:
            step.finished.append(Finished(handle, FinishReason.STOP, token_id))
        elif known >= live.max_len:
            step.finished.append(Finished(handle, FinishReason.LENGTH))
        else:
            if known > live.capacity:
                self.starved[handle] = live
            return
        if sequence.hold_after_finish:
            sequence.held = True
        else:
            self.drop(handle)

    def _count_prefill(self, live: Live, num_tokens: int, step: Step) -> None:
        """Report a chunk, less what was reported as cached and had to be computed nevertheless."""
        step.num_prefill_tokens += num_tokens
        lost = min(live.lost_tokens, num_tokens)
        live.lost_tokens -= lost
        if num_tokens > lost:
            step.prefilled.append((live.sequence.handle, num_tokens - lost))

    def _own_lost_blocks(self, block_table: list[int], arrival: Arrival) -> bool:
        if arrival.num_valid_blocks == arrival.num_blocks:
            return True
        try:
            self._memory.own_lost_blocks(block_table, arrival)
        except OutOfBlocks:
            return False
        return True

    def _publish(self, live: Live, first: int, end: int) -> None:
        for index in range(first, end):
            key = live.keys.pop(index, None)
            if key is not None:
                self._memory.publish(live.sequence.block_table[index], key)

    def _publish_late(self) -> None:
        for handle, index in self._late_seals:
            live = self.live.get(handle)
            if live is not None:
                self._publish(live, index, index + 1)
        self._late_seals.clear()
