"""The host tier of a vLLM rank, on CPU tensors, and what the runner makes of its times."""

from __future__ import annotations

from collections import deque

import pytest
import torch

from worker_svc.runner.vllm.runner import Ticket
from worker_svc.runner.vllm.tier import HostBlocks, Tier


@pytest.mark.parametrize("num_host_blocks", [1, 7, 100])
def test_copies_bring_back_every_block_in_every_layer(num_host_blocks: int) -> None:
    layers = [torch.randn(24, 2, 3, 5) for _ in range(3)]
    tier = Tier(layers, 12, num_host_blocks)
    before = [layer.clone() for layer in layers]
    pairs = [(device, (5 * device) % num_host_blocks) for device in range(min(12, num_host_blocks))]

    tier.copy_out(pairs)
    for layer in layers:
        layer.zero_()
    tier.copy_in(pairs, 1)

    copied = 2 * len(pairs)
    assert all(torch.equal(new[:copied], old[:copied]) for new, old in zip(layers, before, strict=True))
    assert tier.took_s(1) is not None
    assert tier.took_s(1) is None, "it is told once"


@pytest.mark.parametrize("num_blocks", [1, 15, 16, 100, 1000, 4097])
@pytest.mark.parametrize("block_bytes", [1024, 1280, 2044])
def test_host_blocks_in_pieces_rounded_up_stay_near_what_was_asked_for(
    num_blocks: int, block_bytes: int
) -> None:
    blocks = HostBlocks(num_blocks, torch.empty(block_bytes, dtype=torch.uint8))

    rounded = sum(1 << (piece.nbytes - 1).bit_length() for piece in blocks.pieces)
    asked = num_blocks * block_bytes
    assert sum(len(piece) for piece in blocks.pieces) == num_blocks
    assert len(blocks.pieces) <= 40
    # With few blocks a piece cannot be near a power of two.
    assert rounded <= asked * (1.15 if num_blocks >= 1000 else 2)
    assert blocks[num_blocks - 1].shape == (block_bytes,)


def test_host_tier_that_does_not_fit_is_refused_with_the_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    layers = [torch.zeros(4, 8, dtype=torch.float32) for _ in range(2)]
    monkeypatch.setattr(torch, "empty", fail)

    with pytest.raises(MemoryError, match="10 host blocks x 64 bytes = 640 bytes"):
        Tier(layers, 4, 10)


class Ranks:
    """Ranks that tell, when asked, what was prepared."""

    def __init__(self, *answers: list[float | None]) -> None:
        self.answers = deque(answers)

    def copy_took_s(self, number: int) -> list[float | None]:
        assert number == 3
        return self.answers.popleft()


def test_ticket_is_done_with_the_last_rank_and_took_what_the_slowest_one_took() -> None:
    ticket = Ticket(Ranks([None, None], [0.25, None], [None, 0.125]), 3)

    assert [ticket.done() for _ in range(4)] == [False, False, True, True]
    assert ticket.elapsed_s() == 0.25


def test_ticket_does_not_count_the_wait_for_somebody_to_ask() -> None:
    ticket = Ticket(Ranks([0.001]), 3)

    assert ticket.done()
    assert ticket.elapsed_s() == 0.001
