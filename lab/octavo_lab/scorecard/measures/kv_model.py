"""The KV cache under the demo model, in the running system: exactness, what a hit saves, pressure."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final

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
_PATIENT: Final[dict[str, Any]] = {"temperature": 0, "ignore_eos": True, "queue_timeout": 600}


def _ids(rng: random.Random, count: int) -> list[int]:
    """Return plain words of the vocabulary: no special token among them."""
    return [rng.randrange(1000, 40000) for _ in range(count)]


def _stack(worker_args: str, scheduler_args: str = "") -> AbstractContextManager[Stack]:
    limits = f"--max-model-len 512 --dtype float32 {worker_args}".split()
    return system.running(worker_args=limits, scheduler_args=(*system.UNSHED, *scheduler_args.split()))


async def _cached_over_cold(worker_args: str, rounds: int, crowd: int) -> Measurement:
    """Compare times to the first token with and without the prefix in a cache.

    Between the two, `crowd` other prompts of the same length are run, to push the prefix off the device.
    """
    rng, cached_ms, cold_ms = random.Random(7), [], []
    with _stack(worker_args) as stack:
        async with AsyncClient(stack.endpoint) as client:

            async def ask(prefix: Sequence[int]) -> tuple[float, int]:
                prompt = [*prefix, *_ids(rng, QUESTION_TOKENS)]
                result = await client.generate(prompt, max_tokens=1, temperature=0, skip_text=True)
                return 1e3 * result.timings.ttft_s, result.usage.cached_tokens

            await ask(_ids(rng, PREFIX_TOKENS))
            for _ in range(rounds):
                prefix = _ids(rng, PREFIX_TOKENS)
                cold_ms.append((await ask(prefix))[0])
                for _ in range(crowd):
                    await ask(_ids(rng, PREFIX_TOKENS))
                ttft_ms, hit_tokens = await ask(prefix)
                if hit_tokens < PREFIX_TOKENS:
                    raise RuntimeError(f"only {hit_tokens} tokens of the prefix were cached")
                cached_ms.append(ttft_ms)
    return system.median_ratio(cached_ms, cold_ms, ms=system.rounded({"cached": cached_ms, "cold": cold_ms}))


for tier, bound, where, worker_args, rounds, crowd in (
    ("prefix", 0.2, "on the device", "--max-model-len 2048 --num-blocks 600", 5, 0),
    # More than the device holds comes between the two.
    ("host", 0.4, "in the host tier", "--max-model-len 2048 --num-blocks 136 --num-host-blocks 800", 3, 3),
):
    measures = f"time to the first token with a system prompt of 1024 tokens {where}, against without"
    cached_over_cold = partial(_cached_over_cold, worker_args, rounds, crowd)
    entry(f"kv.{tier}_ttft_ratio", "of cold", at_most(bound), measures=measures)(cached_over_cold)


# -- pressure


async def _conversation(client: AsyncClient, seed: int) -> list[GenerateResult] | OctavoError:
    """Hold one conversation: each turn repeats all before it and adds a question."""
    rng = random.Random(seed)
    history = _ids(random.Random(seed % 2), SYSTEM_TOKENS)  # two system prompts
    answers = []
    for _ in range(TURNS):
        history += _ids(rng, TURN_TOKENS)
        try:
            answers.append(await client.generate(history, max_tokens=ANSWER_TOKENS, **_PATIENT))
        except OctavoError as error:
            return error
        history += answers[-1].token_ids
    return answers


async def _conversations(stack: Stack) -> tuple[list[GenerateResult], list[OctavoError]]:
    """Hold all conversations at once; return the turns of those that came to their end, and other ends."""
    async with AsyncClient(stack.endpoint) as client:
        ends = await asyncio.gather(*(_conversation(client, seed) for seed in range(CONVERSATIONS)))
        await system.until_idle(client, 1)
    turns = [turn for end in ends if isinstance(end, list) for turn in end]
    return turns, [end for end in ends if isinstance(end, OctavoError)]


@entry("kv.parity_under_pressure", "count", at_most(0), long=True)
def parity_under_pressure() -> Measurement:
    """turns of conversations whose greedy output differs between a cache of half the working set with prefix
    caching, host tier and preemption, and none of these
    """
    pools = f"--num-blocks {SMALL_POOL} --num-host-blocks {WORKING_SET_BLOCKS}"
    with _stack(f"{pools} --check-integrity") as stack:
        pressed, errors = asyncio.run(_conversations(stack))
    with _stack(f"--num-blocks {2 * WORKING_SET_BLOCKS}", "--no-prefix-caching") as stack:
        free, more_errors = asyncio.run(_conversations(stack))
    for error in (*errors, *more_errors):
        raise error
    details = {
        "turns": len(pressed),
        "preemptions": sum(turn.timings.preemptions for turn in pressed),
        "cached tokens": sum(turn.usage.cached_tokens for turn in pressed),
    }
    differ = sum(one.token_ids != other.token_ids for one, other in zip(pressed, free, strict=True))
    return Measurement(differ, details)


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
    pools = f"--num-blocks {SMALL_POOL} --num-host-blocks {SMALL_POOL}"
    with _stack(f"{pools} --check-integrity --enable-faults", "--enable-faults") as stack:
        for injected in ((), faults):
            with grpc.insecure_channel(stack.endpoint) as channel:
                request = operations_pb2.SetFaultsRequest(faults=injected)
                operations_pb2_grpc.OperationsStub(channel).SetFaults(request)
            turns, errors = asyncio.run(_conversations(stack))
            failures += [f"{error.reason}: {error}" for error in errors]
            failures += ["too short" for turn in turns if len(turn.token_ids) != ANSWER_TOKENS]
            preemptions += sum(turn.timings.preemptions for turn in turns)
    return Measurement(len(failures), {"preemptions": preemptions, "failures": failures[:5]})
