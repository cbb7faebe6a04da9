from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from worker_svc.config import WorkerSettings
from worker_svc.errors import InvalidSettings
from worker_svc.runner.base import LoadedModel
from worker_svc.runner.sim import built_in_model
from worker_svc.start.sizing import Sizing, size

MIB = 2**20
INFO = replace(built_in_model(), kv_bytes_per_token=MIB // 16, max_model_len=1024)
"""One block of 16 tokens takes 1 MiB; the longest sequence takes 64 blocks."""


def sized(available_mib: float = 1000, info: LoadedModel = INFO, **flags: Any) -> Sizing:
    settings = WorkerSettings.load(flags)
    seqs = settings.batch.max_num_seqs or 32
    return size(settings, info, seqs, lambda share: int(available_mib * share * MIB))


def test_size_takes_the_stated_share_of_memory() -> None:
    assert sized(gpu_memory_utilization=0.5).geometry.num_blocks == 500


def test_size_takes_less_of_a_cpu_than_of_a_gpu_by_default() -> None:
    assert sized(info=replace(INFO, device="cpu")).geometry.num_blocks == 250
    assert sized(info=replace(INFO, device="cuda:0")).geometry.num_blocks == 900


def test_size_is_capped_at_what_all_rows_at_their_longest_could_use() -> None:
    assert sized(1_000_000, max_num_seqs=4).geometry.num_blocks == 4 * 64


def test_size_in_bytes_or_blocks_is_taken_as_given() -> None:
    assert sized(num_blocks=77).geometry.num_blocks == 77
    assert sized(kv_cache_bytes=77 * MIB).geometry.num_blocks == 77
    assert sized(num_host_blocks=5).geometry.num_host_blocks == 5
    assert sized(host_kv_bytes=5 * MIB).geometry.num_host_blocks == 5


def test_size_counts_the_blocks_of_every_rank_in_the_hosts_memory_and_of_one_in_a_devices() -> None:
    info = replace(INFO, num_ranks=4)

    geometry = sized(info=info, kv_cache_bytes=77 * MIB, host_kv_bytes=80 * MIB).geometry

    assert (geometry.num_blocks, geometry.num_host_blocks, geometry.block_bytes) == (77, 20, 4 * MIB)


def test_size_context_is_clamped_to_what_the_pool_holds_beside_pins() -> None:
    assert sized(num_blocks=40).max_model_len == 640
    assert sized(num_blocks=40, pin_budget_blocks=10).max_model_len == 480
    assert sized(num_blocks=640).max_model_len == 1024


@pytest.mark.parametrize("num_blocks", [1, 63, 64, 65, 100, 640])
def test_size_default_pins_never_shorten_the_longest_sequence(num_blocks: int) -> None:
    sizing = sized(num_blocks=num_blocks)
    room = num_blocks - sizing.geometry.pin_budget_blocks
    assert room * 16 >= sizing.max_model_len == min(1024, num_blocks * 16)


@pytest.mark.parametrize(
    ("flags", "arithmetic"),
    [
        ({"num_blocks": 1001}, "1001 blocks x 1048576 bytes = 1001 MiB, sim has 1000 MiB"),
        ({"kv_cache_bytes": 1000}, "kv_cache_bytes 1000 is less than one block of 1048576 bytes"),
        (
            {"gpu_memory_utilization": 0.0001},
            "leaves 0.1 MiB on sim, one block takes 16 tokens x 65536 bytes",
        ),
        ({"max_model_len": 2000}, "max_model_len 2000 is beyond the model's context of 1024"),
        (
            {"max_model_len": 1000, "num_blocks": 10},
            "max_model_len 1000 needs 63 blocks of 16 tokens, the pool has 10",
        ),
        ({"pin_budget_blocks": 10, "num_blocks": 10}, "pin_budget_blocks 10 of 10 blocks leaves 0"),
        (
            {"pin_budget_blocks": 10, "num_blocks": 70, "max_model_len": 1000},
            "pin_budget_blocks 10 of 70 blocks leaves 60, the longest sequence needs 63",
        ),
    ],
)
def test_size_that_is_impossible_is_refused_with_the_arithmetic(
    flags: dict[str, Any], arithmetic: str
) -> None:
    with pytest.raises(InvalidSettings) as caught:
        sized(**flags)
    assert arithmetic in str(caught.value)
