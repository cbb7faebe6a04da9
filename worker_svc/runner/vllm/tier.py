"""The host tier of one rank: a host copy of each of vLLM's KV tensors."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import torch


class Tier:
    """Host blocks beside the KV tensors of a rank; a block is copied in all layers at once."""

    def __init__(self, kv_caches: Iterable[torch.Tensor], num_blocks: int, num_host_blocks: int) -> None:
        """Make the host tensors.

        Args:
            kv_caches: one tensor per layer; layers that share one count once.
            num_blocks: blocks on the device. Dimension 0 of a tensor is a multiple of it, since kernels may
                see smaller blocks than the pool.
            num_host_blocks: blocks on the host.
        """
        unique = {cache.data_ptr(): cache for cache in kv_caches}.values()
        self._device = [cache.view(num_blocks, -1, *cache.shape[1:]) for cache in unique]
        on_gpu = self._device[0].is_cuda
        self._host = [
            torch.empty((num_host_blocks, *cache.shape[1:]), dtype=cache.dtype, pin_memory=on_gpu)
            for cache in self._device
        ]
        self._stream = torch.cuda.Stream() if on_gpu else None  # type: ignore[no-untyped-call] # torch
        self._arrivals: list[torch.cuda.Event] = []

    def copy(self, pairs: Seq[tuple[int, int]], *, to_host: bool) -> None:
        """Copy blocks, given as (device block, host block).

        On return, what was copied out is there; what is copied in may still be under way, see `done`.
        """
        if self._stream is None:
            self._copy(pairs, to_host=to_host)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy(pairs, to_host=to_host)
            arrival = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch
            arrival.record()
        if to_host:
            arrival.synchronize()
        else:
            self._arrivals.append(arrival)

    def done(self) -> bool:
        """Return whether everything that was copied in has arrived."""
        self._arrivals = [
            arrival
            for arrival in self._arrivals
            if not arrival.query()  # type: ignore[no-untyped-call] # torch
        ]
        return not self._arrivals

    def _copy(self, pairs: Seq[tuple[int, int]], *, to_host: bool) -> None:
        for device, host in zip(self._device, self._host, strict=True):
            for device_block, host_block in pairs:
                if to_host:
                    host[host_block].copy_(device[device_block], non_blocking=True)
                else:
                    device[device_block].copy_(host[host_block], non_blocking=True)
