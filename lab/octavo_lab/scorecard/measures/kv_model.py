"""The KV cache under the demo model, in the running system: exactness, what a hit saves, pressure."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence
from typing import Final

import grpc
from octavo.aio import AsyncClient
from octavo.errors import OctavoError
from octavo.stack import Stack
from octavo.types import GenerateResult
from octavo.v1 import operations_pb2, operations_pb2_grpc

from octavo_lab.scorecard import Measured, at_most, entry
from octavo_lab.scorecard.measures.e2e import running, until_idle

BLOCK_SIZE: Final = 16
PREFIX_TOKENS: Final = 1024
QUESTION_TOKENS: Final = 24
FIRST_ID, LAST_ID = 1000, 40000
"""Plain words of the vocabulary: no special token among them."""

CONVERSATIONS: Final = 8
TURNS: Final = 3
SYSTEM_TOKENS: Final = 96
TURN_TOKENS: Final = 48
ANSWER_TOKENS: Final = 48
WORKING_SET_BLOCKS: Final = (
    CONVERSATIONS * (SYSTEM_TOKENS + TURNS * (TURN_TOKENS + ANSWER_TOKENS)) // BLOCK_SIZE
)
MAX_LEN: Final = 512
UNSHED: Final = ("--no-overload-control",)
"""What is measured is the memory: on a slow machine the service would refuse some of the load."""
SMALL_POOL: Final = WORKING_SET_BLOCKS // 2


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(FIRST_ID, LAST_ID) for _ in range(count)]


def _worker_args(num_blocks: int, *more: str, max_len: int = MAX_LEN) -> tuple[str, ...]:
    limits = ("--max-model-len", str(max_len), "--num-blocks", str(num_blocks), "--dtype", "float32")
    return (*limits, *more)


# -- what a hit saves ------------------------------------------------------------------------------


async def _ttft_s(client: AsyncClient, prompt: Sequence[int]) -> tuple[float, int]:
    """Return the time to the first token, and how many prompt tokens came from a cache."""
    result = await client.generate(prompt, max_tokens=1, temperature=0, skip_text=True)
    return result.timings.ttft_s, result.usage.cached_tokens


async def _cold_and_cached(stack: Stack, rounds: int, crowd: int) -> tuple[list[float], list[float]]:
    """Return times to the first token without and with the prefix in a cache.

    Between the two, `crowd` other prompts of the same length are run, to push the prefix off the device.
    """
    rng = random.Random(7)  # a workload, not a secret
    cold, cached = [], []
    async with AsyncClient(stack.endpoint) as client:
        await _ttft_s(client, _ids(rng, PREFIX_TOKENS))
        for _ in range(rounds):
            prefix = _ids(rng, PREFIX_TOKENS)
            cold.append((await _ttft_s(client, prefix + _ids(rng, QUESTION_TOKENS)))[0])
            for _ in range(crowd):
                await _ttft_s(client, _ids(rng, PREFIX_TOKENS + QUESTION_TOKENS))
            seconds, hit_tokens = await _ttft_s(client, prefix + _ids(rng, QUESTION_TOKENS))
            if hit_tokens < PREFIX_TOKENS:
                raise RuntimeError(f"only {hit_tokens} tokens of the prefix were cached")
            cached.append(seconds)
    return cold, cached


def _ratio(cold: list[float], cached: list[float]) -> Measured:
    ratio = statistics.median(cached) / statistics.median(cold)
    return Measured(
        ratio,
        {
            "cold ms": round(statistics.median(cold) * 1e3, 1),
            "cached ms": round(statistics.median(cached) * 1e3, 1),
        },
    )


@entry(
    "kv.prefix_ttft_ratio",
    "time to the first token with a system prompt of 1024 tokens on the device, against without",
    "of cold",
    at_most(0.2),
)
def prefix_ttft_ratio() -> Measured:
    """Run the same prefix twice, some times over."""
    arguments = _worker_args(600, max_len=2048)
    with running(model="demo", worker_args=arguments, scheduler_args=UNSHED) as stack:
        return _ratio(*asyncio.run(_cold_and_cached(stack, rounds=5, crowd=0)))


@entry(
    "kv.host_ttft_ratio",
    "time to the first token with a system prompt of 1024 tokens in the host tier, against without",
    "of cold",
    at_most(0.4),
)
def host_ttft_ratio() -> Measured:
    """Run the same prefix twice, with more between the two than the device holds."""
    arguments = _worker_args(136, "--num-host-blocks", "800", max_len=2048)
    with running(model="demo", worker_args=arguments, scheduler_args=UNSHED) as stack:
        return _ratio(*asyncio.run(_cold_and_cached(stack, rounds=3, crowd=3)))


# -- pressure --------------------------------------------------------------------------------------


async def _converse(client: AsyncClient, seed: int) -> list[GenerateResult]:
    """Hold one conversation: each turn repeats all before it and adds a question."""
    rng = random.Random(seed)  # a workload, not a secret
    history = _ids(random.Random(seed % 2), SYSTEM_TOKENS)  # two system prompts
    answers = []
    for _ in range(TURNS):
        history += _ids(rng, TURN_TOKENS)
        answer = await client.generate(
            history, max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True, queue_timeout=600
        )
        answers.append(answer)
        history += answer.token_ids
    return answers


async def _conversations(stack: Stack) -> list[list[GenerateResult] | BaseException]:
    async with AsyncClient(stack.endpoint) as client:
        talks = [_converse(client, seed) for seed in range(CONVERSATIONS)]
        ends = await asyncio.gather(*talks, return_exceptions=True)
        await until_idle(client, 1)
        return ends


def _tokens(ends: list[list[GenerateResult] | BaseException]) -> list[list[tuple[int, ...]]]:
    for end in ends:
        if isinstance(end, BaseException):
            raise end
    return [[turn.token_ids for turn in end] for end in ends if not isinstance(end, BaseException)]


@entry(
    "kv.parity_under_pressure",
    "turns of conversations whose greedy output differs between a cache of half the working set with prefix "
    "caching, host tier and preemption, and none of these",
    "count",
    at_most(0),
    long=True,
)
def parity_under_pressure() -> Measured:
    """Hold the same conversations twice."""
    pressed = _worker_args(SMALL_POOL, "--num-host-blocks", str(WORKING_SET_BLOCKS), "--check-integrity")
    with running(model="demo", worker_args=pressed, scheduler_args=UNSHED) as stack:
        under = asyncio.run(_conversations(stack))
    roomy = _worker_args(WORKING_SET_BLOCKS * 2)
    with running(model="demo", worker_args=roomy, scheduler_args=(*UNSHED, "--no-prefix-caching")) as stack:
        free = asyncio.run(_conversations(stack))
    pairs = [
        (one, other)
        for talk, twin in zip(_tokens(under), _tokens(free), strict=True)
        for one, other in zip(talk, twin, strict=True)
    ]
    turns = [turn for talk in under if not isinstance(talk, BaseException) for turn in talk]
    return Measured(
        sum(one != other for one, other in pairs),
        {
            "turns": len(pairs),
            "preemptions": sum(turn.timings.preemptions for turn in turns),
            "cached tokens": sum(turn.usage.cached_tokens for turn in turns),
        },
    )


@entry(
    "kv.pressure_failures",
    "requests that fail, or differ in length, under a cache of half the working set; and again with 5% of "
    "allocations and 2% of steps failing",
    "count",
    at_most(0),
    long=True,
)
def pressure_failures() -> Measured:
    """Hold the conversations with too little room, without and with faults."""
    limits = ("--num-host-blocks", str(SMALL_POOL), "--check-integrity", "--enable-faults")
    arguments = _worker_args(SMALL_POOL, *limits)
    failures: list[str] = []
    preemptions = 0
    with running(model="demo", worker_args=arguments, scheduler_args=(*UNSHED, "--enable-faults")) as stack:
        for faults in ((), _FAULTS):
            _set_faults(stack, faults)
            for end in asyncio.run(_conversations(stack)):
                if isinstance(end, OctavoError):
                    failures.append(f"{end.reason}: {end}")
                elif isinstance(end, BaseException):
                    raise end
                else:
                    preemptions += sum(turn.timings.preemptions for turn in end)
                    failures += ["too short" for turn in end if len(turn.token_ids) != ANSWER_TOKENS]
    return Measured(len(failures), {"preemptions": preemptions, "failures": failures[:5]})


_FAULTS: Final = (
    operations_pb2.Fault(kind=operations_pb2.FAULT_KIND_ALLOCATION, probability=0.05),
    operations_pb2.Fault(kind=operations_pb2.FAULT_KIND_STEP_OOM, probability=0.02),
)


def _set_faults(stack: Stack, faults: Sequence[operations_pb2.Fault]) -> None:
    with grpc.insecure_channel(stack.endpoint) as channel:
        operations_pb2_grpc.OperationsStub(channel).SetFaults(operations_pb2.SetFaultsRequest(faults=faults))
