"""Distributions beside a reference: divergences, near ties, answers that part."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from octavo.protocol.steps import TokenLogprobs
from octavo_lab.scorecard.numerics import GreedyAnswer, Promise, ReferenceJudge, compared, divergence


class Always:
    """A model that gives every position the same distribution."""

    def __init__(self, *probabilities: float) -> None:
        self._row = torch.tensor(probabilities).log()

    def __call__(self, tokens: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self._row.expand(1, tokens.shape[1], -1))


def position(token_id: int, **probabilities: float) -> TokenLogprobs:
    """`position(0, t0=0.6)`: token 0 was chosen, and had 60%."""
    ids = tuple(int(name[1:]) for name in probabilities)
    return TokenLogprobs(token_id, 0.0, 1, ids, tuple(map(math.log, probabilities.values())))


def answer(*positions: TokenLogprobs) -> GreedyAnswer:
    return GreedyAnswer((1, 2), positions, 0)


def test_divergence_of_equals_is_zero_and_the_rest_counts_as_one_outcome() -> None:
    half, quarter = math.log(0.5), math.log(0.25)

    assert divergence([half, quarter], [half, quarter]) == pytest.approx(0.0, abs=1e-12)
    assert divergence([half], [quarter]) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75))


def test_judge_tells_how_much_the_reference_prefers_its_own_token() -> None:
    judge = ReferenceJudge(Always(0.5, 0.4, 0.1))

    verdict = judge.verdict([answer(position(0, t0=0.5, t1=0.4), position(1, t1=0.5, t0=0.4))])

    assert (verdict.positions, verdict.changed) == (2, 1)
    assert verdict.widest_tie == pytest.approx(math.log(0.5 / 0.4))
    assert verdict.max_kl == pytest.approx(0.4 * math.log(0.4 / 0.5) + 0.5 * math.log(0.5 / 0.4), rel=1e-5)
    assert verdict.mean_kl == pytest.approx(verdict.max_kl / 2, rel=1e-4)


def test_share_of_a_promise_is_that_of_its_worse_half() -> None:
    verdict = ReferenceJudge(Always(0.5, 0.4, 0.1)).verdict([answer(position(1, t0=0.5, t1=0.4))])

    assert verdict.share_of(Promise(mean_kl=1.0, near_tie=0.1)) == pytest.approx(math.log(1.25) / 0.1)


def test_answers_are_compared_until_their_tokens_part_and_no_further() -> None:
    same, other, wild = position(0, t0=0.6, t1=0.3), position(1, t0=0.3, t1=0.6), position(3, t3=0.9)

    figures = compared([answer(same, same, same)], [answer(same, other, wild)])

    assert figures["answers_that_part"] == 1
    assert figures["bit_equal"] == 0.5
    assert figures["mean_kl_to_cold"] == pytest.approx(0.3 * math.log(2) / 2)
