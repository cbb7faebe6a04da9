"""The numbers of a running system beside transformers in float32: how far apart they are, and at which ties.

`docs/numerics.md` states the promises.
"""

# ruff: noqa: PLC0415 - torch takes seconds to import, and measures are listed without it

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any, Final

from octavo.aio import AsyncClient
from octavo.protocol.steps import TokenLogprobs
from octavo.stack import Stack

from octavo_lab.datasets.corpus import corpus_text
from octavo_lab.scorecard import system

TOP: Final = 20
"""Alternatives asked for at each position: the most that there are."""
CHUNK_TOKENS: Final = 48
"""Tokens of a step where prompts are computed in chunks."""
LONGEST: Final = 600
_WHOLE_TOKENS: Final = 1024
_ROOM: Final = ("--max-num-seqs", "16", "--max-model-len", "1024", "--kv-cache-bytes", str(2**29))
_LEAST_PROBABILITY: Final = 1e-9
"""What is left beside the alternatives cannot be told more finely in float32."""


@dataclass(frozen=True, slots=True)
class Promise:
    """What holds of answers computed in a number type, beside transformers in float32."""

    mean_kl: float
    """Nats; the mean over the positions of many answers."""
    near_tie: float
    """Nats between the two best tokens of the reference, within which the other one may be chosen."""


PROMISES: Final[Mapping[str, Promise]] = {
    "float32": Promise(mean_kl=1e-6, near_tie=1e-3),
    "float16": Promise(mean_kl=1e-5, near_tie=0.02),
    "bfloat16": Promise(mean_kl=0.005, near_tie=0.5),
}
"""By the type of the weights."""


def types_here(runner: str) -> list[str]:
    """Return the types of a runner that its `auto` could choose on the CPU of this machine, and float32."""
    import torch

    from worker_svc.runner.torch.compute import has_float16_linear

    found = ["float32"]
    if runner == "torch" and has_float16_linear():
        found.append("float16")
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():  # noqa: SLF001 - there is no public question
        found.append("bfloat16")
    return found


def worker_args(runner: str, dtype: str, *, chunked: bool = False) -> tuple[str, ...]:
    """Return the arguments of a worker that computes prompts whole, or in chunks; vLLM compiles nothing."""
    device = ("--device", "cpu") if runner == "torch" else ("--enforce-eager",)
    tokens = CHUNK_TOKENS if chunked else _WHOLE_TOKENS
    return ("--runner", runner, *device, "--dtype", dtype, *_ROOM, "--max-num-batched-tokens", str(tokens))


@dataclass(frozen=True, slots=True)
class GreedyAnswer:
    """A greedy answer, with the best alternatives at each of its positions."""

    prompt: tuple[int, ...]
    positions: tuple[TokenLogprobs, ...]
    cached_tokens: int

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and output."""
        return (*self.prompt, *(position.token_id for position in self.positions))


@dataclass(frozen=True, slots=True)
class Questions:
    """What a stack is asked: so many prompts of 1 to LONGEST tokens, no two with the same beginning."""

    count: int
    output_tokens: int

    async def answers(self, stack: Stack) -> dict[str, list[GreedyAnswer]]:
        """Ask a stack that computes prompts whole: one by one, again for prefix hits, and all together.

        Raises:
            RuntimeError: the second time has found no prefix in the cache.
        """
        async with AsyncClient(stack.endpoint) as client:
            prompts = await self._prompts(client)
            found = {
                "cold": [await self._ask(client, prompt, "alone") for prompt in prompts],
                "prefix hits": [await self._ask(client, prompt, "alone") for prompt in prompts],
                "together": await asyncio.gather(
                    *(self._ask(client, prompt, "together") for prompt in prompts)
                ),
            }
        if not any(answer.cached_tokens for answer in found["prefix hits"]):
            raise RuntimeError("nothing was found in the cache")
        return found

    async def chunked_answers(self, stack: Stack) -> dict[str, list[GreedyAnswer]]:
        """Ask a stack that computes prompts in chunks."""
        async with AsyncClient(stack.endpoint) as client:
            prompts = await self._prompts(client)
            return {"chunked": [await self._ask(client, prompt, "alone") for prompt in prompts]}

    async def _prompts(self, client: AsyncClient) -> list[list[int]]:
        text = corpus_text()[: 5 * LONGEST * self.count]
        tokens = (await client.tokenize(text)).token_ids
        lengths = [round(LONGEST ** (number / (self.count - 1))) for number in range(self.count)]
        return [
            [*tokens[number * LONGEST : number * LONGEST + length]] for number, length in enumerate(lengths)
        ]

    async def _ask(self, client: AsyncClient, prompt: list[int], salt: str) -> GreedyAnswer:
        result = await client.generate(
            prompt,
            temperature=0.0,
            max_tokens=self.output_tokens,
            ignore_eos=True,
            logprobs=TOP,
            cache_salt=salt,
            skip_text=True,
        )
        return GreedyAnswer(tuple(prompt), result.choices[0].logprobs, result.usage.cached_tokens)


async def answers_of(questions: Questions, runner: str, dtype: str) -> dict[str, list[GreedyAnswer]]:
    """Ask a stack that computes prompts whole and then one that computes them in chunks."""
    found: dict[str, list[GreedyAnswer]] = {}
    for chunked in (False, True):
        settings = {
            "worker_args": worker_args(runner, dtype, chunked=chunked),
            "scheduler_args": system.UNSHED,
        }
        with system.running(**settings) as stack:
            found |= await (questions.chunked_answers if chunked else questions.answers)(stack)
    return found


def divergence(reference: Sequence[float], other: Sequence[float]) -> float:
    """Return the KL divergence of `other` from `reference`, in nats.

    Both are log probabilities of the same tokens; all other tokens together are one more outcome.
    """
    pairs = zip(_with_rest(reference), _with_rest(other), strict=True)
    return sum(math.exp(one) * (one - another) for one, another in pairs)


def _with_rest(logprobs: Sequence[float]) -> list[float]:
    rest = max(1 - math.fsum(map(math.exp, logprobs)), _LEAST_PROBABILITY)
    return [*logprobs, math.log(rest)]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Answers beside the reference, which goes on from the tokens that each answer has chosen so far."""

    positions: int
    mean_kl: float
    max_kl: float
    changed: int
    """Positions where another token than the reference's best was chosen."""
    widest_tie: float
    """Nats by which the reference prefers its own, the most of all those."""

    def share_of(self, promise: Promise) -> float:
        """Return how much of what is promised is used up: 1 is all of it."""
        return max(self.mean_kl / promise.mean_kl, self.widest_tie / promise.near_tie)


