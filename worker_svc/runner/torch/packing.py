"""Packs the rows of a step into one batch without padding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from worker_svc.runner.base import Row, SequenceData, StepBatch

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

    def of(self, sequence: SequenceData) -> Ints:
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
    """Per token: block * block_size + offset, where its keys and values go; negative for padding."""
    stride: int | None = None
    """Tokens from one of `chunks` to the next where all are padded to one length."""

    @property
    def rows(self) -> tuple[PackedRow, ...]:
        """All rows in the order of their tokens."""
        return self.decodes + self.chunks


def pack(batch: StepBatch, tables: BlockTables, block_size: int) -> Packed:
    """Pack the rows of a step one after the other."""
    singles = sorted((row for row in batch.rows if row.num_tokens == 1), key=lambda row: row.start)
    longer = [row for row in batch.rows if row.num_tokens > 1]
    placed, first = [], 0
    for row in (*singles, *longer):
        placed.append(PackedRow(row, first, tables.of(row.sequence)))
        first += row.num_tokens
    return _fill(placed, len(singles), first, block_size)


def pack_padded(batch: StepBatch, tables: BlockTables, block_size: int) -> Packed:
    """Pack the rows of a step as static batching does: prompts take as much room as the longest.

    Rows that do not begin a sequence (a chunk, a batch that is resumed) are not padded, so a step
    has padding only when all its longer rows are whole prompts.
    """
    longer = [row for row in batch.rows if row.num_tokens > 1]
    if any(row.start > 0 for row in longer) or not longer:
        return pack(batch, tables, block_size)
    singles = sorted((row for row in batch.rows if row.num_tokens == 1), key=lambda row: row.start)
    stride = max(row.num_tokens for row in longer)
    placed = [PackedRow(row, index, tables.of(row.sequence)) for index, row in enumerate(singles)]
    placed += [
        PackedRow(row, len(singles) + index * stride, tables.of(row.sequence))
        for index, row in enumerate(longer)
    ]
    packed = _fill(placed, len(singles), len(singles) + len(longer) * stride, block_size)
    return replace(packed, stride=stride)


def _fill(placed: list[PackedRow], num_singles: int, num_tokens: int, block_size: int) -> Packed:
    """Write down the tokens of rows that have their places; the gaps between them are padding."""
    token_ids = np.zeros(num_tokens, dtype=np.int64)
    positions = np.zeros(num_tokens, dtype=np.int64)
    slots = np.full(num_tokens, -1, dtype=np.int64)
    singles, longer = placed[:num_singles], placed[num_singles:]
    if singles:
        starts = np.array([packed.row.start for packed in singles])
        blocks = np.array([packed.table[packed.row.start // block_size] for packed in singles])
        token_ids[:num_singles] = [packed.row.sequence.token_ids[packed.row.start] for packed in singles]
        positions[:num_singles] = starts
        slots[:num_singles] = blocks * block_size + starts % block_size
    for packed in longer:
        row, place = packed.row, slice(packed.first, packed.first + packed.row.num_tokens)
        span = np.arange(row.start, packed.num_context)
        token_ids[place] = row.sequence.token_ids[row.start : packed.num_context]
        positions[place] = span
        slots[place] = packed.table[span // block_size] * block_size + span % block_size
    return Packed(tuple(singles), tuple(longer), token_ids, positions, slots)
