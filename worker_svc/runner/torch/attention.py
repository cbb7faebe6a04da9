"""Paged attention: queries of one packed batch against keys and values gathered through block tables.

torch has no CPU kernel that reads a block table, so blocks are gathered, per layer, in pieces small
enough to stay in the cache between the gather and the product. Decodes of similar length share a
piece: the query heads that share a KV head become the query positions of one attention call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 # its customary name

from worker_svc.runner.torch.config import ModelConfig
from worker_svc.runner.torch.kv_pool import KvPool
from worker_svc.runner.torch.packing import Ints, Packed, PackedRow


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows whose context is gathered and attended in one go."""

    first: int
    last: int
    """Token range in the packed batch."""
    rows: Tensor
    """Rows of the pool's `head_rows`, for [2, sequences, kv_heads, blocks]."""
    num_blocks: int
    mask: Tensor
    """Added to the scores; broadcasts to [sequences, heads or kv_heads, queries, context]."""


@dataclass(frozen=True, slots=True)
class _Fresh:
    """Prompts from their first token, `count` of one `length`, whose keys and values are at hand."""

    first: int
    count: int
    length: int


@dataclass(frozen=True, slots=True)
class PieceSize:
    """How decodes are grouped, in bytes of gathered keys and values."""

    most: int
    """A piece of several sequences stays below this."""
    waste: int
    """Padding that costs about as much as another attention call."""


CPU_PIECES = PieceSize(most=3 << 20, waste=1 << 18)
CUDA_PIECES = PieceSize(most=256 << 20, waste=16 << 20)


