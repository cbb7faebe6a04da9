"""Holds what the torch runner computes against transformers."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import pytest
import torch
from octavo.protocol.steps import TokenLogprobs
from octavo.sampling import SamplingParams
from transformers import PreTrainedModel

from tests.unit.worker.runner.torch.driver import Driver
from tests.unit.worker.runner.torch.families import VOCAB_SIZE
from worker_svc.runner.torch import TorchRunner

REPORTING = SamplingParams(temperature=0.0, logprobs=3)


def reference_logprobs(model: PreTrainedModel, token_ids: Seq[int]) -> torch.Tensor:
    """Return log probabilities of the token after each position, [len, vocab]."""
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].float().log_softmax(dim=-1)


def prompts(lengths: Seq[int], seed: int = 7) -> list[list[int]]:
    chooser = random.Random(seed)
    return [[chooser.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def assert_follows(reference: torch.Tensor, start: int, reports: Seq[TokenLogprobs]) -> None:
    """Check that each report is the reference's best token with its log probabilities."""
    for position, report in enumerate(reports, start=start - 1):
        best = reference[position].topk(3)
        assert report.logprob == pytest.approx(best.values[0].item(), abs=2e-4)
        assert report.rank == 1
        assert report.top_logprobs == pytest.approx(best.values.tolist(), abs=2e-4)
        assert report.token_id in best.indices[best.values > best.values[0] - 1e-3].tolist()


def assert_mixed_batches_follow(runner: TorchRunner, reference: PreTrainedModel) -> None:
    """Check every token of sequences that are computed in random chunks beside each other."""
    driver = Driver(runner, num_blocks=80, block_size=4, seed=3)
    sequences = [driver.add(prompt, REPORTING) for prompt in prompts([1, 2, 5, 23, 40, 61])]
    reports: dict[int, list[TokenLogprobs]] = {sequence.handle: [] for sequence in sequences}

    while any(sequence.num_output_tokens < 12 for sequence in sequences):
        result = driver.step(driver.random_chunks(most=9))
        for handle, report in result.logprobs.items():
            reports[handle].append(report)

    for sequence in sequences:
        expected = reference_logprobs(reference, sequence.token_ids[:-1])
        assert_follows(expected, sequence.prompt_len, reports[sequence.handle])
