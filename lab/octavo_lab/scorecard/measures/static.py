"""The static control arm against the usual way to run a padded batch."""

# ruff: noqa: PLC0415 - torch and transformers take seconds to import

from __future__ import annotations

import random
import statistics
import time
from typing import TYPE_CHECKING, Any, Final

from octavo.protocol.steps import Admit, Plan, Report, StepStatus
from octavo.sampling import SamplingParams

from octavo_lab.scorecard import Measured, at_least, entry
from octavo_lab.scorecard.demo_engine import demo_engine, transformers_model

if TYPE_CHECKING:
    from worker_svc.engine.engine import WorkerEngine

BATCH: Final = 8
SHORTEST: Final = 32
LONGEST: Final = 128
NUM_TOKENS: Final = 64
ROUNDS: Final = 5
GREEDY: Final = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, seed=0)


@entry(
    "core.static_vs_transformers",
    "tokens per second of the static arm over transformers' batched generate: 8 prompts of 32 to 128 tokens, "
    "64 tokens each, greedy, float32, demo model",
    "ratio",
    at_least(0.9),
)
def static_vs_transformers() -> Measured:
    """Run the same batches through both in turn, and compare the medians."""
    import torch

    vocab_size, engine = demo_engine(BATCH, LONGEST + NUM_TOKENS, static=True)
    chance = random.Random(8)
    lengths = [SHORTEST, LONGEST, *(chance.randint(SHORTEST, LONGEST) for _ in range(BATCH - 2))]
    prompts = [[chance.randrange(vocab_size) for _ in range(length)] for length in lengths]
    reference = transformers_model()
    ours: list[float] = []
    theirs: list[float] = []
    steps = 1
    for measured in (False, *[True] * ROUNDS):
        began = time.perf_counter()
        steps = _run(engine, prompts, steps)
        between = time.perf_counter()
        _generate(reference, prompts)
        ended = time.perf_counter()
        if measured:
            ours.append(between - began)
            theirs.append(ended - between)
    tokens = BATCH * NUM_TOKENS
    details = {
        "static_tokens_per_s": tokens / statistics.median(ours),
        "transformers_tokens_per_s": tokens / statistics.median(theirs),
        "threads": torch.get_num_threads(),
    }
    return Measured(statistics.median(theirs) / statistics.median(ours), details)


def _run(engine: WorkerEngine, prompts: list[list[int]], step: int) -> int:
    """Run one batch as `StaticPlanner` plans it; return the next step."""
    handles = range(step * BATCH, (step + 1) * BATCH)
    admits = tuple(
        Admit(
            handle,
            tuple(prompt),
            len(prompt),
            GREEDY,
            reserve_tokens=len(prompt) + NUM_TOKENS,
            hold_after_finish=True,
        )
        for handle, prompt in zip(handles, prompts, strict=True)
    )
    prefill = tuple((admit.handle, admit.prompt_len) for admit in admits)
    reports = [engine.run_step(Plan(step, admit=admits, prefill=prefill), time.monotonic)]
    for number in range(step + 1, step + NUM_TOKENS):
        reports.append(engine.run_step(Plan(number), time.monotonic))
    engine.run_step(Plan(step + NUM_TOKENS, release=tuple(handles)), time.monotonic)
    _check(reports)
    return step + NUM_TOKENS + 1


def _check(reports: list[Report]) -> None:
    wrong = [report for report in reports if report.status is not StepStatus.OK or report.refused]
    if wrong:
        raise RuntimeError(f"step {wrong[0].step} went wrong: {wrong[0].errors or wrong[0].refused}")
    tokens = sum(len(report.token_ids) for report in reports)
    if tokens != BATCH * NUM_TOKENS:
        raise RuntimeError(f"{tokens} tokens came out, {BATCH * NUM_TOKENS} were asked for")


def _generate(reference: Any, prompts: list[list[int]]) -> None:
    """Generate with left padding, as transformers asks for."""
    import torch

    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        made = reference.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
    if made.shape != (len(prompts), longest + NUM_TOKENS):
        raise RuntimeError(f"transformers made {tuple(made.shape)}")
