"""The static control arm against the usual way to run a padded batch."""

# ruff: noqa: PLC0415 - torch takes seconds to import

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from octavo.protocol.steps import Admit, Plan, StepStatus
from octavo.sampling import SamplingParams

from octavo_lab.scorecard import Measured, at_least, entry
from octavo_lab.scorecard.demo_model import demo_engine, transformers_generate_s, transformers_model
from octavo_lab.scorecard.system import in_turns, median_ratio

if TYPE_CHECKING:
    from worker_svc.engine.engine import Engine

BATCH: Final = 8
SHORTEST: Final = 32
LONGEST: Final = 128
NUM_TOKENS: Final = 64
GREEDY: Final = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, seed=0)


@entry("core.static_vs_transformers", "ratio", at_least(0.9))
async def static_vs_transformers() -> Measured:
    """tokens per second of the static arm over transformers' batched generate: 8 prompts of 32 to 128 tokens,
    64 tokens each, greedy, float32, demo model

    The same batches through both in turn; the ratio of the medians.
    """
    import torch

    reference, steps = transformers_model(), itertools.count(1)
    chance = random.Random(8)
    lengths = [SHORTEST, LONGEST, *(chance.randint(SHORTEST, LONGEST) for _ in range(BATCH - 2))]
    prompts = [[chance.randrange(reference.config.vocab_size) for _ in range(length)] for length in lengths]
    limits = {"max_num_seqs": BATCH, "max_model_len": LONGEST + NUM_TOKENS, "block_size": 16}
    layout = {
        "kv_layout": "contiguous",
        "padded": True,
        "num_blocks": BATCH * ((LONGEST + NUM_TOKENS) // 16 + 1),
    }
    with demo_engine("torch", dtype="float32", **limits, **layout) as engine:

        async def static() -> float:
            return BATCH * NUM_TOKENS / _run_s(engine, prompts, steps)

        async def transformers() -> float:
            return BATCH * NUM_TOKENS / transformers_generate_s(reference, prompts, NUM_TOKENS)

        rates = await in_turns({"static": static, "transformers": transformers}, rounds=5)
    return median_ratio(*rates.values(), tokens_per_s=rates, threads=torch.get_num_threads())


def _run_s(engine: Engine, prompts: list[list[int]], steps: Iterator[int]) -> float:
    """Run one batch as `StaticPlanner` plans it; return the seconds that it takes."""
    started, first = time.perf_counter(), next(steps)
    admits = tuple(
        Admit(
            handle,
            tuple(prompt),
            len(prompt),
            GREEDY,
            reserve_tokens=len(prompt) + NUM_TOKENS,
            hold_after_finish=True,
        )
        for handle, prompt in enumerate(prompts, start=first * BATCH)
    )
    prefill = tuple((admit.handle, admit.prompt_len) for admit in admits)
    plans = [Plan(first, admit=admits, prefill=prefill)]
    plans += [Plan(next(steps)) for _ in range(NUM_TOKENS - 1)]
    plans.append(Plan(next(steps), release=tuple(admit.handle for admit in admits)))
    reports = [engine.run_step(plan, time.monotonic) for plan in plans]
    elapsed_s = time.perf_counter() - started
    for report in reports:
        if report.status is not StepStatus.OK or report.refused:
            raise RuntimeError(f"step {report.step} went wrong: {report.errors or report.refused}")
    tokens = sum(len(report.token_ids) for report in reports)
    if tokens != BATCH * NUM_TOKENS:
        raise RuntimeError(f"{tokens} tokens came out, {BATCH * NUM_TOKENS} were asked for")
    return elapsed_s
