"""The sequences that run on this worker and their books: blocks, progress, digest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from octavo.protocol.steps import (
    DIGEST_MASK,
    GRAMMAR_ERROR,
    Admit,
    Finished,
    FinishReason,
    StepError,
    digest_of,
)

from worker_svc.engine.step import CurrentStep, StepOutcome
from worker_svc.kv.errors import OutOfBlocks, require
from worker_svc.kv.memory import KvMemory, Placement, PrefixLoad
from worker_svc.runner.base import Row, SequenceData


@dataclass(slots=True)
class SequenceState:
    """One live sequence. Derived limits are worked out once, not per token."""

    sequence: SequenceData
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
    load: PrefixLoad | None = None
    """Cached blocks that are still on their way."""
    lost_tokens: int = 0
    """Reported as cached, but their copy failed: they are computed beyond what plans ask for."""


def new_state(admit: Admit, eos_token_ids: frozenset[int], max_model_len: int) -> SequenceState:
    """Return a sequence as it was admitted, without blocks."""
    sampling = admit.sampling
    sequence = SequenceData(
        handle=admit.handle,
        token_ids=list(admit.token_ids),
        prompt_len=admit.prompt_len,
        sampling=sampling,
        choice=admit.choice,
        priority=admit.priority,
        adapter=admit.adapter,
        score_from=admit.score_from,
        pooling=admit.pooling,
        hold_after_finish=admit.hold_after_finish,
    )
    stop_ids = frozenset(sampling.stop_token_ids)
    if not sampling.ignore_eos or sampling.structured is not None:
        # A grammar that is at its end allows nothing else.
        stop_ids |= eos_token_ids
    max_len = max_model_len
    if sampling.max_tokens is not None:
        max_len = min(max_len, admit.prompt_len + sampling.max_tokens)
    return SequenceState(
        sequence=sequence,
        keys=dict(enumerate(admit.keys)),
        stop_ids=stop_ids,
        # Under a grammar its guide sees to it, as far as the grammar lets it.
        stops_from=admit.prompt_len + (sampling.min_tokens or 0 if sampling.structured is None else 0),
        max_len=max_len,
        capacity=0,
        row=Row(sequence, 0, 1, sample=True),
    )


class RunningSequences:
    """The sequences that live on this worker, in the order in which they were admitted.

    The sums that each report carries are kept as things change, so that a step costs what happened
    in it and not what exists.
    """

    def __init__(self, memory: KvMemory, block_size: int) -> None:
        self.states: dict[int, SequenceState] = {}
        self.starved: dict[int, SequenceState] = {}
        """Those whose next token does not fit into their blocks."""
        self.loading: dict[int, SequenceState] = {}
        """Those whose cached blocks are on their way from the host tier."""
        self.guided: dict[int, SequenceState] = {}
        """Those whose output has to follow a grammar."""
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

    def add(self, state: SequenceState, placement: Placement) -> None:
        """Take in a sequence with the blocks that it was given."""
        sequence = state.sequence
        sequence.block_table = placement.block_table
        sequence.num_computed_tokens = placement.cached_tokens
        state.capacity = len(placement.block_table) * self._block_size
        for index in range(placement.cached_tokens // self._block_size):
            state.keys.pop(index, None)
        self.states[sequence.handle] = state
        if sequence.guide is not None:
            self.guided[sequence.handle] = state
        if placement.load is not None:
            state.load = placement.load
            self.loading[sequence.handle] = state
        self._digest += sequence.handle * len(sequence.token_ids)
        self.unused_slots += state.capacity - placement.cached_tokens

    def drop(self, handle: int) -> bool:
        """Let go of a sequence and its blocks; return whether it was there."""
        state = self.states.pop(handle, None)
        if state is None:
            return False
        self.starved.pop(handle, None)
        self.guided.pop(handle, None)
        if state.load is not None:
            state.load.withdrawn = True
            del self.loading[handle]
        self.removed.append(handle)
        sequence = state.sequence
        self._digest -= handle * len(sequence.token_ids)
        unused = state.capacity - sequence.num_computed_tokens
        self.unused_slots -= unused
        self.dropped_unused_slots += unused
        self._memory.release(sequence.block_table)
        return True

    def drop_all(self) -> None:
        """Let go of all sequences."""
        for handle in list(self.states):
            self.drop(handle)
        self._late_seals.clear()

    def grow(self, state: SequenceState) -> None:
        """Give a starved sequence one more block.

        Raises:
            OutOfBlocks: there is none.
        """
        self._memory.grow(state.sequence.block_table)
        state.capacity += self._block_size
        self.unused_slots += self._block_size
        del self.starved[state.sequence.handle]

    def finish_loads(self) -> None:
        """Let sequences go on whose cached blocks have all come, as far as their contents are good."""
        for handle, state in list(self.loading.items()):
            load = state.load
            assert load is not None
            sequence = state.sequence
            if load.num_missing or not self._own_lost_blocks(sequence.block_table, load):
                continue
            computed = load.num_valid_blocks * self._block_size
            self.unused_slots -= computed - sequence.num_computed_tokens
            sequence.num_computed_tokens = computed
            state.lost_tokens = (load.num_blocks - load.num_valid_blocks) * self._block_size
            state.load = None
            del self.loading[handle]

    def take_seals(self, seals: Iterable[tuple[int, int, bytes]]) -> None:
        """Note the keys under which blocks are to be published. Those of gone sequences are dropped."""
        for handle, index, key in seals:
            state = self.states.get(handle)
            if state is None:
                continue
            state.keys[index] = key
            if (index + 1) * self._block_size <= state.sequence.num_computed_tokens:
                self._late_seals.append((handle, index))

    def settle(self, outcome: StepOutcome, step: CurrentStep) -> None:
        """Advance the sequences by what was computed; the hottest loop of the worker."""
        token_ids = outcome.token_ids
        block_size = self._block_size
        self._publish_late()
        for row in outcome.rows:
            sequence = row.sequence
            if sequence.held:
                continue
            handle = sequence.handle
            state = self.states[handle]
            start = row.start
            end = start + row.num_tokens
            sequence.num_computed_tokens = end
            if state.keys and end // block_size != start // block_size:
                self._publish(state, start // block_size, end // block_size)
            self.unused_slots -= row.num_tokens
            if not sequence.prefill_done:
                self._count_prefill(state, row.num_tokens, step)
                sequence.prefill_done = row.sample
            if not row.sample:
                continue
            token_id = token_ids[handle]
            sequence.token_ids.append(token_id)
            self._digest += handle
            step.token_handles.append(handle)
            step.first_positions.append(end)
            step.token_ids.append(token_id)
            if end + 1 >= state.max_len or token_id in state.stop_ids:
                self._end(state, token_id, step)
            elif end >= state.capacity:
                self.starved[handle] = state
        for handle in outcome.culprits:
            step.finished.append(Finished(handle, FinishReason.ERROR))
            self.drop(handle)

    def go_on_guided(self, token_ids: Mapping[int, int], step: CurrentStep) -> None:
        """Have the next masks made, and end those sequences whose grammars cannot go on."""
        for handle, state in list(self.guided.items()):
            guide = state.sequence.guide
            assert guide is not None
            if handle in token_ids and not state.sequence.held:
                guide.advance(token_ids[handle])
            elif (problem := guide.problem) is not None:
                step.errors += (StepError((handle,), GRAMMAR_ERROR, problem),)
                step.finished.append(Finished(handle, FinishReason.ERROR))
                self.drop(handle)

    def check_integrity(self) -> None:
        """Verify the books of sequences and of memory from scratch."""
        held: Counter[int] = Counter()
        unused = 0
        for handle, state in self.states.items():
            sequence = state.sequence
            held.update(sequence.block_table)
            capacity = len(sequence.block_table) * self._block_size
            computed, known = sequence.num_computed_tokens, len(sequence.token_ids)
            unused += capacity - computed
            distinct = len(set(sequence.block_table)) == len(sequence.block_table)
            require("a table names a block once", distinct, sequence.block_table)
            require("capacity is what the blocks hold", capacity == state.capacity, handle)
            require("computed tokens are known and have slots", computed <= min(known, capacity), handle)
            require("a decode lags one token", computed == known - 1 or not sequence.prefill_done, handle)
            require("prefill cannot stall", known < capacity or sequence.prefill_done, handle)
            starved = sequence.prefill_done and known > capacity and not sequence.held
            require("who lacks a block is known", starved == (handle in self.starved), handle)
            require("who waits is known", (state.load is None) != (handle in self.loading), handle)
        require("starved sequences live", self.starved.keys() <= self.states.keys())
        require("unused slots are counted", unused == self.unused_slots, (unused, self.unused_slots))
        lengths = {handle: len(state.sequence.token_ids) for handle, state in self.states.items()}
        require("the digest is over the live sequences", digest_of(lengths) == self.digest)
        self._memory.check_integrity(held)

    def _end(self, state: SequenceState, token_id: int, step: CurrentStep) -> None:
        """End a sequence if its newest token does so; it may be one of its stop tokens too early."""
        sequence = state.sequence
        handle, known = sequence.handle, len(sequence.token_ids)
        if token_id in state.stop_ids and known > state.stops_from:
            step.finished.append(Finished(handle, FinishReason.STOP, token_id))
        elif known >= state.max_len:
            step.finished.append(Finished(handle, FinishReason.LENGTH))
        else:
            if known > state.capacity:
                self.starved[handle] = state
            return
        if sequence.hold_after_finish:
            sequence.held = True
        else:
            self.drop(handle)

    def _count_prefill(self, state: SequenceState, num_tokens: int, step: CurrentStep) -> None:
        """Report a chunk, less what was reported as cached and had to be computed nevertheless."""
        step.num_prefill_tokens += num_tokens
        lost = min(state.lost_tokens, num_tokens)
        state.lost_tokens -= lost
        if num_tokens > lost:
            step.prefilled.append((state.sequence.handle, num_tokens - lost))

    def _own_lost_blocks(self, block_table: list[int], load: PrefixLoad) -> bool:
        if load.num_valid_blocks == load.num_blocks:
            return True
        try:
            self._memory.own_lost_blocks(block_table, load)
        except OutOfBlocks:
            return False
        return True

    def _publish(self, state: SequenceState, first: int, end: int) -> None:
        for index in range(first, end):
            key = state.keys.pop(index, None)
            if key is not None:
                self._memory.publish(state.sequence.block_table[index], key)

    def _publish_late(self) -> None:
        for handle, index in self._late_seals:
            state = self.states.get(handle)
            if state is not None:
                self._publish(state, index, index + 1)
        self._late_seals.clear()
