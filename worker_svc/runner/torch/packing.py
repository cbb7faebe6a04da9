"""Packs the rows of a step into one batch without padding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from worker_svc.runner.base import Row, StepBatch
from worker_svc.sequence import Sequence

Ints = npt.NDArray[np.int64]


class BlockTables:
    """Block tables as arrays, kept from step to step.

    A table only grows while its sequence is known, so a step converts new entries only.
    """

    def __init__(self) -> None:
        self._tables: dict[int, Ints] = {}
        self._lengths: dict[int, int] = {}

    def forget(self, handles: Iterable[int]) -> None:
        """Drop the tables of these sequences."""
        for handle in handles:
            self._tables.pop(handle, None)
            self._lengths.pop(handle, None)

    def of(self, sequence: Sequence) -> Ints:
        """Return the block table of `sequence`, valid until its next call."""
        handle, blocks = sequence.handle, sequence.block_table
        table = self._tables.get(handle)
        known = self._lengths.get(handle, 0)
        if table is None or len(blocks) > table.size:
            grown = np.empty(max(16, 2 * len(blocks)), dtype=np.int64)
            if table is not None:
                grown[:known] = table[:known]
            self._tables[handle] = table = grown
        if len(blocks) > known:
            table[known : len(blocks)] = blocks[known:]
        self._lengths[handle] = len(blocks)
        return table[: len(blocks)]


@dataclass(frozen=True, slots=True)
class PackedRow:
    """A row and its place in the packed batch."""

    row: Row
    first: int
    """Index of its first token among the batch's tokens."""
    table: Ints

    @property
    def num_context(self) -> int:
        """Tokens of the sequence whose KV exists once this row's is written."""
        return self.row.start + self.row.num_tokens


@dataclass(frozen=True, slots=True)
class Packed:
    """One step's tokens: single-token rows first, by length of context, then the longer rows."""

    decodes: tuple[PackedRow, ...]
    chunks: tuple[PackedRow, ...]
    token_ids: Ints
    positions: Ints
    slots: Ints
    """Per token: block * block_size + offset, where its keys and values go."""

    @property
    def rows(self) -> tuple[PackedRow, ...]:
        """All rows in the order of their tokens."""
        return self.decodes + self.chunks


def pack(batch: StepBatch, tables: BlockTables, block_size: int) -> Packed:
    """Pack `batch`."""
    singles = sorted((row for row in batch.rows if row.num_tokens == 1), key=lambda row: row.start)
    longer = [row for row in batch.rows if row.num_tokens > 1]
    starts = np.array([row.start for row in singles], dtype=np.int64)
    last = np.array([row.sequence.token_ids[row.start] for row in singles], dtype=np.int64)
    decodes = tuple(PackedRow(row, index, tables.of(row.sequence)) for index, row in enumerate(singles))
    ids, positions, chunks = [last], [starts], []
    block_ids = np.array([packed.table[packed.row.start // block_size] for packed in decodes], dtype=np.int64)
    slots = [block_ids * block_size + starts % block_size]
    first = len(singles)
    for row in longer:
        chunk = PackedRow(row, first, tables.of(row.sequence))
        span = np.arange(row.start, chunk.num_context)
        chunks.append(chunk)
        ids.append(np.array(row.sequence.token_ids[row.start : chunk.num_context], dtype=np.int64))
        positions.append(span)
        slots.append(chunk.table[span // block_size] * block_size + span % block_size)
        first += row.num_tokens
    return Packed(
        decodes, tuple(chunks), np.concatenate(ids), np.concatenate(positions), np.concatenate(slots)
    )
