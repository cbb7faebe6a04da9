"""What admission prepares, so that the core need not compute it between steps."""

from __future__ import annotations

from typing import Any

import pytest
from octavo.protocol.keys import chain

from scheduler_svc.admission.admission import _resumed_keys
from scheduler_svc.requests.messages import ResumedChoice
from scheduler_svc.text.tokenization import KeySpec
from tests.unit.scheduler.core.desk import BLOCK, ROOT, Desk, worker

KEYS = KeySpec(ROOT, BLOCK)


def admitted_keys(prompt: list[int], **fields: Any) -> list[tuple[bytes, ...]]:
    """Return the keys with which the choices of a request come to a worker."""
    desk = Desk(worker(num_blocks=256, max_num_batched_tokens=512), window=1)
    desk.submit(prompt, max_tokens=200, n=4, **fields)
    found: list[tuple[bytes, ...]] = []
    while len(found) < 4:
        found += [admit.keys for plan in desk.plans["w0"] for admit in plan.admit]
        desk.answer()
    return found


@pytest.mark.parametrize("prompt_tokens", [5, 16, 40])
async def test_keys_of_resumed_choices_are_those_that_the_core_would_compute(prompt_tokens: int) -> None:
    prompt = list(range(prompt_tokens))
    resumed = {0: tuple(range(100)), 2: (7,), 3: tuple(range(50, 59))}
    choices = {choice: ResumedChoice(token_ids, 0) for choice, token_ids in resumed.items()}
    prepared = await _resumed_keys(choices, prompt, tuple(chain(ROOT, prompt, BLOCK)), KEYS)

    plain = admitted_keys(prompt, resumed=resumed)
    assert admitted_keys(prompt, resumed=resumed, resumed_keys=prepared) == plain
    lengths = sorted(prompt_tokens + len(resumed.get(choice, ())) for choice in range(4))
    assert sorted(map(len, plain)) == [length // BLOCK for length in lengths]