class PagedAttention:
    """Attention of one step; built once, called for each layer."""

    def __init__(self, packed: Packed, pool: KvPool, config: ModelConfig, pieces: PieceSize) -> None:
        self._pool = pool
        self._config = config
        self._device = pool.device_blocks.device
        self._dtype = pool.device_blocks.dtype
        # One query token per sequence: two products are up to twice as fast as the CPU's flash kernel.
        self._multiplies = self._dtype == torch.float32 and self._device.type == "cpu"
        self._stored = None if packed.stride is None else self._on_device(np.flatnonzero(packed.slots >= 0))
        self._slots = self._slot_index(packed.slots[packed.slots >= 0])
        self._decodes = [self._decode_piece(group) for group in self._groups(packed, pieces)]
        self._window: Tensor | None = None
        self._fresh: list[_Fresh] = []
        self._chunks: list[_Piece] = []
        if packed.stride is not None:
            self._fresh.append(_Fresh(packed.chunks[0].first, len(packed.chunks), packed.stride))
            return
        for chunk in packed.chunks:
            if chunk.row.start == 0:
                self._fresh.append(_Fresh(chunk.first, 1, chunk.row.num_tokens))
            else:
                self._chunks.append(self._chunk_piece(chunk))

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """Store this step's keys and values, then attend: qkv [T, q + k + v] -> [T, q]."""
        c = self._config
        query, new = qkv[:, : c.q_size], qkv[:, c.q_size :]
        heads = new.view(len(new), 2 * c.num_kv_heads, c.head_dim)
        stored = heads if self._stored is None else heads[self._stored]
        self._pool.slot_rows[layer].index_put_((self._slots,), stored)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for piece in self._decodes:
            self._attend_decodes(piece, layer, query, out)
        for fresh in self._fresh:
            self._attend_fresh(fresh, query, heads, out)
        for piece in self._chunks:
            self._attend_chunk(piece, layer, query, out)
        return out

    def _attend_decodes(self, piece: _Piece, layer: int, query: Tensor, out: Tensor) -> None:
        c = self._config
        size = piece.last - piece.first
        shape = (size, c.num_kv_heads, c.num_heads // c.num_kv_heads, c.head_dim)
        queries = query[piece.first : piece.last].view(shape)
        target = out[piece.first : piece.last].view(shape)
        keys, values = self._gather(piece, layer)
        if self._multiplies:
            products = (size * c.num_kv_heads, *shape[2:])  # [b * kv_heads, group, head_dim]
            keys, values = keys.flatten(0, 1), values.flatten(0, 1)
            scale = c.head_dim**-0.5
            scores = torch.baddbmm(piece.mask, queries.reshape(products), keys.transpose(1, 2), alpha=scale)
            torch.bmm(scores.softmax(dim=-1), values, out=target.view(products))
        else:
            target.copy_(F.scaled_dot_product_attention(queries, keys, values, attn_mask=piece.mask))

    def _attend_fresh(self, fresh: _Fresh, query: Tensor, heads: Tensor, out: Tensor) -> None:
        """The beginning of a prompt sees itself only: nothing is gathered."""
        c = self._config
        tokens = slice(fresh.first, fresh.first + fresh.count * fresh.length)
        keys, values = heads[tokens].view(fresh.count, fresh.length, 2, c.num_kv_heads, c.head_dim).unbind(2)
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        if c.sliding_window is not None and fresh.length > c.sliding_window:
            mask = self._window_mask(fresh.length)
            for index in range(fresh.count):
                own = slice(fresh.first + index * fresh.length, fresh.first + (index + 1) * fresh.length)
                self._attend_masked(query[own], keys[index], values[index], mask, out[own])
            return
        attended = F.scaled_dot_product_attention(
            self._by_head(query[tokens], fresh.count), keys, values, is_causal=True, enable_gqa=True
        )
        self._by_head(out[tokens], fresh.count).copy_(attended)

    def _attend_chunk(self, piece: _Piece, layer: int, query: Tensor, out: Tensor) -> None:
        keys, values = self._gather(piece, layer)
        chunk = slice(piece.first, piece.last)
        self._attend_masked(query[chunk], keys[0], values[0], piece.mask, out[chunk])

    def _attend_masked(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, out: Tensor) -> None:
        """Attend under a mask [n, context]: query [n, q], keys and values [kv_heads, context, head_dim].

        The query heads that share a KV head are the batch: on CUDA, a mask together with `enable_gqa` may
        leave torch only the kernel that writes all scores down.
        """
        c = self._config
        group = c.num_heads // c.num_kv_heads
        shape = (len(query), c.num_kv_heads, group, c.head_dim)
        attended = F.scaled_dot_product_attention(
            query.view(shape).permute(2, 1, 0, 3),
            keys.expand(group, -1, -1, -1),
            values.expand(group, -1, -1, -1),
            attn_mask=mask,
        )
        out.view(shape).permute(2, 1, 0, 3).copy_(attended)

    def _by_head(self, tokens: Tensor, count: int) -> Tensor:
        """View [count * n, q] as [count, heads, n, head_dim]."""
        heads = tokens.view(count, -1, self._config.num_heads, self._config.head_dim)
        return heads.transpose(1, 2)

    def _window_mask(self, length: int) -> Tensor:
        if self._window is None or len(self._window) != length:
            positions = np.arange(length)
            self._window = self._additive(self._seen(positions[None], positions[:, None]))
        return self._window

    def _gather(self, piece: _Piece, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values, [sequences, kv_heads, blocks * block_size, head_dim] each."""
        gathered = self._pool.head_rows[layer].index_select(0, piece.rows)
        both = gathered.view(
            2, -1, self._config.num_kv_heads, piece.num_blocks * self._pool.block_size, self._config.head_dim
        )
        return both[0], both[1]

    def _groups(self, packed: Packed, pieces: PieceSize) -> Iterator[list[PackedRow]]:
        """Split the decodes, which come by length of context, into pieces."""
        block_bytes = 2 * self._config.kv_size * self._pool.block_size * self._dtype.itemsize
        group: list[PackedRow] = []
        used = 0
        for row in packed.decodes:
            blocks = row.num_context // self._pool.block_size + 1
            used += blocks
            padded = (len(group) + 1) * blocks
            if group and (padded * block_bytes > pieces.most or (padded - used) * block_bytes > pieces.waste):
                yield group
                group, used = [], blocks
            group.append(row)
        if group:
            yield group

    def _decode_piece(self, group: list[PackedRow]) -> _Piece:
        lengths = np.array([row.num_context for row in group])
        block_size = self._pool.block_size
        begins = self._window_begins(lengths)
        spans = -(-lengths // block_size) - begins
        width = int(spans.max())
        tables = np.zeros((len(group), width), dtype=np.int64)
        for table, row, begin, span in zip(tables, group, begins, spans, strict=True):
            table[:span] = row.table[begin : begin + span]
        offsets = np.arange(width * block_size)[None] + begins[:, None] * block_size
        seen = self._seen(offsets, lengths[:, None] - 1)
        mask = self._additive(seen)[:, None, None]
        if self._multiplies:
            mask = mask.expand(-1, self._config.num_kv_heads, -1, -1).reshape(-1, 1, width * block_size)
        last = group[-1].first + 1
        return _Piece(group[0].first, last, self._head_index(tables), width, mask)

    def _chunk_piece(self, chunk: PackedRow) -> _Piece:
        block_size = self._pool.block_size
        queries = np.arange(chunk.row.start, chunk.num_context)
        begin = int(self._window_begins(queries[:1] + 1)[0])
        end = -(-chunk.num_context // block_size)
        offsets = np.arange(begin * block_size, end * block_size)
        mask = self._additive(self._seen(offsets[None], queries[:, None]))
        rows = self._head_index(chunk.table[None, begin:end])
        return _Piece(chunk.first, chunk.first + chunk.row.num_tokens, rows, end - begin, mask)

    def _window_begins(self, lengths: Ints) -> Ints:
        """Return the first block that a query at the end of each length sees."""
        window = self._config.sliding_window
        if window is None:
            return np.zeros_like(lengths)
        return np.maximum(lengths - window, 0) // self._pool.block_size

    def _seen(self, keys: Ints, queries: Ints) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """Return which key positions a query position sees; the arguments broadcast."""
        seen: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] = keys <= queries
        if self._config.sliding_window is not None:
            seen &= keys > queries - self._config.sliding_window
        return seen

    def _additive(self, seen: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> Tensor:
        mask = torch.zeros(seen.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(torch.from_numpy(~seen).to(self._device), -torch.inf)

    def _head_index(self, tables: Ints) -> Tensor:
        """Return rows of `head_rows` for block tables [n, blocks], ordered [2, n, kv_heads, blocks]."""
        heads = self._pool.num_heads
        rows = (
            tables[None, :, None, :] * self._pool.block_stride
            + (np.arange(2) * heads)[:, None, None, None]
            + np.arange(heads)[None, None, :, None]
        )
        return self._on_device(rows.reshape(-1))

    def _slot_index(self, slots: Ints) -> Tensor:
        """Return rows of `slot_rows` for slots [T], [T, 2 * kv_heads]."""
        block_size = self._pool.block_size
        blocks, offsets = np.divmod(slots, block_size)
        rows = (blocks * self._pool.block_stride)[:, None] + np.arange(2 * self._pool.num_heads)[None]
        return self._on_device(rows * block_size + offsets[:, None])

    def _on_device(self, index: Ints) -> Tensor:
        return torch.from_numpy(index).to(self._device)
