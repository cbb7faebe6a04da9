"""A model runner that knows what every KV slot must hold, and fails the test when one does not.

The KV of a token depends on all tokens up to it, so the shadow of a slot is the hash of that prefix.
Tokens are a pure function of (prefix, seed, choice): whatever the engine does with blocks, batches and
failures, a sequence must come out the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq

from octavo.sampling import SamplingParams

from worker_svc.errors import StepFailed
from worker_svc.runner.base import BlockCopy, LoadedModel, Row, SequenceData, StepBatch, StepResult

VOCAB_SIZE = 50
EOS = 0


def prefix_hashes(token_ids: Seq[int], known: list[int]) -> list[int]:
    """Extend `known`, the hashes of the leading prefixes, to all of `token_ids`."""
    state = known[-1] if known else 7
    for token_id in token_ids[len(known) :]:
        state = hash((state, token_id))
        known.append(state)
    return known


def sample(prefix_hash: int, sampling: SamplingParams, choice: int) -> int:
    return hash((prefix_hash, sampling.seed, choice)) % VOCAB_SIZE


def reference(prompt: Seq[int], sampling: SamplingParams, max_len: int, choice: int = 0) -> list[int]:
    """The output that a sequence must have, its stopping token included."""
    tokens = list(prompt)
    hashes: list[int] = []
    limit = min(len(prompt) + (sampling.max_tokens or max_len), max_len)
    stop_ids = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))}
    while len(tokens) < limit:
        token_id = sample(prefix_hashes(tokens, hashes)[-1], sampling, choice)
        tokens.append(token_id)
        if token_id in stop_ids and len(tokens) - len(prompt) > (sampling.min_tokens or 0):
            break
    return tokens[len(prompt) :]


class ShadowTicket:
    """A copy that is done when it has been asked for often enough."""

    def __init__(self, polls: int, duration_s: float, land: Callable[[], None]) -> None:
        self._polls = polls
        self._duration_s = duration_s
        self._land = land

    def done(self) -> bool:
        self._polls -= 1
        if self._polls == 0:
            self._land()
        return self._polls <= 0

    def elapsed_s(self) -> float:
        return self._duration_s


class ShadowRunner:
    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.device: dict[tuple[int, int], int] = {}
        self.host: dict[tuple[int, int], int] = {}
        self.known: set[int] = set()
        self.failures: deque[Exception | None] = deque()
        """What the next attempts raise; None lets one pass."""
        self.copy_failures: deque[Exception | None] = deque()
        self.copy_polls = 1
        self.now = 0.0
        """A clock, in seconds, that only work moves."""
        self.compute_s_per_token = 1e-5
        self.copy_s_per_block = 1e-6
        self.blocks_out = self.blocks_in = self.failed_copies_in = 0
        self.computed_tokens = 0
        self.violations: list[AssertionError] = []
        self.batches: list[list[tuple[int, int, int]]] = []
        """(handle, start, tokens) of the rows of each successful attempt."""
        self._landing_blocks: set[int] = set()
        self._read_host_blocks: set[int] = set()
        self._hashes: dict[int, list[int]] = {}

    @property
    def info(self) -> LoadedModel:
        raise NotImplementedError

    def available_kv_bytes(self, utilization: float) -> int:
        raise NotImplementedError

    def allocate(self, num_blocks: int, block_size: int, num_host_blocks: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def supports(self, sampling: SamplingParams) -> str | None:
        return "grammars" if sampling.structured is not None else None

    def execute(self, batch: StepBatch) -> StepResult:
        try:
            return self._execute(batch)
        except AssertionError as violation:
            # The engine takes whatever a runner raises for a failed step.
            self.violations.append(violation)
            raise

    def _execute(self, batch: StepBatch) -> StepResult:
        for handle in batch.removed:
            self.known.discard(handle)
            self._hashes.pop(handle, None)
        added = {sequence.handle for sequence in batch.added}
        handles = [row.sequence.handle for row in batch.rows]
        assert handles == sorted(set(handles)), "rows come once, in the order of admission"
        assert added <= set(handles)
        assert (self.known | added).issuperset(handles), "rows are of sequences that were introduced"
        failure = self.failures.popleft() if self.failures else None
        if failure is not None:
            # What a step wrote before it failed must not matter.
            for row in batch.rows:
                self._scribble(row)
            raise failure
        self.known |= added
        self.now += self.compute_s_per_token * sum(row.num_tokens for row in batch.rows)
        for row in batch.rows:
            self._write(row, batch.rows)
        token_ids = {}
        for row in batch.rows:
            hashes = self._read(row)
            if row.sample:
                sequence = row.sequence
                token_ids[sequence.handle] = sample(hashes[-1], sequence.sampling, sequence.choice)
        self.batches.append([(row.sequence.handle, row.start, row.num_tokens) for row in batch.rows])
        return StepResult(token_ids, {})

    def copy_to_host(self, copies: Seq[BlockCopy]) -> None:
        self._fail_copy()
        device_blocks = {copy.device_block for copy in copies}
        host_blocks = {copy.host_block for copy in copies}
        self._expect(len(host_blocks) == len(copies), "each host block is written once")
        self._expect(device_blocks.isdisjoint(self._landing_blocks), "what is still coming is not copied out")
        self._expect(host_blocks.isdisjoint(self._read_host_blocks), "what is being read is not overwritten")
        for copy in copies:
            for slot in range(self.block_size):
                self.host[copy.host_block, slot] = self.device[copy.device_block, slot]
        self.blocks_out += len(copies)
        self.now += self.copy_s_per_block * len(copies)

    def copy_to_device(self, copies: Seq[BlockCopy]) -> ShadowTicket:
        try:
            self._fail_copy()
        except StepFailed:
            self.failed_copies_in += len(copies)
            raise
        for copy in copies:
            self._expect(copy.device_block not in self._landing_blocks, "a block comes once")
            self._landing_blocks.add(copy.device_block)
            self._read_host_blocks.add(copy.host_block)
            for slot in range(self.block_size):
                self.device.pop((copy.device_block, slot), None)
        self.blocks_in += len(copies)
        duration_s = self.copy_s_per_block * len(copies)
        return ShadowTicket(self.copy_polls, duration_s, lambda: self._land(copies))

    def _land(self, copies: Seq[BlockCopy]) -> None:
        for copy in copies:
            self._landing_blocks.remove(copy.device_block)
            self._read_host_blocks.remove(copy.host_block)
            for slot in range(self.block_size):
                self.device[copy.device_block, slot] = self.host[copy.host_block, slot]

    def _fail_copy(self) -> None:
        failure = self.copy_failures.popleft() if self.copy_failures else None
        if failure is not None:
            raise failure

    def _expect(self, holds: bool, what: str) -> None:
        if not holds:
            self.violations.append(AssertionError(what))

    def _slot(self, sequence: SequenceData, position: int) -> tuple[int, int]:
        return sequence.block_table[position // self.block_size], position % self.block_size

    def _scribble(self, row: Row) -> None:
        for position in range(row.start, row.start + row.num_tokens):
            self.device[self._slot(row.sequence, position)] = -1

    def _write(self, row: Row, rows: Seq[Row]) -> None:
        sequence = row.sequence
        assert row.start == sequence.num_computed_tokens
        assert 0 < row.num_tokens <= len(sequence.token_ids) - row.start
        assert row.sample == (row.start + row.num_tokens == len(sequence.token_ids))
        hashes = prefix_hashes(sequence.token_ids, self._hashes.setdefault(sequence.handle, []))
        written = set()
        for position in range(row.start, row.start + row.num_tokens):
            slot = self._slot(sequence, position)
            assert slot[0] not in self._landing_blocks, "what is still coming is not written"
            self.device[slot] = hashes[position]
            written.add(slot[0])
        for other in rows:
            if other.sequence is not sequence:
                assert written.isdisjoint(other.sequence.block_table), "what is written belongs to one"
        self.computed_tokens += row.num_tokens

    def _read(self, row: Row) -> list[int]:
        end = row.start + row.num_tokens
        hashes = self._hashes[row.sequence.handle][:end]
        for position in range(end):
            slot = self._slot(row.sequence, position)
            assert slot[0] not in self._landing_blocks, "what is still coming is not read"
            assert self.device.get(slot) == hashes[position], f"slot {slot} holds the KV of another prefix"
        return hashes
