"""What admission prepares, so that the core need not compute it between steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from octavo.protocol.keys import chain
from octavo.sampling import SamplingParams

from scheduler_svc.admission import _resumed_keys
from scheduler_svc.calls import ResumedChoice
from scheduler_svc.core import NewRequest
from scheduler_svc.core.request import Request
from scheduler_svc.tokenization import KeySpec

KEYS = KeySpec(b"root", 16)


@pytest.mark.parametrize("prompt_tokens", [5, 16, 40])
async def test_keys_of_resumed_choices_are_those_that_the_core_would_compute(prompt_tokens: int) -> None:
    prompt = list(range(prompt_tokens))
    resumed = {0: tuple(range(100)), 2: (7,), 3: tuple(range(50, 59))}
    spec = NewRequest(
        request_id="r",
        model="m",
        prompt_token_ids=prompt,
        sampling=SamplingParams(n=4, seed=1, max_tokens=200),
        prompt_keys=tuple(chain(KEYS.root, prompt, KEYS.block_size)),
        root_key=KEYS.root,
        resumed=resumed,
    )
    choices = {choice: ResumedChoice(token_ids, 0) for choice, token_ids in resumed.items()}
    prepared = await _resumed_keys(choices, prompt, spec.prompt_keys, KEYS)
    plain = Request.from_spec(spec, 0.0, KEYS.block_size)
    ahead = Request.from_spec(replace(spec, resumed_keys=prepared), 0.0, KEYS.block_size)
    assert [sequence.keys for sequence in ahead.sequences] == [sequence.keys for sequence in plain.sequences]
    assert {choice: len(keys) for choice, keys in prepared.items()} == {
        choice: (prompt_tokens + len(token_ids)) // KEYS.block_size for choice, token_ids in resumed.items()
    }
