"""The vLLM runner: exactness, what a step costs beside vLLM, and Octavo against `vllm serve`.

Against `vllm serve`, and against vLLM's executor with no server at all: the same model, settings, environment
and traffic (128 tokens in, 64 out).
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final

import aiohttp
import psutil
from octavo.aio import AsyncClient
from octavo.sampling import SamplingParams
from octavo.stack import free_port

from octavo_lab.scorecard import Measurement, at_least, at_most, entry, system
from octavo_lab.scorecard.demo_model import demo_engine, judged, transformers_model
from octavo_lab.scorecard.runner_workload import EngineJob, PlanWorkload, greedy_jobs
from octavo_lab.scorecard.vllm_server import MODEL, enter, limits, vllm_serve

BLOCK_SIZE: Final = 32
MAX_NUM_SEQS: Final = 16
NUM_STEPS: Final = 500
_EXACT: Final[dict[str, Any]] = {
    "dtype": "float32",
    "block_size": BLOCK_SIZE,
    "num_blocks": 160,
    "max_model_len": 512,
    "max_num_seqs": MAX_NUM_SEQS,
    "max_num_batched_tokens": 128,
}
_EAGER: Final = {"enforce_eager": True}

# -- exactness


@entry("vllm.parity", "tokens", at_most(0), long=True)
def parity() -> Measurement:
    """64 greedy sequences, chunked, preempted, cancelled, on torch and on vLLM in float32: tokens that
    transformers would not have chosen (beyond near ties)
    """
    enter()
    reference = transformers_model()
    details: dict[str, Any] = {}
    for runner, more in (("torch", {}), ("vllm", _EAGER)):
        jobs = greedy_jobs(reference.config.vocab_size, count=64, longest=240, max_tokens=24, seed=1)
        with demo_engine(runner, **_EXACT, **more) as engine:
            workload = PlanWorkload(engine, BLOCK_SIZE, MAX_NUM_SEQS, seed=1)
            workload.run(jobs, disturb=True)
        details[runner] = {**judged(reference, jobs), **workload.seen}
    return Measurement(sum(found["unexcused"] for found in details.values()), details)


@entry("vllm.seeded_resume_mismatches", "sequences", at_most(0), long=True)
def seeded_resume_mismatches() -> Measurement:
    """24 sequences with seeded sampling and penalties, chunked, preempted and resumed: how many differ from
    themselves undisturbed
    """
    enter()
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
    prompts = [job.prompt for job in greedy_jobs(49152, count=24, longest=160, max_tokens=1, seed=2)]
    calm, disturbed = (
        [
            EngineJob(prompt, replace(sampling, seed=number // 2), choice=number % 2)
            for number, prompt in enumerate(prompts)
        ]
        for _ in range(2)
    )
    with demo_engine("vllm", **_EXACT, **_EAGER) as engine:
        workload = PlanWorkload(engine, BLOCK_SIZE, MAX_NUM_SEQS, seed=3)
        workload.run(calm, disturb=False)
        workload.run(disturbed, disturb=True)
    differ = sum(one.output != other.output for one, other in zip(calm, disturbed, strict=True))
    return Measurement(differ, workload.seen)


# -- gaps between steps


async def _gap(concurrency: int) -> Measurement:
    """Return the mean gap over the mean step, as the worker saw them while all requests decoded."""
    port = str(free_port())
    args = ("--runner", "vllm", "--num-blocks", "1024", "--max-model-len", "1024", "--metrics-port", port)
    with system.running(worker_args=args) as stack:
        async with AsyncClient(stack.endpoint) as client:
            decoding = [asyncio.Event() for _ in range(concurrency)]

            async def request(number: int) -> None:
                prompt, most = [10 + number + index for index in range(128)], NUM_STEPS + 200
                async for delta in client.stream(
                    prompt, max_tokens=most, temperature=0.0, ignore_eos=True, skip_text=True
                ):
                    if delta.token_ids:
                        decoding[number].set()

            tasks = [asyncio.create_task(request(number)) for number in range(concurrency)]
            for one in decoding:
                await one.wait()
            before = await asyncio.to_thread(_sums, port)
            while True:
                await asyncio.sleep(0.5)
                after = await asyncio.to_thread(_sums, port)
                if after["count"] - before["count"] >= NUM_STEPS:
                    break
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    steps = after["count"] - before["count"]
    mean_us = {name: (after[name] - before[name]) / steps * 1e6 for name in after if name != "count"}
    gap_us = mean_us["bubble"] + mean_us["overhead"] + mean_us["copy"]
    details = {f"{name}_us": round(value, 1) for name, value in mean_us.items()}
    return Measurement(gap_us / mean_us["step"], {"steps": steps, **details})


def _sums(port: str) -> dict[str, float]:
    """Read the sums of the worker's histograms, and the number of steps."""
    text = system.metrics(f"http://127.0.0.1:{port}")
    sums = re.findall(r"^octavo_worker_(step|bubble|overhead|copy)_seconds_sum (\S+)$", text, re.MULTILINE)
    count = re.findall(r"^octavo_worker_step_seconds_(count) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in (*sums, *count)}


for size, number, bound in (("b1", "one request", 0.05), ("b32", "32 requests", 0.03)):
    entry(
        f"vllm.overhead_{size}",
        "share of a step",
        at_most(bound),
        long=True,
        measures=f"mean gap between two steps of vLLM with {number}, "
        f"over {NUM_STEPS} steps of a running stack",
    )(partial(_gap, int(size[1:])))


# -- throughput

PROMPT_TOKENS: Final = 128
OUTPUT_TOKENS: Final = 64
SEATS: Final = 32
_STACK: Final[dict[str, Any]] = {
    "scheduler_args": system.UNSHED,
    "worker_args": ("--runner", "vllm", *limits(SEATS)),
}
_GREEDY: Final = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)


