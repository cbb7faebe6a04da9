"""Sampling against straightforward numpy references."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from octavo.sampling import MAX_LOGIT_BIASES, SamplingParams

from worker_svc.errors import StepFailed
from worker_svc.runner.base import SequenceData
from worker_svc.runner.torch.sampling import Sampler

VOCAB = 60
EOS = 7
DRAWS = 6000


def make_sampler(vocab: int = VOCAB) -> Sampler:
    return Sampler([EOS], vocab, torch.device("cpu"))


def sequence(handle: int = 1, tokens: int = 5, *, choice: int = 0, **sampling: Any) -> SequenceData:
    return SequenceData(handle, [1] * tokens, tokens, SamplingParams(**sampling), choice)


def peaked_logits(vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 2


def reference_probabilities(logits: np.ndarray, **sampling: Any) -> np.ndarray:
    """Temperature, then top_k, then top_p of what is left, then min_p."""
    scaled = logits.astype(np.float64) / sampling.get("temperature", 1.0)
    order = np.argsort(-scaled, kind="stable")
    kept = order[: sampling.get("top_k") or len(order)]
    weights = np.exp(scaled[kept] - scaled[kept].max())
    weights /= weights.sum()
    before = np.cumsum(weights) - weights
    nucleus = (before < sampling.get("top_p", 1.0)) & (weights >= sampling.get("min_p", 0.0) * weights[0])
    probabilities = np.zeros(len(logits))
    probabilities[kept[nucleus]] = weights[nucleus] / weights[nucleus].sum()
    return probabilities


def draw(logits: torch.Tensor, count: int = DRAWS, **sampling: Any) -> np.ndarray:
    """Return how often each token was drawn by `count` choices of one request."""
    sampler = make_sampler(len(logits))
    sequences = [sequence(n, choice=n, **sampling) for n in range(count)]
    sampled = sampler.sample(logits.expand(count, -1).clone(), sequences)
    return np.bincount(list(sampled.token_ids.values()), minlength=len(logits))


def assert_fits(counts: np.ndarray, probabilities: np.ndarray, considered: np.ndarray) -> None:
    """Chi-square test, five standard deviations wide."""
    expected = probabilities[considered] * DRAWS
    chi_square = ((counts[considered] - expected) ** 2 / expected).sum()
    assert chi_square < expected.size + 5 * np.sqrt(2 * expected.size)


@pytest.mark.parametrize("penalty", [1e-44, 1e-38, 3e38])
@pytest.mark.parametrize("temperature", [0.0, 1.1e-5, 1.0])
def test_repetition_penalty_beyond_what_logits_can_hold_still_yields_a_token(
    penalty: float, temperature: float
) -> None:
    logits = torch.tensor([[3.0, 9.0, -8.0, 0.0]])
    one = SequenceData(
        1, [0, 1, 2, 3], 4, SamplingParams(repetition_penalty=penalty, temperature=temperature, logprobs=1)
    )

    sampled = make_sampler(4).sample(logits, [one])

    assert sampled.token_ids[1] in ((0, 1) if penalty < 1 else (0, 1, 3))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_named_whatever_the_penalty(value: float) -> None:
    logits = torch.tensor([[3.0, value, -8.0, 0.0]])
    one = SequenceData(1, [0, 1, 2, 3], 4, SamplingParams(repetition_penalty=0.5))

    with pytest.raises(StepFailed):
        make_sampler(4).sample(logits, [one])


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.5},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 20, "top_p": 0.7, "temperature": 1.5},
        {"top_k": 12, "min_p": 0.05, "top_p": 0.95},
        {"top_p": 0.999, "temperature": 3.0},
    ],
    ids=str,
)
def test_draws_follow_the_reference_distribution(sampling: dict[str, Any]) -> None:
    logits = peaked_logits()
    expected = reference_probabilities(logits.numpy(), **sampling)

    counts = draw(logits, seed=11, **{"temperature": 1.0, **sampling})

    assert not counts[expected == 0].any()
    assert_fits(counts, expected, expected * DRAWS >= 5)


def test_nucleus_that_reaches_beyond_the_first_guess_is_exact() -> None:
    logits = peaked_logits(vocab=2000) * 0.2
    expected = reference_probabilities(logits.numpy(), top_p=0.9)
    assert (expected > 0).sum() > 1000

    counts = draw(logits, seed=3, temperature=1.0, top_p=0.9)

    assert not counts[expected == 0].any()
    assert_fits(counts, expected, expected > 0)


def test_streams_of_seeds_choices_and_positions_are_unrelated() -> None:
    logits = torch.zeros(VOCAB)
    by_seed = [sequence(n, seed=n, temperature=1.0) for n in range(1, 2001)]
    by_choice = [sequence(n, seed=5, choice=n, temperature=1.0) for n in range(1, 2001)]
    by_position = [sequence(n, tokens=n, seed=5, temperature=1.0) for n in range(1, 2001)]
    sampler = make_sampler()

    streams = []
    for sequences in (by_seed, by_choice, by_position):
        sampled = sampler.sample(logits.expand(2000, -1).clone(), sequences)
        streams.append(list(sampled.token_ids.values()))

    for stream in streams:
        expected = 2000 / VOCAB
        assert sum((count - expected) ** 2 / expected for count in Counter(stream).values()) < 120
        repeats = sum(one == two for one, two in itertools.pairwise(stream))
        assert repeats == pytest.approx(expected, abs=25)
    for one, two in ((0, 1), (1, 2), (0, 2)):
        agreements = sum(a == b for a, b in zip(streams[one], streams[two], strict=True))
        assert agreements == pytest.approx(2000 / VOCAB, abs=25)


def test_outcome_does_not_depend_on_the_rest_of_the_batch() -> None:
    logits = torch.stack([peaked_logits(seed=seed) for seed in range(6)])
    settings: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 9},
        {"temperature": 1.3, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0.0},
        {"temperature": 1.0, "repetition_penalty": 1.5, "presence_penalty": 0.5},
        {"temperature": 1.0, "top_k": 50, "logit_bias": {3: 4.0}},
    ]

    def sequences() -> list[SequenceData]:
        return [sequence(n, tokens=n + 2, seed=n, **setting) for n, setting in enumerate(settings)]

    together = make_sampler().sample(logits.clone(), sequences()).token_ids
    backwards = make_sampler().sample(logits.flip(0).clone(), sequences()[::-1]).token_ids
    alone = {}
    for n, one in enumerate(sequences()):
        alone.update(make_sampler().sample(logits[n : n + 1].clone(), [one]).token_ids)

    assert together == backwards == alone


def test_filter_that_keeps_everything_changes_no_draw() -> None:
    logits = peaked_logits()

    assert (draw(logits, 500, seed=1, temperature=1.0) == draw(logits, 500, seed=1, top_k=VOCAB)).all()
    wide = draw(logits, 500, seed=1, temperature=1.0, top_k=VOCAB - 1)
    assert np.abs(wide - draw(logits, 500, seed=1, temperature=1.0)).sum() <= 4


def penalized(logits: np.ndarray, tokens: list[int], prompt_len: int, params: SamplingParams) -> np.ndarray:
    out = logits.astype(np.float32).copy()
    for token_id in set(tokens):
        factor = params.repetition_penalty or 1.0
        out[token_id] = out[token_id] / factor if out[token_id] > 0 else out[token_id] * factor
    for token_id, count in Counter(tokens[prompt_len:]).items():
        out[token_id] -= (params.frequency_penalty or 0) * count + (params.presence_penalty or 0)
    for token_id, bias in params.logit_bias.items():
        out[token_id] += bias
    return out


def test_penalties_follow_the_sequence_step_by_step() -> None:
    settings = [
        SamplingParams(temperature=0.0, repetition_penalty=1.7),
        SamplingParams(temperature=0.0, presence_penalty=1.2, frequency_penalty=0.6),
        SamplingParams(temperature=0.0, frequency_penalty=-0.4, logit_bias={4: 2.5, 9: -100.0}),
        SamplingParams(temperature=0.0, repetition_penalty=0.8, presence_penalty=-0.5, logit_bias={1: 1.0}),
        SamplingParams(temperature=0.0),
    ]
    sequences = [SequenceData(n, [1, 4, 4, 30 + n], 3, params) for n, params in enumerate(settings)]
    sampler = make_sampler()

    for step in range(40):
        logits = torch.stack([peaked_logits(seed=100 * step + n) for n in range(len(settings))])
        expected = [
            penalized(row.numpy(), one.token_ids, one.prompt_len, one.sampling)
            for row, one in zip(logits, sequences, strict=True)
        ]
        sampled = sampler.sample(logits, sequences)
        for one, row, edited in zip(sequences, expected, logits, strict=True):
            assert edited.numpy() == pytest.approx(row, abs=1e-5)
            assert sampled.token_ids[one.handle] == row.argmax()
            one.token_ids.append(sampled.token_ids[one.handle])


@pytest.mark.parametrize("count", [16, 17, 300, MAX_LOGIT_BIASES])
def test_every_bias_of_a_request_is_added(count: int) -> None:
    vocab = 2 * MAX_LOGIT_BIASES
    params = SamplingParams(temperature=0.0, logit_bias={2 * n: n / 50 - 9 for n in range(count)})
    logits = peaked_logits(vocab)[None].clone()

    make_sampler(vocab).sample(logits, [SequenceData(1, [1, 2], 2, params)])

    assert logits[0].numpy() == pytest.approx(
        penalized(peaked_logits(vocab).numpy(), [1, 2], 2, params), abs=1e-4
    )


def test_sequence_that_comes_back_is_penalized_as_if_it_had_never_left() -> None:
    params = SamplingParams(temperature=0.0, frequency_penalty=0.7, repetition_penalty=1.3)
    tokens = [1, 2, 2, 5, 5, 5]
    resumed = SequenceData(9, list(tokens), 3, params)
    logits = peaked_logits()[None].clone()

    make_sampler().sample(logits, [resumed])

    assert logits[0].numpy() == pytest.approx(penalized(peaked_logits().numpy(), tokens, 3, params), abs=1e-5)


def test_handle_of_another_session_starts_with_a_clean_state() -> None:
    sampler = make_sampler()
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = 1.0
    penalizing = SamplingParams(temperature=0.0, presence_penalty=2.0)
    assert sampler.sample(logits.clone(), [SequenceData(1, [3, 3], 1, penalizing)]).token_ids == {1: 0}

    assert sampler.sample(
        logits.clone(), [SequenceData(1, [3, 3], 1, SamplingParams(temperature=0.0))]
    ).token_ids == {1: 3}


@pytest.mark.parametrize(
    ("ignore_eos", "num_output", "banned"),
    [(False, 0, {EOS, 20}), (False, 1, {EOS, 20}), (False, 2, set()), (True, 0, {20})],
)
def test_stops_are_not_sampled_before_min_tokens(ignore_eos: bool, num_output: int, banned: set[int]) -> None:
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(20,), ignore_eos=ignore_eos)
    one = SequenceData(1, [1, 2, 3] + [4] * num_output, 3, params)
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS], logits[0, 20], logits[0, 33] = 3.0, 2.0, 1.0

    chosen = make_sampler().sample(logits, [one]).token_ids[1]

    assert chosen == next(token for token in (EOS, 20, 33) if token not in banned)


def test_logprobs_are_the_models_own() -> None:
    logits = peaked_logits()
    expected = logits.log_softmax(-1)
    order = expected.argsort(descending=True)
    worst = int(order[-1])
    forced = sequence(
        1, temperature=0.7, top_k=3, repetition_penalty=2.0, logprobs=4, logit_bias={worst: 100.0}
    )
    silent = sequence(2, temperature=0.0)
    only_own = sequence(3, temperature=0.0, logprobs=0)

    sampled = make_sampler().sample(logits.expand(3, -1).clone(), [forced, silent, only_own])

    report = sampled.logprobs[1]
    assert (report.token_id, report.rank) == (worst, VOCAB)
    assert report.logprob == pytest.approx(expected[worst].item(), abs=1e-5)
    assert report.top_token_ids == tuple(order[:4].tolist())
    assert report.top_logprobs == pytest.approx(expected[order[:4]].tolist(), abs=1e-5)
    assert 2 not in sampled.logprobs
    assert (sampled.logprobs[3].rank, sampled.logprobs[3].top_token_ids) == (1, ())


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_name_their_sequences(poison: float) -> None:
    logits = torch.zeros(4, VOCAB)
    logits[1, 5] = poison
    logits[3, 0] = poison
    sequences = [sequence(handle, temperature=handle / 10) for handle in (10, 11, 12, 13)]

    with pytest.raises(StepFailed) as failure:
        make_sampler().sample(logits, sequences)

    assert failure.value.handles == (11, 13)


def test_biases_and_stops_beyond_the_vocabulary_do_nothing() -> None:
    one = sequence(1, temperature=0.0, min_tokens=9, stop_token_ids=(10**6,), logit_bias={10**6: 5.0})

    assert make_sampler().sample(peaked_logits()[None].clone(), [one]).token_ids == {
        1: int(peaked_logits().argmax())
    }


@pytest.mark.parametrize("masked", [{1}, {1, 2, 3}])
def test_token_that_a_mask_leaves_out_is_never_chosen_whatever_else_is_asked_for(masked: set[int]) -> None:
    words = np.zeros(-(-VOCAB // 32), dtype=np.int32)
    words[1] = 1 << (40 - 32) | 1 << (59 - 32)
    asked: list[dict[str, Any]] = [
        {"temperature": 0.0, "logit_bias": {3: 100.0}},
        {"temperature": 1.0},
        {"top_k": 4},
    ]
    sequences = [sequence(n + 1, **sampling) for n, sampling in enumerate(asked)]
    logits = torch.zeros(3, VOCAB)
    logits[:, 3] = 50.0
    sampled = make_sampler().sample(logits, sequences, dict.fromkeys(masked, words))
    assert {handle: token_id in (40, 59) for handle, token_id in sampled.token_ids.items()} == {
        handle: handle in masked for handle in (1, 2, 3)
    }