class ReferenceJudge:
    """Compares answers with a model of transformers in float32."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._known: dict[tuple[int, ...], Any] = {}

    def verdict(self, answers: Sequence[GreedyAnswer]) -> Verdict:
        """Return how far answers are from what the model says."""
        divergences, ties = [], []
        for answer in answers:
            for position, row in zip(answer.positions, self._logprobs(answer), strict=True):
                reference = row[[*position.top_token_ids]].tolist()
                divergences.append(divergence(reference, position.top_logprobs))
                if int(row.argmax()) != position.token_id:
                    ties.append(float(row.max() - row[position.token_id]))
        return Verdict(
            positions=len(divergences),
            mean_kl=statistics.fmean(divergences),
            max_kl=max(divergences),
            changed=len(ties),
            widest_tie=max(ties, default=0.0),
        )

    def _logprobs(self, answer: GreedyAnswer) -> Any:
        """Return the log probability of every token at each position of an answer, in float64.

        Most answers come again and again: from other types, from the cache.
        """
        import torch

        context = answer.tokens[:-1]
        if context not in self._known:
            with torch.inference_mode():
                logits = self._model(torch.tensor([context])).logits[0, len(answer.prompt) - 1 :]
            self._known[context] = logits.double().log_softmax(dim=-1)
        return self._known[context]


def compared(cold: Sequence[GreedyAnswer], other: Sequence[GreedyAnswer]) -> dict[str, float]:
    """Compare answers to the same prompts with each other, up to where their tokens part."""
    pairs = [pair for one, two in zip(cold, other, strict=True) for pair in _in_step(one, two)]
    return {
        "mean_kl_to_cold": statistics.fmean(_between(*pair) for pair in pairs),
        "bit_equal": sum(one.top_logprobs == two.top_logprobs for one, two in pairs) / len(pairs),
        "answers_that_part": sum(one.tokens != two.tokens for one, two in zip(cold, other, strict=True)),
    }


def _in_step(one: GreedyAnswer, two: GreedyAnswer) -> Iterator[tuple[TokenLogprobs, TokenLogprobs]]:
    """Yield the positions of two answers that follow the same tokens."""
    pairs = list(zip(one.positions, two.positions, strict=True))
    yield pairs[0]
    same = takewhile(lambda step: step[0][0].token_id == step[0][1].token_id, pairwise(pairs))
    yield from (after for _, after in same)


def _between(one: TokenLogprobs, two: TokenLogprobs) -> float:
    """Return the divergence over the alternatives that both have."""
    second = dict(zip(two.top_token_ids, two.top_logprobs, strict=True))
    shared = [
        (logprob, second[token])
        for token, logprob in zip(one.top_token_ids, one.top_logprobs, strict=True)
        if token in second
    ]
    return divergence([first for first, _ in shared], [other for _, other in shared])