def _prompt(number: int) -> list[int]:
    """Return a prompt that shares no block with another."""
    return [10 + (number * 31 + index * 7) % 40_000 for index in range(PROMPT_TOKENS)]


async def _octavo_rate(client: AsyncClient, concurrency: int) -> float:
    async def ask(number: int) -> int:
        result = await client.generate(
            _prompt(number), max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True
        )
        return len(result.token_ids)

    return await system.tokens_per_s(ask, 2 * concurrency, concurrency, OUTPUT_TOKENS)


@asynccontextmanager
async def _serve(concurrency: int) -> AsyncIterator[system.Rate]:
    """`vllm serve`, in the environment that our worker makes for itself."""
    async with (
        vllm_serve(*limits(SEATS, serve=True)) as server,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):

        async def ask(number: int) -> int:
            return await system.completion(session, server.base_url, MODEL, _prompt(number), OUTPUT_TOKENS)

        yield lambda: system.tokens_per_s(ask, 2 * concurrency, concurrency, OUTPUT_TOKENS)


@asynccontextmanager
async def _executor(concurrency: int) -> AsyncIterator[system.Rate]:
    """An engine over vLLM in this process, without a server."""
    with demo_engine("vllm", num_blocks=1024, max_model_len=1024, max_num_seqs=SEATS) as engine:
        workload, count = PlanWorkload(engine, None, concurrency), 2 * concurrency

        async def rate() -> float:
            first = time.monotonic_ns() % 1_000_003
            jobs = [EngineJob(_prompt(first + number), _GREEDY) for number in range(count)]
            started = time.perf_counter()
            workload.run(jobs, disturb=False)
            return count * OUTPUT_TOKENS / (time.perf_counter() - started)

        yield rate


async def _ratio(
    peer: Callable[[int], AbstractAsyncContextManager[system.Rate]], concurrency: int
) -> Measurement:
    if peer is _executor:
        enter()
    with system.running(**_STACK) as stack:
        async with AsyncClient(stack.endpoint) as client, peer(concurrency) as other:
            ours = partial(_octavo_rate, client, concurrency)
            rates = await system.in_turns({"octavo": ours, "other": other})
    return system.median_ratio(*rates.values(), **system.rounded(rates))


for concurrency in (1, 8, 32):
    for name, bound, whom, peer in (
        ("e2e", 1.0, "`vllm serve`", _serve),
        ("limit", 0.95, "vLLM's executor alone", _executor),
    ):
        entry(
            f"vllm.{name}_ratio_c{concurrency}",
            "ratio",
            at_least(bound),
            long=True,
            measures=f"output tokens per second of Octavo over those of {whom}, {concurrency} at a time",
        )(partial(_ratio, peer, concurrency))


@entry("vllm.cpu_us_per_token", "us", long=True)
async def cpu_us_per_token() -> Measurement:
    """CPU of scheduler, worker shell and client per output token, 32 requests at a time over vLLM

    The worker's shell is its main thread; the engine's thread and those of OpenMP are not in it.
    """
    with system.running(**_STACK) as stack:
        worker = psutil.Process(stack.workers[0].process.pid)

        def spent_s() -> dict[str, float]:
            (shell,) = [thread for thread in worker.threads() if thread.id == worker.pid]
            shell_s = shell.user_time + shell.system_time
            return {
                "scheduler": system.cpu_s(stack.scheduler),
                "worker shell": shell_s,
                "client": system.cpu_s(),
            }

        async with AsyncClient(stack.endpoint) as client:
            await _octavo_rate(client, SEATS)
            before = spent_s()
            for _ in range(system.ROUNDS):
                await _octavo_rate(client, SEATS)
            after = spent_s()
    tokens = system.ROUNDS * 2 * SEATS * OUTPUT_TOKENS
    per_token = {name: (after[name] - before[name]) / tokens * 1e6 for name in after}
    return Measurement(sum(per_token.values()), {name: round(value, 1) for name, value in per_token.items()})
