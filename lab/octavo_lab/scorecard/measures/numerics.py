"""The numbers of the demo model in each type, through the whole system, beside transformers in float32."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any, Final

from octavo_lab.scorecard import Measurement, at_most, entry
from octavo_lab.scorecard.demo_model import transformers_model
from octavo_lab.scorecard.numerics import (
    PROMISES,
    Questions,
    ReferenceJudge,
    answers_of,
    compared,
    types_here,
)
from worker_svc.runner.vllm.installed import SUPPORTED_VERSION, installed_version

QUESTIONS: Final = Questions(count=16, output_tokens=12)


@entry("e2e.numerics", "of what is promised", at_most(1), long=True)
async def numerics() -> Measurement:
    """mean KL to transformers in float32, and the widest tie at which a greedy token differs, over what is
    promised of the type: the worst of torch on the CPU and vLLM, each type, cold, hit, together and chunked

    16 prompts of 1 to 600 tokens, 12 tokens each, greedy, the 20 best alternatives at each position.
    `docs/numerics.md` states what is compared.
    """
    runners = ["torch", *(["vllm"] if installed_version() == SUPPORTED_VERSION else [])]
    found = {
        (runner, dtype): await answers_of(QUESTIONS, runner, dtype)
        for runner in runners
        for dtype in types_here(runner)
    }
    judge = await asyncio.to_thread(lambda: ReferenceJudge(transformers_model()))
    details: dict[str, Any] = {
        "types not here": [dtype for dtype in PROMISES if ("torch", dtype) not in found]
    }
    shares = []
    for (runner, dtype), ways in found.items():
        for way, answers in ways.items():
            verdict = await asyncio.to_thread(judge.verdict, answers)
            shares.append(verdict.share_of(PROMISES[dtype]))
            beside = {} if way == "cold" else compared(ways["cold"], answers)
            details[f"{runner} {dtype} {way}"] = {**asdict(verdict), **beside}
    return Measurement(max(shares), details)
