"""The vLLM runner: exactness, what a step costs beside vLLM, and Octavo against `vllm serve`.

Against `vllm serve`, and against vLLM's executor with no server at all: the same model, settings, environment
and traffic (128 tokens in, 64 out).
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
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
_LIMITS: Final = {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": 128, "max_model_len": 512}
_EXACT: Final[dict[str, Any]] = {"dtype": "float32", "block_size": BLOCK_SIZE, "num_blocks": 160, **_LIMITS}
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
    drawn: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "min_p": 0.001, "max_tokens": 24}
    drawn |= {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1}
    prompts = [job.prompt for job in greedy_jobs(49152, count=24, longest=160, max_tokens=1, seed=2)]
    pairs = [
        (prompt, SamplingParams(**drawn, ignore_eos=True, seed=index // 2), index % 2)
        for index, prompt in enumerate(prompts)
    ]
    calm, disturbed = ([EngineJob(*pair) for pair in pairs] for _ in range(2))
    with demo_engine("vllm", **_EXACT, **_EAGER) as engine:
        workload = PlanWorkload(engine, BLOCK_SIZE, MAX_NUM_SEQS, seed=3)
        workload.run(calm, disturb=False)
        workload.run(disturbed, disturb=True)
    differ = sum(one.output != other.output for one, other in zip(calm, disturbed, strict=True))
    return Measurement(differ, workload.seen)


# -- gaps between steps


async def _gap(concurrency: int) -> Measurement:
    """Return the mean gap over the mean step, as the worker saw them while all requests decoded."""
    port = free_port()
    args = f"--runner vllm --num-blocks 1024 --max-model-len 1024 --metrics-port {port}".split()
    options: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "skip_text": True}
    with system.running(worker_args=args) as stack:
        async with AsyncClient(stack.endpoint) as client:
            decoding = [asyncio.Event() for _ in range(concurrency)]

            async def request(number: int) -> None:
                prompt = [10 + number + index for index in range(128)]
                async for delta in client.stream(prompt, max_tokens=NUM_STEPS + 200, **options):
                    if delta.token_ids:
                        decoding[number].set()

            tasks = [asyncio.create_task(request(number)) for number in range(concurrency)]
            for one in decoding:
                await one.wait()
            before = await asyncio.to_thread(_sums, port)
            after = before
            while after["count"] - before["count"] < NUM_STEPS:
                await asyncio.sleep(0.5)
                after = await asyncio.to_thread(_sums, port)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    steps = after.pop("count") - before["count"]
    mean_us = {name: (after[name] - before[name]) / steps * 1e6 for name in after}
    gap_us = mean_us["bubble"] + mean_us["overhead"] + mean_us["copy"]
    details = {f"{name}_us": round(value, 1) for name, value in mean_us.items()}
    return Measurement(gap_us / mean_us["step"], {"steps": steps, **details})


def _sums(port: int) -> dict[str, float]:
    """Read the sums of the worker's histograms, and the number of steps."""
    text = system.metrics(f"http://127.0.0.1:{port}")
    sums = re.findall(r"^octavo_worker_(step|bubble|overhead|copy)_seconds_sum (\S+)$", text, re.MULTILINE)
    count = re.findall(r"^octavo_worker_step_seconds_(count) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in (*sums, *count)}


for number, requests, bound in ((1, "one request", 0.05), (32, "32 requests", 0.03)):
    what = f"mean gap between two steps of vLLM with {requests}, over {NUM_STEPS} steps of a running stack"
    promised = entry(f"vllm.overhead_b{number}", "share of a step", at_most(bound), long=True, measures=what)
    promised(partial(_gap, number))


# -- throughput

PROMPT_TOKENS: Final = 128
OUTPUT_TOKENS: Final = 64
SEATS: Final = 32
_WORKER: Final = ("--runner", "vllm", *limits(SEATS))
_STACK: Final[dict[str, Any]] = {"scheduler_args": system.UNSHED, "worker_args": _WORKER}
_GREEDY: Final[dict[str, Any]] = {"temperature": 0.0, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}


def _prompt(number: int) -> list[int]:
    """Return a prompt that shares no block with another."""
    return [10 + (number * 31 + index * 7) % 40_000 for index in range(PROMPT_TOKENS)]


def _rate(ask: Callable[[int], Awaitable[int]], concurrency: int) -> system.Rate:
    return lambda: system.tokens_per_s(ask, 2 * concurrency, concurrency, OUTPUT_TOKENS)


def _octavo(client: AsyncClient, concurrency: int) -> system.Rate:
    async def ask(number: int) -> int:
        return len((await client.generate(_prompt(number), **_GREEDY)).token_ids)

    return _rate(ask, concurrency)


@asynccontextmanager
async def _serve(concurrency: int) -> AsyncIterator[system.Rate]:
    """`vllm serve`, in the environment that our worker makes for itself."""
    async with (
        vllm_serve(*limits(SEATS, serve=True)) as server,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):

        async def ask(number: int) -> int:
            return await system.completion(session, server.base_url, MODEL, _prompt(number), OUTPUT_TOKENS)

        yield _rate(ask, concurrency)


@asynccontextmanager
async def _executor(concurrency: int) -> AsyncIterator[system.Rate]:
    """An engine over vLLM in this process, without a server."""
    with demo_engine("vllm", num_blocks=1024, max_model_len=1024, max_num_seqs=SEATS) as engine:
        workload, count = PlanWorkload(engine, None, concurrency), 2 * concurrency

        async def rate() -> float:
            first = time.monotonic_ns() % 1_000_003
            jobs = [EngineJob(_prompt(first + number), SamplingParams(**_GREEDY)) for number in range(count)]
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
            rates = await system.in_turns({"octavo": _octavo(client, concurrency), "other": other})
    return system.median_ratio(*rates.values(), **system.rounded(rates))


for number in (1, 8, 32):
    for name, bound, whom, peer in (
        ("e2e", 1.0, "`vllm serve`", _serve),
        ("limit", 0.95, "vLLM's executor alone", _executor),
    ):
        what = f"output tokens per second of Octavo over those of {whom}, {number} at a time"
        promised = entry(f"vllm.{name}_ratio_c{number}", "ratio", at_least(bound), long=True, measures=what)
        promised(partial(_ratio, peer, number))


@entry("vllm.cpu_us_per_token", "us", long=True)
async def cpu_us_per_token() -> Measurement:
    """CPU of scheduler, worker shell and client per output token, 32 requests at a time over vLLM

    The worker's shell is its main thread; the engine's thread and those of OpenMP are not in it.
    """
    with system.running(**_STACK) as stack:
        worker = psutil.Process(stack.workers[0].process.pid)

        def spent_s() -> dict[str, float]:
            (shell,) = [thread for thread in worker.threads() if thread.id == worker.pid]
            services = {"scheduler": system.cpu_s(stack.scheduler), "client": system.cpu_s()}
            return {**services, "worker shell": shell.user_time + shell.system_time}

        async with AsyncClient(stack.endpoint) as client:
            rate = _octavo(client, SEATS)
            await rate()
            before = spent_s()
            for _ in range(system.ROUNDS):
                await rate()
            after = spent_s()
    tokens = system.ROUNDS * 2 * SEATS * OUTPUT_TOKENS
    per_token = {name: (after[name] - before[name]) / tokens * 1e6 for name in after}
    return Measurement(sum(per_token.values()), {name: round(value, 1) for name, value in per_token.items()})
