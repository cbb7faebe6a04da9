"""The vLLM runner: its tokens against transformers, its randomness, and what a step costs beside vLLM."""

# ruff: noqa: PLC0415 - torch, transformers and vLLM take seconds to import

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from octavo.aio import AsyncClient
from octavo.sampling import SamplingParams
from octavo.stack import Stack, StackConfig, free_port

from octavo_lab.scorecard import Measured, at_most, entry
from octavo_lab.scorecard.runner_workload import Job, PlanWorkload, Reference, greedy_jobs

VOCAB_SIZE: Final = 49152
BLOCK_SIZE: Final = 32
MAX_NUM_SEQS: Final = 16
READY_S: Final = 1200.0
NUM_STEPS: Final = 500
_GAPS: Final = ("bubble", "overhead", "copy")


@contextmanager
def _workload(runner: str, seed: int) -> Iterator[PlanWorkload]:
    """The demo model in float32 on a runner, behind a new engine."""
    from worker_svc.config import WorkerSettings
    from worker_svc.start.load import build, load_runner

    settings = WorkerSettings.load(
        {
            "model": "demo",
            "runner": runner,
            "dtype": "float32",
            **({"enforce_eager": True} if runner == "vllm" else {"device": "cpu"}),
            "block_size": BLOCK_SIZE,
            "num_blocks": 160,
            "max_model_len": 512,
            "max_num_seqs": MAX_NUM_SEQS,
            "max_num_batched_tokens": 128,
        }
    )
    loaded = load_runner(settings, lambda what, fraction: None)
    try:
        yield PlanWorkload(build(settings, loaded).engine, BLOCK_SIZE, MAX_NUM_SEQS, seed)
    finally:
        loaded.close()


def _enter() -> None:
    """Start this measure anew in the environment that a worker with vLLM would have."""
    from worker_svc.runner.vllm import installed, placement

    placement.enter(ranks=1, num_threads=None)
    installed.prepare()


@entry(
    "vllm.parity",
    "64 greedy sequences, chunked, preempted, cancelled, on torch and on vLLM in float32: tokens that "
    "transformers would not have chosen (beyond near ties)",
    "tokens",
    at_most(0),
    long=True,
)
def parity() -> Measured:
    """Both runners against one judge."""
    _enter()
    import torch
    from transformers import AutoModelForCausalLM

    from worker_svc.models.resolve import resolve
    from worker_svc.runner.vllm.gguf_folder import hf_folder_of

    model = resolve("demo", lambda what, fraction: None)
    folder = hf_folder_of(model, "float32", lambda what, fraction: None)
    reference = Reference(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    details: dict[str, Any] = {}
    unexcused = 0
    for runner in ("torch", "vllm"):
        jobs = greedy_jobs(VOCAB_SIZE, count=64, longest=240, max_tokens=24, seed=1)
        with _workload(runner, seed=1) as workload:
            workload.run(jobs, disturb=True)
        verdicts = [reference.mismatches(job) for job in jobs]
        details[runner] = {
            "unexcused": sum(wrong for wrong, _ in verdicts),
            "excused": sum(excused for _, excused in verdicts),
            "tokens": sum(len(job.output) for job in jobs),
            **workload.seen,
        }
        unexcused += details[runner]["unexcused"]
    return Measured(unexcused, details)


@entry(
    "vllm.seeded_resume_mismatches",
    "24 sequences with seeded sampling and penalties, chunked, preempted and resumed: how many differ from "
    "themselves undisturbed",
    "sequences",
    at_most(0),
    long=True,
)
def seeded_resume_mismatches() -> Measured:
    """The same jobs twice."""
    _enter()
    sampling = SamplingParams(
        temperature=1.0,
        top_p=0.95,
        min_p=0.001,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.1,
        max_tokens=24,
        ignore_eos=True,
    )

    def jobs() -> list[Job]:
        prompts = greedy_jobs(VOCAB_SIZE, count=24, longest=160, max_tokens=1, seed=2)
        return [
            Job(job.prompt, replace(sampling, seed=number // 2), choice=number % 2)
            for number, job in enumerate(prompts)
        ]

    with _workload("vllm", seed=3) as workload:
        undisturbed, disturbed = jobs(), jobs()
        workload.run(undisturbed, disturb=False)
        workload.run(disturbed, disturb=True)
    differ = sum(one.output != other.output for one, other in zip(undisturbed, disturbed, strict=True))
    return Measured(differ, dict(workload.seen))


@entry(
    "vllm.overhead_b1",
    f"mean gap between two steps of vLLM with one request, over {NUM_STEPS} steps of a running stack",
    "share of a step",
    at_most(0.05),
    long=True,
)
async def overhead_b1() -> Measured:
    """See `_overhead`."""
    return await _overhead(concurrency=1)


@entry(
    "vllm.overhead_b32",
    f"mean gap between two steps of vLLM with 32 requests, over {NUM_STEPS} steps of a running stack",
    "share of a step",
    at_most(0.03),
    long=True,
)
async def overhead_b32() -> Measured:
    """See `_overhead`."""
    return await _overhead(concurrency=32)


async def _overhead(concurrency: int) -> Measured:
    """Return the mean gap over the mean step, as the worker saw them while all requests decoded."""
    port = free_port()
    config = StackConfig(
        worker_args=(
            *("--runner", "vllm", "--num-blocks", "1024", "--max-model-len", "1024"),
            *("--metrics-port", str(port)),
        )
    )
    with Stack(config) as stack:
        await asyncio.to_thread(stack.wait_ready, READY_S)
        async with AsyncClient(stack.endpoint) as client:
            decoding = 0
            full = asyncio.Event()

            async def request(number: int) -> None:
                nonlocal decoding
                stream = client.stream(
                    [10 + number + index for index in range(128)],
                    max_tokens=NUM_STEPS + 200,
                    temperature=0.0,
                    ignore_eos=True,
                    skip_text=True,
                )
                started = False
                async for delta in stream:
                    if delta.token_ids and not started:
                        started = True
                        decoding += 1
                        if decoding == concurrency:
                            full.set()

            tasks = [asyncio.create_task(request(number)) for number in range(concurrency)]
            await full.wait()
            before = await asyncio.to_thread(_sums, port)
            while True:
                await asyncio.sleep(0.5)
                after = await asyncio.to_thread(_sums, port)
                if after["step_count"] - before["step_count"] >= NUM_STEPS:
                    break
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    steps = after["step_count"] - before["step_count"]
    mean_us = {name: (after[name] - before[name]) / steps * 1e6 for name in ("step", *_GAPS)}
    return Measured(
        sum(mean_us[name] for name in _GAPS) / mean_us["step"],
        {"steps": steps, **{f"{name}_us": round(value, 1) for name, value in mean_us.items()}},
    )


def _sums(port: int) -> dict[str, float]:
    """Read the sums of the worker's histograms, and the number of steps."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:  # loopback
        text = answer.read().decode()
    sums = {
        name: float(value)
        for name, value in re.findall(r"^octavo_worker_(\w+)_seconds_sum (\S+)$", text, re.MULTILINE)
    }
    (count,) = re.findall(r"^octavo_worker_step_seconds_count (\S+)$", text, re.MULTILINE)
    return {**sums, "step_count": float(count)}
