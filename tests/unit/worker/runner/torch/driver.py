"""Drives a runner as an engine would, with block tables in random order and random chunks."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

from octavo.sampling import SamplingParams

from worker_svc.runner.base import ModelRunner, Row, SequenceData, StepBatch, StepResult

GREEDY = SamplingParams(temperature=0.0)


class Driver:
    """Blocks and progress of sequences on one runner."""

    def __init__(self, runner: ModelRunner, num_blocks: int, block_size: int = 16, seed: int = 0) -> None:
        self.runner = runner
        self.block_size = block_size
        self.random = random.Random(seed)
        runner.allocate(num_blocks, block_size, 0)
        self.free = list(range(num_blocks))
        self.random.shuffle(self.free)
        self.live: dict[int, SequenceData] = {}
        self._next_handle = 1
        self._added: list[SequenceData] = []
        self._removed: list[int] = []

    def add(
        self,
        token_ids: Seq[int],
        sampling: SamplingParams = GREEDY,
        prompt_len: int | None = None,
        choice: int = 0,
    ) -> SequenceData:
        length = len(token_ids) if prompt_len is None else prompt_len
        sequence = SequenceData(self._next_handle, list(token_ids), length, sampling, choice)
        self._next_handle += 1
        self.live[sequence.handle] = sequence
        self._added.append(sequence)
        return sequence

    def remove(self, sequence: SequenceData) -> None:
        del self.live[sequence.handle]
        self.free.extend(sequence.block_table)
        self._removed.append(sequence.handle)

    def row(self, sequence: SequenceData, num_tokens: int) -> Row:
        start = sequence.num_computed_tokens
        end = start + num_tokens
        while len(sequence.block_table) * self.block_size < end:
            sequence.block_table.append(self.free.pop())
        return Row(sequence, start, num_tokens, sample=end == len(sequence.token_ids))

    def step(self, chunks: dict[int, int] | None = None) -> StepResult:
        """Run one step: every live sequence, or the tokens of each handle in `chunks`."""
        if chunks is None:
            chunks = {h: len(s.token_ids) - s.num_computed_tokens for h, s in self.live.items()}
        rows = tuple(self.row(self.live[handle], count) for handle, count in chunks.items())
        batch = StepBatch(rows, tuple(self._added), tuple(self._removed))
        result = self.runner.execute(batch)
        self._added.clear()
        self._removed.clear()
        for row in rows:
            row.sequence.num_computed_tokens += row.num_tokens
            if row.sample:
                row.sequence.token_ids.append(result.token_ids[row.sequence.handle])
        return result

    def random_chunks(self, most: int) -> dict[int, int]:
        """Pick a random share of the pending tokens of a random part of the sequences."""
        chunks = {}
        for handle, sequence in self.live.items():
            pending = len(sequence.token_ids) - sequence.num_computed_tokens
            if self.random.random() < 0.8:
                chunks[handle] = self.random.randint(1, min(most, pending))
        return chunks

    def generate(self, sequences: Seq[SequenceData], count: int, most: int | None = None) -> list[list[int]]:
        """Run until each of `sequences` has `count` more tokens; `most` makes chunks random."""
        goals = {s.handle: len(s.token_ids) + count for s in sequences}
        for sequence in sequences:
            self.live.setdefault(sequence.handle, sequence)
        while pending := [s for s in sequences if len(s.token_ids) < goals[s.handle]]:
            chunks = None if most is None else self.random_chunks(most)
            if chunks is None:
                chunks = {s.handle: len(s.token_ids) - s.num_computed_tokens for s in pending}
            chunks = {h: n for h, n in chunks.items() if len(self.live[h].token_ids) < goals.get(h, 1 << 60)}
            if chunks:
                self.step(chunks)
        return [s.token_ids[goals[s.handle] - count : goals[s.handle]] for s in sequences]
