"""What is measured for a GPU, on the CPU: the step, not the figures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.worker.runner.torch.conftest import LoadFamily
from worker_svc.runner.torch import profile
from worker_svc.runner.torch.attention import CPU_PIECES, PagedAttention
from worker_svc.runner.torch.packing import Packed


@pytest.mark.parametrize(
    ("max_num_batched_tokens", "expected"), [(40, (472, 512)), (512, (0, 512)), (9999, (0, 512))]
)
def test_profile_measures_a_chunk_at_the_end_of_the_longest_context(
    load_family: LoadFamily,
    monkeypatch: pytest.MonkeyPatch,
    max_num_batched_tokens: int,
    expected: tuple[int, int],
) -> None:
    model = load_family("llama")[0]._model
    seen: list[tuple[int, int]] = []

    def attention(packed: Packed, *rest: Any) -> PagedAttention:
        seen.extend((placed.row.start, placed.num_context) for placed in packed.rows)
        return PagedAttention(packed, *rest)

    monkeypatch.setattr(profile, "PagedAttention", attention)
    for name in ("reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda _: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 10**9)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (6 * 10**9, 8 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 10**9)

    beside = profile.gpu_bytes_beside_kv(model, max_num_batched_tokens, 4, CPU_PIECES)

    assert seen == [expected]
    assert 10**9 < beside < 2 * 10**9 + 2 * CPU_PIECES.most
