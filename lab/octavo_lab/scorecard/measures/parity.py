"""Greedy tokens of the demo model in float32 against those of Hugging Face transformers."""

# ruff: noqa: PLC0415 - torch and transformers take seconds to import

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from octavo.protocol.steps import Admit, Plan, Report, StepStatus
from octavo.sampling import SamplingParams

from octavo_lab.scorecard import Measured, at_most, entry
from octavo_lab.scorecard.demo_engine import demo_engine, transformers_model

if TYPE_CHECKING:
    from worker_svc.engine.engine import WorkerEngine

NUM_PROMPTS: Final = 24
LONGEST: Final = 1500
NUM_TOKENS: Final = 64
BATCH: Final = 32
TIE: Final = 1e-3
"""The reference's two best logits may trade places when they are this close."""
GREEDY: Final = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, seed=0)


@dataclass(slots=True)
class Comparison:
    """Tokens that differ from the reference, by excuse."""

    compared: int = 0
    unexcused: int = 0
    excused: int = 0


@entry(
    "e2e.parity",
    "greedy tokens that differ from transformers in float32 without a tie: 24 prompts of 1 to 1500 tokens, "
    "64 tokens each, alone and mixed in a batch of 32 with staggered arrivals and random chunks",
    "tokens",
    at_most(0),
    long=True,
)
def parity() -> Measured:
    """Compare worker engine and runner with the reference."""
    vocab_size, engine = demo_engine(BATCH, LONGEST + NUM_TOKENS)
    prompts = draw_prompts(vocab_size)
    outputs: list[tuple[list[int], list[int]]] = []
    for prompt in prompts:
        outputs += run(engine, [prompt], random.Random(len(prompt)))
    mixed = [*prompts, *prompts[: BATCH - NUM_PROMPTS]]
    outputs += run(engine, mixed, random.Random(1))
    comparison = compare(outputs)
    return Measured(
        comparison.unexcused,
        {"tokens compared": comparison.compared, "differences at ties": comparison.excused},
    )


def draw_prompts(vocab_size: int) -> list[list[int]]:
    """Return token ids of 24 prompts, always the same ones; lengths spread evenly on a log scale."""
    chance = random.Random(135)
    lengths = [round(LONGEST ** (n / (NUM_PROMPTS - 1))) for n in range(NUM_PROMPTS)]
    chance.shuffle(lengths)
    return [[chance.randrange(vocab_size) for _ in range(length)] for length in lengths]


@dataclass(slots=True)
class _Running:
    prompt: list[int]
    left: int
    output: list[int] = field(default_factory=list)
    done: bool = False


def run(
    engine: WorkerEngine, prompts: list[list[int]], chance: random.Random
) -> list[tuple[list[int], list[int]]]:
    """Generate for all prompts in one batch, which they join step by step; return (prompt, output) pairs."""
    engine.drop_all()
    waiting = list(enumerate(prompts, start=1))
    running: dict[int, _Running] = {}
    step = 0
    while waiting or any(not one.done for one in running.values()):
        step += 1
        joining = [waiting.pop(0) for _ in range(min(chance.randint(0, 3), len(waiting)))]
        for handle, prompt in joining:
            running[handle] = _Running(prompt, len(prompt))
        plan = Plan(
            step,
            admit=tuple(Admit(handle, prompt, len(prompt), GREEDY) for handle, prompt in joining),
            prefill=tuple(_chunks(running, chance)),
        )
        _note(engine.run_step(plan, time.monotonic), running)
    return [(one.prompt, one.output) for one in running.values()]


def _chunks(running: dict[int, _Running], chance: random.Random) -> Iterator[tuple[int, int]]:
    for handle, one in running.items():
        if one.left and chance.random() < 0.7:
            count = min(one.left, round(10 ** chance.uniform(0, 2.7)))
            one.left -= count
            yield handle, count


def _note(report: Report, running: dict[int, _Running]) -> None:
    if report.status is not StepStatus.OK or report.refused:
        raise RuntimeError(f"step {report.step} went wrong: {report.errors or report.refused}")
    for handle, token_id in zip(report.token_handles, report.token_ids, strict=True):
        running[handle].output.append(token_id)
    for finished in report.finished:
        running[finished.handle].done = True


def compare(outputs: list[tuple[list[int], list[int]]]) -> Comparison:
    """Ask the reference, at every position, for the token after the prompt and our output so far.

    Up to the first difference that is its greedy generation; after one it still judges each step.
    """
    import torch

    reference = transformers_model()
    comparison = Comparison()
    known: dict[tuple[int, ...], Any] = {}
    for prompt, output in outputs:
        sequence = (*prompt, *output)
        if sequence not in known:
            with torch.inference_mode():
                tokens = torch.tensor([sequence[:-1]])
                logits = reference(tokens, logits_to_keep=len(output)).logits[0].float()
            known[sequence] = logits.topk(2)
        best = known[sequence]
        gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
        for token_id, expected, gap in zip(output, best.indices[:, 0].tolist(), gaps, strict=True):
            comparison.compared += 1
            comparison.unexcused += token_id != expected and gap >= TIE
            comparison.excused += token_id != expected and gap < TIE
    return comparison
