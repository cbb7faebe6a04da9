"""How much KV memory a worker gets, and what it can hold; every refusal shows its arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.protocol.steps import Geometry

from worker_svc.config import KvSection, WorkerSettings
from worker_svc.errors import InvalidSettings
from worker_svc.runner.base import LoadedModel

GPU_UTILIZATION = 0.9
CPU_UTILIZATION = 0.25


@dataclass(frozen=True, slots=True)
class Sizing:
    """The shape of the KV memory, and the longest sequence that model and pool can hold."""

    geometry: Geometry
    max_model_len: int


def size(
    settings: WorkerSettings,
    info: LoadedModel,
    max_num_seqs: int,
    available_kv_bytes: Callable[[float], int],
) -> Sizing:
    """Choose the sizes.

    Args:
        settings: what was asked for.
        info: the loaded model.
        max_num_seqs: sequences that run at the same time, at most.
        available_kv_bytes: see `ModelRunner.available_kv_bytes`.

    Raises:
        InvalidSettings: what was asked for cannot be had.
    """
    block_bytes = settings.tokens_per_block * info.kv_bytes_per_token
    model_len = _model_len(settings, info)
    longest_blocks = -(-model_len // settings.tokens_per_block)
    # More than every row at its longest would never be used but by the prefix cache.
    num_blocks = _num_blocks(settings, info, max_num_seqs * longest_blocks, available_kv_bytes)
    if settings.batch.max_model_len is not None and longest_blocks > num_blocks:
        raise InvalidSettings(
            f"max_model_len {model_len} needs {longest_blocks} blocks of {settings.tokens_per_block} tokens, "
            f"the pool has {num_blocks} ({num_blocks * block_bytes / 2**20:.0f} MiB)"
        )
    spare_blocks = max(0, num_blocks - longest_blocks)
    pin_budget = settings.kv.pin_budget_blocks
    if pin_budget is None:
        pin_budget = min(num_blocks // 4, spare_blocks)
    elif pin_budget > (spare_blocks if settings.batch.max_model_len is not None else num_blocks - 1):
        raise InvalidSettings(
            f"pin_budget_blocks {pin_budget} of {num_blocks} blocks leaves {num_blocks - pin_budget}, "
            f"the longest sequence needs {longest_blocks}"
        )
    return Sizing(
        Geometry(
            block_size=settings.tokens_per_block,
            num_blocks=num_blocks,
            num_host_blocks=_num_host_blocks(settings.kv, block_bytes * info.num_ranks),
            block_bytes=block_bytes * info.num_ranks,
            paged=settings.kv.kv_layout == "paged",
            pin_budget_blocks=pin_budget,
        ),
        max_model_len=min(model_len, (num_blocks - pin_budget) * settings.tokens_per_block),
    )


def _model_len(settings: WorkerSettings, info: LoadedModel) -> int:
    wanted = settings.batch.max_model_len
    if wanted is None:
        return info.max_model_len
    if wanted > info.max_model_len:
        raise InvalidSettings(f"max_model_len {wanted} is beyond the model's context of {info.max_model_len}")
    return wanted


def _num_blocks(
    settings: WorkerSettings,
    info: LoadedModel,
    most_blocks: int,
    available_kv_bytes: Callable[[float], int],
) -> int:
    block_bytes = settings.tokens_per_block * info.kv_bytes_per_token
    if settings.kv.num_blocks is not None or settings.kv.kv_cache_bytes is not None:
        num_blocks = settings.kv.num_blocks or (settings.kv.kv_cache_bytes or 0) // block_bytes
        if num_blocks < 1:
            raise InvalidSettings(
                f"kv_cache_bytes {settings.kv.kv_cache_bytes} is less than one block of {block_bytes} bytes"
            )
        available = available_kv_bytes(1.0)
        if num_blocks * block_bytes > available:
            raise InvalidSettings(
                f"{num_blocks} blocks x {block_bytes} bytes = {num_blocks * block_bytes / 2**20:.0f} MiB, "
                f"{info.device} has {available / 2**20:.0f} MiB to give"
            )
        return num_blocks
    share = settings.kv.gpu_memory_utilization
    if share is None:
        share = CPU_UTILIZATION if info.device.startswith("cpu") else GPU_UTILIZATION
    available = available_kv_bytes(share)
    if available < block_bytes:
        raise InvalidSettings(
            f"gpu_memory_utilization {share:g} leaves {max(0, available) / 2**20:.1f} MiB on {info.device}, "
            f"one block takes {settings.tokens_per_block} tokens x {info.kv_bytes_per_token} bytes = "
            f"{block_bytes / 2**20:.1f} MiB"
        )
    return min(available // block_bytes, most_blocks)


def _num_host_blocks(settings: KvSection, block_bytes: int) -> int:
    if settings.host_kv_bytes is not None:
        return settings.host_kv_bytes // block_bytes
    return settings.num_host_blocks or 0
