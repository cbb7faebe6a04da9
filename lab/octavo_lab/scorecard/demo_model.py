"""The demo model: in a worker's engine, as transformers runs it, and who judges the one by the other."""

# ruff: noqa: PLC0415 - torch, transformers and vLLM take seconds to import, and need not be installed

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

from octavo_lab.scorecard.runner_workload import EngineJob, Reference
from worker_svc.engine.loop import StepEngine


def quiet(what: str, fraction: float) -> None:
    """Show no progress."""


@contextmanager
def demo_engine(runner: str, **settings: Any) -> Iterator[StepEngine]:
    """The model behind a new engine, on a runner; `settings` are those of a worker."""
    from worker_svc.config import WorkerSettings
    from worker_svc.start.load import build, load_runner

    device = {"device": "cpu"} if runner == "torch" else {}
    wanted = WorkerSettings.load({"model": "demo", "runner": runner, **device, **settings})
    with closing(load_runner(wanted, quiet)) as loaded:
        yield build(wanted, loaded).engine


def transformers_model() -> Any:
    """Return the model as transformers loads it, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    from worker_svc.models.demo_model import fetch_demo_model

    path = fetch_demo_model(quiet)
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


def transformers_generate_s(model: Any, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
    """Return the time of transformers for so many greedy tokens of each prompt, padded on the left."""
    import torch

    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + [*prompt] for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    length = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens}
    started = time.perf_counter()
    with torch.inference_mode():
        made = model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **length)
    elapsed = time.perf_counter() - started
    if made.shape != (len(prompts), longest + num_tokens):
        raise RuntimeError(f"transformers made {tuple(made.shape)}")
    return elapsed


def judged(reference: Any, jobs: Sequence[EngineJob]) -> dict[str, int]:
    """Count the tokens of greedy jobs that a model of transformers would not have chosen."""
    unexcused, excused = map(sum, zip(*map(Reference(reference).mismatches, jobs), strict=True))
    return {"tokens": sum(len(job.output) for job in jobs), "unexcused": unexcused, "excused": excused}
