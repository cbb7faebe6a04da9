"""The demo model in our engine against transformers: the same tokens, and how fast."""

from __future__ import annotations

import asyncio
import copy
import itertools
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final

from octavo.aio import AsyncClient
from octavo.protocol.steps import Admit, Plan, StepStatus
from octavo.sampling import SamplingParams

from octavo_lab.scorecard import Measurement, at_least, at_most, entry, system
from octavo_lab.scorecard.demo_model import demo_engine, judged, transformers_generate_s, transformers_model
from octavo_lab.scorecard.runner_workload import EngineJob, PlanWorkload
from worker_svc.engine.loop import StepEngine

BATCH: Final = 8
STATIC_LONGEST: Final = 128
NUM_TOKENS: Final = 64
GREEDY: Final = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


def _exact_engine(max_num_seqs: int, max_model_len: int, **layout: Any) -> AbstractContextManager[StepEngine]:
    """The torch runner in float32, with memory for so many sequences at their longest."""
    limits = {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len, "block_size": 16}
    num_blocks = max_num_seqs * (max_model_len // 16 + 1)
    return demo_engine("torch", dtype="float32", num_blocks=num_blocks, **limits, **layout)


def _random_prompts(model: Any, lengths: Sequence[int], chance: random.Random) -> list[list[int]]:
    return [[chance.randrange(model.config.vocab_size) for _ in range(length)] for length in lengths]


@entry("core.static_vs_transformers", "ratio", at_least(0.9))
async def static_vs_transformers() -> Measurement:
    """tokens per second of the static arm over transformers' batched generate: 8 prompts of 32 to 128 tokens,
    64 tokens each, greedy, float32, demo model

    The same batches through both in turn; the ratio of the medians.
    """
    reference, steps, chance = transformers_model(), itertools.count(1), random.Random(8)
    lengths = [32, STATIC_LONGEST, *(chance.randint(32, STATIC_LONGEST) for _ in range(BATCH - 2))]
    prompts = _random_prompts(reference, lengths, chance)
    layout = {"kv_layout": "contiguous", "padded": True}
    with _exact_engine(BATCH, STATIC_LONGEST + NUM_TOKENS, **layout) as engine:

        async def static() -> float:
            return BATCH * NUM_TOKENS / _run_s(engine, prompts, steps)

        async def transformers() -> float:
            return BATCH * NUM_TOKENS / transformers_generate_s(reference, prompts, NUM_TOKENS)

        rates = await system.in_turns({"static": static, "transformers": transformers}, rounds=5)
    return system.median_ratio(*rates.values(), tokens_per_s=rates)


def _run_s(engine: StepEngine, prompts: list[list[int]], steps: Iterator[int]) -> float:
    """Run one batch as `StaticPlanner` plans it; return the seconds that it takes."""
    started, first = time.perf_counter(), next(steps)
    admits = tuple(
        Admit(handle, ids, len(ids), GREEDY, reserve_tokens=len(ids) + NUM_TOKENS, hold_after_finish=True)
        for handle, ids in enumerate(prompts, start=first * BATCH)
    )
    plans = [Plan(first, admit=admits, prefill=tuple((admit.handle, admit.prompt_len) for admit in admits))]
    plans += [Plan(next(steps)) for _ in range(NUM_TOKENS - 1)]
    plans.append(Plan(next(steps), release=tuple(admit.handle for admit in admits)))
    reports = [engine.run_step(plan, time.monotonic) for plan in plans]
    elapsed_s = time.perf_counter() - started
    for report in reports:
        if report.status is not StepStatus.OK or report.refused:
            raise RuntimeError(f"step {report.step} went wrong: {report.errors or report.refused}")
    if (tokens := sum(len(report.token_ids) for report in reports)) != BATCH * NUM_TOKENS:
        raise RuntimeError(f"{tokens} tokens came out, {BATCH * NUM_TOKENS} were asked for")
    return elapsed_s


DECODE_TOKENS: Final = 32


@entry("e2e.decode_vs_transformers", "times faster", at_least(2))
async def decode_vs_transformers() -> Measurement:
    """decoding with batch 8 through the whole system, against transformers' own batched generate

    On the same cores in turns; each side in the dtype that suits it best on this machine.
    """
    # As the worker sets it for itself, and before torch is loaded here: the same conditions for both.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    with system.running() as stack:
        async with AsyncClient(stack.endpoint) as client:
            prompts = [[*(await client.tokenize(system.prompt(index))).token_ids] for index in range(BATCH)]
            peers = await asyncio.to_thread(_transformers, prompts)
            rates = await system.in_turns({"octavo": partial(_octavo, client, prompts), **peers})
    ms_per_step = {
        f"{name} ms per step": round(1000 / statistics.median(found), 2) for name, found in rates.items()
    }
    ours = rates.pop("octavo")
    return system.median_ratio(ours, max(rates.values(), key=statistics.median), **ms_per_step)


async def _octavo(client: AsyncClient, prompts: list[list[int]]) -> float:
    """Return decode steps per second while all of a batch decode."""
    asked = [
        client.generate(ids, temperature=0, ignore_eos=True, max_tokens=DECODE_TOKENS) for ids in prompts
    ]
    return 1 / statistics.mean(result.timings.tpot_s for result in await asyncio.gather(*asked))


def _transformers(prompts: list[list[int]]) -> dict[str, system.Rate]:
    """The same of transformers, in each dtype that may be the fastest here."""
    model = transformers_model()
    models = {"float32": model, "bfloat16": copy.deepcopy(model).bfloat16()}

    async def rate(one: Any) -> float:
        # What more tokens cost more, without the prefill.
        short_s = await asyncio.to_thread(transformers_generate_s, one, prompts, 1)
        long_s = await asyncio.to_thread(transformers_generate_s, one, prompts, DECODE_TOKENS)
        return (DECODE_TOKENS - 1) / (long_s - short_s)

    for one in models.values():
        transformers_generate_s(one, prompts, 2)
    # One that is far behind will not win, and would take minutes where the CPU has no bfloat16.
    seconds = {dtype: transformers_generate_s(one, prompts, 4) for dtype, one in models.items()}
    fastest = min(seconds.values())
    return {
        f"transformers {dtype}": partial(rate, one)
        for dtype, one in models.items()
        if seconds[dtype] < 2 * fastest
    }


NUM_PROMPTS: Final = 24
LONGEST: Final = 1500
PARITY_BATCH: Final = 32


@entry("e2e.parity", "tokens", at_most(0), long=True)
def parity() -> Measurement:
    """greedy tokens that differ from transformers in float32 without a tie: 24 prompts of 1 to 1500 tokens,
    64 tokens each, alone and mixed in a batch of 32 with staggered arrivals and random chunks

    Worker engine and runner; the reference judges each token after the prompt and our output so far.
    """
    reference, chance = transformers_model(), random.Random(135)
    lengths = [round(LONGEST ** (n / (NUM_PROMPTS - 1))) for n in range(NUM_PROMPTS)]
    chance.shuffle(lengths)
    prompts = _random_prompts(reference, lengths, chance)
    mixed = [EngineJob(prompt, GREEDY) for prompt in (*prompts, *prompts[: PARITY_BATCH - NUM_PROMPTS])]
    batches = [*([EngineJob(prompt, GREEDY)] for prompt in prompts), mixed]
    with _exact_engine(PARITY_BATCH, LONGEST + NUM_TOKENS) as engine:
        for jobs in batches:
            engine.drop_all()
            PlanWorkload(engine, None, PARITY_BATCH, seed=len(jobs)).run(jobs, disturb=True, most=500)
    verdict = judged(reference, [job for jobs in batches for job in jobs])
    return Measurement(verdict["unexcused"], verdict)
