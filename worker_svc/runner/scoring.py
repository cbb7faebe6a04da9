"""Log probabilities of tokens under a model, and hidden states as vectors, for runners that use PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Final

import torch
from octavo.protocol.steps import Pooling, TokenLogprobs
from torch import Tensor

_MOST_LOGITS: Final = 1 << 25
"""Logits that are made at once: 128 MiB of them, and as much of log probabilities."""


def report(logprobs: Tensor, token_ids: Tensor, wanted: Seq[int]) -> list[TokenLogprobs]:
    """Return, for each row of `logprobs` [R, vocab], what is said of its token and of so many best ones."""
    own = logprobs.gather(1, token_ids.unsqueeze(1))
    ranks = (logprobs > own).sum(dim=-1).add_(1).tolist()
    best, best_ids = logprobs.topk(max(wanted), dim=-1)
    return [
        TokenLogprobs(token_id, logprob, rank, tuple(ids[:count]), tuple(values[:count]))
        for token_id, logprob, rank, ids, values, count in zip(
            token_ids.tolist(),
            own.flatten().tolist(),
            ranks,
            best_ids.tolist(),
            best.tolist(),
            wanted,
            strict=True,
        )
    ]


def score(
    hidden: Tensor,
    token_ids: Seq[int],
    num_top: int,
    logits_of: Callable[[Tensor], Tensor | None],
    vocab_size: int,
) -> list[TokenLogprobs]:
    """Return the log probability of each token after the hidden state [T, hidden] in its place.

    `logits_of` returns None in ranks that have no logits; then nothing is returned.
    """
    scored: list[TokenLogprobs] = []
    step = max(1, _MOST_LOGITS // vocab_size)
    for start in range(0, len(token_ids), step):
        logits = logits_of(hidden[start : start + step])
        if logits is not None:
            targets = torch.tensor(token_ids[start : start + step], device=logits.device)
            logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
            scored += report(logprobs, targets, [num_top] * len(targets))
    return scored


def pool(hidden: Tensor, pooling: Pooling) -> list[float]:
    """Return what hidden states [T, hidden] add to the vector of their sequence."""
    pooled = hidden.sum(dim=0, dtype=torch.float32) if pooling is Pooling.MEAN else hidden[-1].float()
    values: list[float] = pooled.tolist()
    return values
