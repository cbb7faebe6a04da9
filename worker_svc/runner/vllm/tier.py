"""The host tier of one rank: a host copy of each of vLLM's KV tensors."""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Final

import torch

_FEWEST_PIECES: Final = 16


class Tier:
    """Host blocks beside the KV tensors of a rank; a block is copied in all layers at once."""

    def __init__(self, kv_caches: Iterable[torch.Tensor], num_blocks: int, num_host_blocks: int) -> None:
        """Make the host tensors.

        Args:
            kv_caches: one tensor per layer; layers that share one count once.
            num_blocks: blocks on the device. Dimension 0 of a tensor is a multiple of it, since kernels may
                see smaller blocks than the pool.
            num_host_blocks: blocks on the host.

        Raises:
            MemoryError: the host has not so much memory to give.
        """
        unique = {cache.data_ptr(): cache for cache in kv_caches}.values()
        self._device = [cache.view(num_blocks, -1, *cache.shape[1:]) for cache in unique]
        try:
            self._host = [HostBlocks(num_host_blocks, cache[0]) for cache in self._device]
        except RuntimeError as error:
            block_bytes = sum(cache[0].nbytes for cache in self._device)
            raise MemoryError(
                f"out of memory: {num_host_blocks} host blocks x {block_bytes} bytes = "
                f"{num_host_blocks * block_bytes} bytes in each rank: {error}"
            ) from error
        self._stream = torch.cuda.Stream() if self._device[0].is_cuda else None  # type: ignore[no-untyped-call] # torch
        self._under_way: dict[int, tuple[torch.cuda.Event, torch.cuda.Event]] = {}
        self._took_s: dict[int, float] = {}

    def copy_out(self, pairs: Seq[tuple[int, int]]) -> None:
        """Copy blocks to the host, given as (device block, host block); on return they are there."""
        if self._stream is None:
            self._copy(pairs, to_host=True)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy(pairs, to_host=True)
        self._stream.synchronize()

    def copy_in(self, pairs: Seq[tuple[int, int]], number: int) -> None:
        """Start to copy blocks to the device; `took_s` knows the copy by its number."""
        if self._stream is None:
            started = time.perf_counter()
            self._copy(pairs, to_host=False)
            self._took_s[number] = time.perf_counter() - started
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            start = _timed_event(self._stream)
            self._copy(pairs, to_host=False)
            self._under_way[number] = start, _timed_event(self._stream)

    def took_s(self, number: int) -> float | None:
        """Return how long a copy to the device took once it has arrived: to the first who asks, that is."""
        if number in self._under_way:
            start, end = self._under_way[number]
            if not end.query():  # type: ignore[no-untyped-call] # torch
                return None
            del self._under_way[number]
            return float(start.elapsed_time(end)) / 1000
        return self._took_s.pop(number, None)

    def _copy(self, pairs: Seq[tuple[int, int]], *, to_host: bool) -> None:
        for device, host in zip(self._device, self._host, strict=True):
            for device_block, host_block in pairs:
                if to_host:
                    host[host_block].copy_(device[device_block], non_blocking=True)
                else:
                    device[device_block].copy_(host[host_block], non_blocking=True)


class HostBlocks:
    """The host's copies of one KV tensor's blocks.

    They lie in pieces just below a power of two, to which torch rounds up what it pins: in one piece they
    could take twice the memory that was asked for.
    """

    def __init__(self, num_blocks: int, like: torch.Tensor) -> None:
        """Make them, pinned when `like`, a block of the tensor, is on a GPU.

        Raises:
            RuntimeError: there is no memory for it.
        """
        piece_bytes = 1 << max(0, (num_blocks * like.nbytes // _FEWEST_PIECES).bit_length() - 1)
        self._per_piece = max(1, piece_bytes // like.nbytes)
        self.pieces = [
            torch.empty(
                (min(self._per_piece, num_blocks - first), *like.shape),
                dtype=like.dtype,
                pin_memory=like.is_cuda,
            )
            for first in range(0, num_blocks, self._per_piece)
        ]

    def __getitem__(self, block: int) -> torch.Tensor:
        piece, index = divmod(block, self._per_piece)
        return self.pieces[piece][index]


def _timed_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Return an event recorded now that can be held against others of its kind."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch
    event.record(stream)
    return event
