"""Octavo's sampling parameters in vLLM's terms, and the randomness of one token."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from octavo.sampling import SamplingParams

_MASK: Final = 2**64 - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_GREEDY_BELOW: Final = 1e-5
"""As the torch runner has it."""
EVERYTHING: Final = SamplingParams(
    temperature=1.0,
    top_p=0.9,
    top_k=8,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={0: 1.0},
    min_tokens=1,
    logprobs=1,
    allowed_token_ids=(0, 1),
    bad_words_token_ids=((2,),),
)
"""Takes every way through vLLM's sampler."""
_MAX_TEMPERATURE: Final = 2.0
"""vLLM's own bound."""


def unsupported(sampling: SamplingParams, vocab_size: int) -> str | None:
    """Return what of `sampling` vLLM's runner cannot do here, or None."""
    named = {
        "logit_bias": sampling.logit_bias,
        "allowed_token_ids": sampling.allowed_token_ids,
        "logprob_token_ids": sampling.logprob_token_ids,
    }
    for name, token_ids in named.items():
        if token_ids and (beyond := max(token_ids)) >= vocab_size:
            return f"{name} names token {beyond}, the vocabulary has {vocab_size}"
    if temperature_of(sampling) > _MAX_TEMPERATURE:
        return f"temperature must be at most {_MAX_TEMPERATURE:g} with vLLM, got {sampling.temperature:g}"
    return None


def sampling_kwargs(
    sampling: SamplingParams, eos_token_ids: Collection[int], vocab_size: int
) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's SamplingParams.

    The seed is left out: rows are seeded step by step, see `draw_seed`. So are the conditions that end a
    sequence, which are the engine's; stop tokens serve min_tokens only, and those beyond the vocabulary,
    which cannot be sampled anyway, would be out of bounds there.
    """
    min_tokens = sampling.min_tokens or 0
    if sampling.structured is not None:
        min_tokens = 0  # The guide sees to it.
    stops = {*sampling.stop_token_ids, *eos_token_ids} if min_tokens else ()
    return {
        "temperature": temperature_of(sampling),
        "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        "top_k": sampling.top_k or 0,
        "min_p": sampling.min_p or 0.0,
        "repetition_penalty": 1.0 if sampling.repetition_penalty is None else sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty or 0.0,
        "frequency_penalty": sampling.frequency_penalty or 0.0,
        "logit_bias": dict(sampling.logit_bias) or None,
        "min_tokens": min_tokens,
        "stop_token_ids": [token for token in stops if token < vocab_size],
        "max_tokens": None,
        # Those of named tokens are read off the logits: vLLM would give nothing else to any row of the step.
        "logprobs": 0 if sampling.logprob_token_ids and sampling.logprobs is None else sampling.logprobs,
        "allowed_token_ids": list(sampling.allowed_token_ids) or None,
        "bad_words_token_ids": [list(ids) for ids in sampling.bad_words_token_ids if ids[-1] < vocab_size]
        or None,
        "detokenize": False,
        "skip_clone": True,
    }


def temperature_of(sampling: SamplingParams) -> float:
    """Return the temperature; 0 for one so low that it is greedy for all purposes, which vLLM would raise."""
    temperature = 1.0 if sampling.temperature is None else sampling.temperature
    return temperature if temperature >= _GREEDY_BELOW else 0.0


def draw_seed(seed: int, choice: int, position: int) -> int:
    """Return the 64-bit seed of the token at index `position` of a sequence.

    A function of its arguments alone, so that a sequence that was chunked, preempted or moved draws
    what it would have drawn. SplitMix64's finalizer, once per argument.
    """
    return _mix(_mix(_mix(seed + _GOLDEN) + choice + _GOLDEN) + position + _GOLDEN)


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
