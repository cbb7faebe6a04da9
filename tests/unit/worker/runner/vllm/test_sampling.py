from __future__ import annotations

from collections import Counter

import pytest
from octavo.sampling import SamplingParams

from worker_svc.runner.vllm.sampling import draw_seed, sampling_kwargs, unsupported

VOCAB_SIZE = 100
EOS = (2, 3)


def test_sampling_kwargs_carry_every_parameter_of_the_api() -> None:
    given = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.4,
        "logit_bias": {7: 2.0},
        "min_tokens": 4,
        "logprobs": 3,
    }

    kwargs = sampling_kwargs(SamplingParams(**given), EOS, VOCAB_SIZE)  # type: ignore[arg-type]

    assert given.items() <= kwargs.items()


@pytest.mark.parametrize(
    ("temperature", "expected"), [(None, 1.0), (0.0, 0.0), (9e-6, 0.0), (1e-5, 1e-5), (2.0, 2.0)]
)
def test_sampling_kwargs_temperature_that_is_as_good_as_greedy_is_greedy(
    temperature: float | None, expected: float
) -> None:
    sampling = SamplingParams(temperature=temperature)

    assert sampling_kwargs(sampling, EOS, VOCAB_SIZE)["temperature"] == expected


def test_sampling_kwargs_unset_values_change_nothing() -> None:
    kwargs = sampling_kwargs(SamplingParams(), EOS, VOCAB_SIZE)

    assert (kwargs["top_p"], kwargs["top_k"], kwargs["min_p"]) == (1.0, 0, 0.0)
    assert (kwargs["repetition_penalty"], kwargs["presence_penalty"], kwargs["frequency_penalty"]) == (
        1.0,
        0.0,
        0.0,
    )
    assert kwargs["logprobs"] is None
    assert kwargs["logit_bias"] is None


def test_sampling_kwargs_seed_stays_here() -> None:
    assert "seed" not in sampling_kwargs(SamplingParams(seed=1), EOS, VOCAB_SIZE)


def test_sampling_kwargs_min_tokens_holds_back_every_token_that_could_end_it() -> None:
    sampling = SamplingParams(min_tokens=1, stop_token_ids=(9, VOCAB_SIZE + 1))

    assert set(sampling_kwargs(sampling, EOS, VOCAB_SIZE)["stop_token_ids"]) == {2, 3, 9}


def test_unsupported_sampling_is_named() -> None:
    assert "logit_bias" in (unsupported(SamplingParams(logit_bias={VOCAB_SIZE: 1.0}), VOCAB_SIZE) or "")
    assert "at most 2" in (unsupported(SamplingParams(temperature=5.0), VOCAB_SIZE) or "")
    assert unsupported(SamplingParams(temperature=2.0), VOCAB_SIZE) is None


def test_unsupported_is_none_for_what_can_be_done() -> None:
    assert unsupported(SamplingParams(logit_bias={VOCAB_SIZE - 1: 1.0}, seed=2**64 - 1), VOCAB_SIZE) is None


def test_draw_seed_depends_on_each_of_its_arguments() -> None:
    seeds = {
        draw_seed(seed, choice, position)
        for seed in range(10)
        for choice in range(10)
        for position in range(50)
    }

    assert len(seeds) == 5000
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_draw_seed_bits_are_balanced() -> None:
    counts = Counter(
        bit for position in range(2000) for bit in range(64) if draw_seed(1, 0, position) >> bit & 1
    )

    assert min(counts[bit] for bit in range(64)) > 850
    assert max(counts.values()) < 1150
