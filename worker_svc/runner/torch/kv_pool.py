"""The KV memory: one tensor of blocks on the device, one on the host."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from worker_svc.runner import host_memory
from worker_svc.runner.base import BlockCopy, CopyTicket
from worker_svc.runner.torch.compute import Compute
from worker_svc.runner.torch.config import ModelConfig
from worker_svc.runner.torch.packing import Ints


class KvPool:
    """Blocks of keys and values, [num_blocks, layers, 2, kv_heads, block_size, head_dim].

    All layers of a block lie together, so that a block moves between tiers in one piece. Within a
    layer a KV head's tokens lie together, so that blocks gathered head by head are the operands of
    attention as they are. Every slot always holds finite numbers: attention multiplies slots beyond
    a sequence's end by zero.
    """

    def __init__(
        self, config: ModelConfig, compute: Compute, num_blocks: int, block_size: int, num_host_blocks: int
    ) -> None:
        self.block_size = block_size
        self.num_heads = config.num_kv_heads
        self.block_stride = config.num_layers * 2 * config.num_kv_heads
        """Rows of one KV head's block (block_size * head_dim) in a block."""
        shape = (config.num_layers, 2, config.num_kv_heads, block_size, config.head_dim)
        block_bytes = block_size * kv_bytes_per_token(config, compute)
        _check_host(num_host_blocks + (num_blocks if compute.device.type == "cpu" else 0), block_bytes)
        self.device_blocks = _zeros((num_blocks, *shape), compute.activations, compute.device)
        # Not pinned: copies go through pinned buffers of their own.
        self.host_blocks = _zeros((num_host_blocks, *shape), compute.activations, torch.device("cpu"))
        heads = self.device_blocks.view(-1, block_size * config.head_dim)
        slots = self.device_blocks.view(-1, config.head_dim)
        per_layer = 2 * config.num_kv_heads
        self.head_rows = tuple(heads[layer * per_layer :] for layer in range(config.num_layers))
        """Per layer: [*, block_size * head_dim], row block * block_stride + kind * heads + head."""
        self.slot_rows = tuple(slots[layer * per_layer * block_size :] for layer in range(config.num_layers))
        """Per layer: [*, head_dim], row (the head's block) * block_size + offset."""
        self._side_stream = _side_stream(compute.device)

    def clear(self, slots: Ints) -> None:
        """Zero the keys and values of these slots (block * block_size + offset) in all layers."""
        blocks, offsets = (torch.from_numpy(part) for part in np.divmod(slots, self.block_size))
        by_slot = self.device_blocks.flatten(
            1, 3
        )  # [num_blocks, layers * 2 * kv_heads, block_size, head_dim]
        by_slot[blocks, :, offsets] = 0

    def copy_to_host(self, copies: Seq[BlockCopy]) -> None:
        """Copy blocks out; on return the device blocks may be overwritten."""
        device, host = _indices(copies)
        self.host_blocks[host] = self.device_blocks[device.to(self.device_blocks.device)].cpu()

    def copy_to_device(self, copies: Seq[BlockCopy]) -> CopyTicket:
        """Start to copy blocks in."""
        device, host = _indices(copies)
        if self._side_stream is None:
            started = time.perf_counter()
            self.device_blocks[device] = self.host_blocks[host]
            return FinishedCopy(time.perf_counter() - started)
        self._side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side_stream):
            start = _timed_event(self._side_stream)
            staged = self.host_blocks[host].pin_memory().to(self.device_blocks.device, non_blocking=True)
            self.device_blocks[device.to(self.device_blocks.device, non_blocking=True)] = staged
            return CudaCopy(start, _timed_event(self._side_stream))


class FinishedCopy:
    """A copy to the device that was done at once."""

    def __init__(self, elapsed_s: float) -> None:
        self._elapsed_s = elapsed_s

    def done(self) -> bool:
        """Return whether the data has arrived."""
        return True

    def elapsed_s(self) -> float:
        """Return how long it took."""
        return self._elapsed_s


class CudaCopy:
    """A copy to the device under way, between two events of its stream."""

    def __init__(self, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        self._start = start
        self._end = end

    def done(self) -> bool:
        """Return whether the data has arrived."""
        return bool(self._end.query())  # type: ignore[no-untyped-call] # torch has no type here

    def elapsed_s(self) -> float:
        """Return how long the stream took for it."""
        return float(self._start.elapsed_time(self._end)) / 1000


def kv_bytes_per_token(config: ModelConfig, compute: Compute) -> int:
    """Return what the keys and values of one token take in all layers."""
    return 2 * config.num_layers * config.kv_size * compute.activations.itemsize


def _side_stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch has no type here


def _timed_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Return an event recorded now that can be held against others of its kind."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch has no type here
    event.record(stream)
    return event


def _indices(copies: Seq[BlockCopy]) -> tuple[Tensor, Tensor]:
    pairs = torch.tensor([(copy.device_block, copy.host_block) for copy in copies], dtype=torch.long)
    device, host = pairs.view(-1, 2).unbind(1)
    return device, host


def _check_host(num_blocks: int, block_bytes: int) -> None:
    """Raise MemoryError when the host has no room for so many blocks, which take it only as they fill."""
    size = num_blocks * block_bytes
    available = host_memory.available_bytes()
    if size > available:
        raise MemoryError(
            f"{num_blocks} blocks x {block_bytes} bytes = {size} bytes of KV blocks do not fit into the "
            f"{available} bytes of host memory available"
        )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on the CPU as pages that take memory only once they are written.

    Raises:
        MemoryError: there is not enough memory.
    """
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if device.type == "cuda":
        try:
            return torch.zeros(shape, dtype=dtype, device=device)
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"{size} bytes of KV blocks do not fit on the device: {error}") from error
    words = np.zeros(size // dtype.itemsize, dtype=f"u{dtype.itemsize}")
    return torch.from_numpy(words).view(dtype).view(shape)
