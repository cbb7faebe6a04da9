"""The KV cache under the demo model, in the running system: exactness, what a hit saves, pressure."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Final

import grpc
from octavo.aio import AsyncClient
from octavo.errors import OctavoError
from octavo.stack import Stack
from octavo.types import GenerateResult
from octavo.v1 import operations_pb2, operations_pb2_grpc

from octavo_lab.scorecard import Measurement, at_most, entry, system

PREFIX_TOKENS: Final = 1024
QUESTION_TOKENS: Final = 24

CONVERSATIONS: Final = 8
TURNS: Final = 3
SYSTEM_TOKENS: Final = 96
TURN_TOKENS: Final = 48
ANSWER_TOKENS: Final = 48
WORKING_SET_BLOCKS: Final = CONVERSATIONS * (SYSTEM_TOKENS + TURNS * (TURN_TOKENS + ANSWER_TOKENS)) // 16
SMALL_POOL: Final = WORKING_SET_BLOCKS // 2


def _ids(rng: random.Random, count: int) -> list[int]:
    """Return plain words of the vocabulary: no special token among them."""
    return [rng.randrange(1000, 40000) for _ in range(count)]


def _stack(
    num_blocks: int, *more: str, max_len: int = 512, scheduler_args: tuple[str, ...] = ()
) -> AbstractContextManager[Stack]:
    limits = ("--max-model-len", str(max_len), "--num-blocks", str(num_blocks), "--dtype", "float32", *more)
    return system.running(worker_args=limits, scheduler_args=(*system.UNSHED, *scheduler_args))


# -- what a hit saves ------------------------------------------------------------------------------


async def _cached_over_cold(stack: Stack, rounds: int, crowd: int) -> Measurement:
    """Compare times to the first token with and without the prefix in a cache.

    Between the two, `crowd` other prompts of the same length are run, to push the prefix off the device.
    """
    rng = random.Random(7)
    times_ms: dict[str, list[float]] = {"cached": [], "cold": []}
    async with AsyncClient(stack.endpoint) as client:

        async def ask(prefix: Sequence[int], kind: str | None = None) -> int:
            prompt = [*prefix, *_ids(rng, QUESTION_TOKENS)]
            result = await client.generate(prompt, max_tokens=1, temperature=0, skip_text=True)
            if kind is not None:
                times_ms[kind].append(1e3 * result.timings.ttft_s)
            return result.usage.cached_tokens

        await ask(_ids(rng, PREFIX_TOKENS))
        for _ in range(rounds):
            prefix = _ids(rng, PREFIX_TOKENS)
            await ask(prefix, "cold")
            for _ in range(crowd):
                await ask(_ids(rng, PREFIX_TOKENS))
            hit_tokens = await ask(prefix, "cached")
            if hit_tokens < PREFIX_TOKENS:
                raise RuntimeError(f"only {hit_tokens} tokens of the prefix were cached")
    return system.median_ratio(times_ms["cached"], times_ms["cold"], ms=system.rounded(times_ms))


@entry("kv.prefix_ttft_ratio", "of cold", at_most(0.2))
def prefix_ttft_ratio() -> Measurement:
    """time to the first token with a system prompt of 1024 tokens on the device, against without"""
    with _stack(600, max_len=2048) as stack:
        return asyncio.run(_cached_over_cold(stack, rounds=5, crowd=0))


@entry("kv.host_ttft_ratio", "of cold", at_most(0.4))
def host_ttft_ratio() -> Measurement:
    """time to the first token with a system prompt of 1024 tokens in the host tier, against without

    More than the device holds comes between the two.
    """
    with _stack(136, "--num-host-blocks", "800", max_len=2048) as stack:
        return asyncio.run(_cached_over_cold(stack, rounds=3, crowd=3))


# -- pressure --------------------------------------------------------------------------------------


async def _converse(client: AsyncClient, seed: int) -> list[GenerateResult]:
    """Hold one conversation: each turn repeats all before it and adds a question."""
    rng = random.Random(seed)
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


async def _conversations(stack: Stack) -> tuple[list[GenerateResult], list[OctavoError]]:
    """Hold all conversations at once; return the turns of those that came to their end, and other ends."""
    async with AsyncClient(stack.endpoint) as client:
        talks = [_converse(client, seed) for seed in range(CONVERSATIONS)]
        ends = await asyncio.gather(*talks, return_exceptions=True)
        await system.until_idle(client, 1)
    turns: list[GenerateResult] = []
    errors: list[OctavoError] = []
    for end in ends:
        if isinstance(end, OctavoError):
            errors.append(end)
        elif isinstance(end, BaseException):
            raise end
        else:
            turns += end
    return turns, errors


@entry("kv.parity_under_pressure", "count", at_most(0), long=True)
def parity_under_pressure() -> Measurement:
    """turns of conversations whose greedy output differs between a cache of half the working set with prefix
    caching, host tier and preemption, and none of these
    """
    with _stack(SMALL_POOL, "--num-host-blocks", str(WORKING_SET_BLOCKS), "--check-integrity") as stack:
        pressed, pressed_errors = asyncio.run(_conversations(stack))
    with _stack(2 * WORKING_SET_BLOCKS, scheduler_args=("--no-prefix-caching",)) as stack:
        free, free_errors = asyncio.run(_conversations(stack))
    for error in (*pressed_errors, *free_errors):
        raise error
    return Measurement(
        sum(one.token_ids != other.token_ids for one, other in zip(pressed, free, strict=True)),
        {
            "turns": len(pressed),
            "preemptions": sum(turn.timings.preemptions for turn in pressed),
            "cached tokens": sum(turn.usage.cached_tokens for turn in pressed),
        },
    )


@entry("kv.pressure_failures", "count", at_most(0), long=True)
def pressure_failures() -> Measurement:
    """requests that fail, or differ in length, under a cache of half the working set; and again with 5% of
    allocations and 2% of steps failing
    """
    faults = (
        operations_pb2.Fault(kind=operations_pb2.FAULT_KIND_ALLOCATION, probability=0.05),
        operations_pb2.Fault(kind=operations_pb2.FAULT_KIND_STEP_OOM, probability=0.02),
    )
    failures: list[str] = []
    preemptions = 0
    limits = ("--num-host-blocks", str(SMALL_POOL), "--check-integrity", "--enable-faults")
    with _stack(SMALL_POOL, *limits, scheduler_args=("--enable-faults",)) as stack:
        for injected in ((), faults):
            with grpc.insecure_channel(stack.endpoint) as channel:
                request = operations_pb2.SetFaultsRequest(faults=injected)
                operations_pb2_grpc.OperationsStub(channel).SetFaults(request)
            turns, errors = asyncio.run(_conversations(stack))
            failures += [f"{error.reason}: {error}" for error in errors]
            failures += ["too short" for turn in turns if len(turn.token_ids) != ANSWER_TOKENS]
            preemptions += sum(turn.timings.preemptions for turn in turns)
    return Measurement(len(failures), {"preemptions": preemptions, "failures": failures[:5]})
