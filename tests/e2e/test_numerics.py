"""The demo model's numbers through the running system, in each type that `auto` chooses on some CPU."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
from octavo import Client
from octavo.cli.demo import ANSWER, QUESTION
from octavo.stack import Stack
from octavo_lab.scorecard import system
from octavo_lab.scorecard.demo_model import transformers_model
from octavo_lab.scorecard.numerics import PROMISES, Questions, ReferenceJudge, types_here, worker_args

pytestmark = [pytest.mark.slow, pytest.mark.model]

QUESTIONS = Questions(count=6, output_tokens=8)
LEAST_MARGIN = 1.0
"""Nats between the token of the demo's answer and the next best one."""
KINDS = [
    *(pytest.param(("torch", dtype), id=f"torch-{dtype}") for dtype in PROMISES),
    *(
        pytest.param(("vllm", dtype), id=f"vllm-{dtype}", marks=pytest.mark.vllm)
        for dtype in ("float32", "bfloat16")
    ),
]


@pytest.fixture(scope="module")
def judge() -> ReferenceJudge:
    return ReferenceJudge(transformers_model())


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> tuple[str, str]:
    runner, dtype = request.param
    if dtype not in types_here(runner):
        pytest.skip(f"the CPU of this machine does not compute in {dtype} natively")
    return runner, dtype


@pytest.fixture(scope="module")
def stack(kind: tuple[str, str]) -> Iterator[Stack]:
    with started(kind, chunked=False) as stack:
        yield stack


def started(kind: tuple[str, str], *, chunked: bool) -> AbstractContextManager[Stack]:
    arguments = worker_args(*kind, chunked=chunked)
    return system.running(worker_args=arguments, scheduler_args=system.UNSHED)


def test_demo_question_is_answered_right_by_a_wide_margin(
    stack: Stack, record_property: Callable[[str, object], None]
) -> None:
    with Client(stack.endpoint) as client:
        answer = client.chat(QUESTION, temperature=0, max_tokens=20, logprobs=2)

    margins = [position.top_logprobs[0] - position.top_logprobs[1] for position in answer.choices[0].logprobs]
    record_property("least_margin_nats", round(min(margins), 3))
    assert answer.text == ANSWER
    assert len(margins) == len(answer.choices[0].token_ids)
    assert min(margins) >= LEAST_MARGIN


def test_answers_cold_cached_together_and_chunked_keep_what_is_promised_of_their_type(
    kind: tuple[str, str], stack: Stack, judge: ReferenceJudge
) -> None:
    found = asyncio.run(QUESTIONS.answers(stack))
    with started(kind, chunked=True) as chunked:
        found |= asyncio.run(QUESTIONS.chunked_answers(chunked))

    verdicts = {way: judge.verdict(answers) for way, answers in found.items()}
    promise = PROMISES[kind[1]]
    assert {way: verdict for way, verdict in verdicts.items() if verdict.share_of(promise) > 1} == {}
    assert {verdict.positions for verdict in verdicts.values()} == {6 * 8}
