"""Octavo over vLLM against `vllm serve`, and against vLLM's executor with no server at all.

The same model, settings, environment and traffic (128 tokens in, 64 out), in turns within one run, so that
what else the machine does falls on all alike.
"""

# ruff: noqa: PLC0415 - torch and vLLM take seconds to import, and need not be installed

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import psutil
from octavo.aio import AsyncClient
from octavo.sampling import SamplingParams
from octavo.stack import Stack, StackConfig

from octavo_lab.scorecard import Measured, at_least, entry
from octavo_lab.scorecard.vllm_server import vllm_serve

if TYPE_CHECKING:
    import aiohttp

    from worker_svc.engine.loop import StepEngine

PROMPT_TOKENS: Final = 128
OUTPUT_TOKENS: Final = 64
ROUNDS: Final = 3
MAX_NUM_SEQS: Final = 32
MAX_NUM_BATCHED_TOKENS: Final = 512
MAX_MODEL_LEN: Final = 1024
NUM_BLOCKS: Final = 1024
BLOCK_SIZE: Final = 32
READY_S: Final = 1200.0
Rate = Callable[[int], Awaitable[float]]
"""Runs one round at a concurrency and returns output tokens per second."""


def _register() -> None:
    for concurrency in (1, 8, 32):
        _register_ratios(concurrency)


def _register_ratios(concurrency: int) -> None:
    @entry(
        f"vllm.e2e_ratio_c{concurrency}",
        f"output tokens per second of Octavo over those of `vllm serve`, {concurrency} at a time",
        "ratio",
        at_least(1.0),
        long=True,
    )
    async def e2e_ratio() -> Measured:
        async with _octavo() as octavo, _vllm_serve() as serve:
            return await _ratio(octavo, serve, concurrency)

    @entry(
        f"vllm.limit_ratio_c{concurrency}",
        f"output tokens per second of Octavo over those of vLLM's executor alone, {concurrency} at a time",
        "ratio",
        at_least(0.95),
        long=True,
    )
    async def limit_ratio() -> Measured:
        _enter()
        async with _octavo() as octavo, _executor() as executor:
            return await _ratio(octavo, executor, concurrency)

    e2e_ratio.__qualname__ += str(concurrency)
    limit_ratio.__qualname__ += str(concurrency)


@entry(
    "vllm.cpu_us_per_token",
    "CPU of scheduler, worker shell and client per output token, 32 requests at a time over vLLM",
    "us",
    long=True,
)
async def cpu_us_per_token() -> Measured:
    """The worker's shell is its main thread; the engine's thread and those of OpenMP are not in it."""
    with _stack() as stack:
        await asyncio.to_thread(stack.wait_ready, READY_S)
        async with AsyncClient(stack.endpoint) as client:
            await _octavo_round(client, MAX_NUM_SEQS)
            before = _cpu_s(stack)
            for _ in range(ROUNDS):
                await _octavo_round(client, MAX_NUM_SEQS)
            after = _cpu_s(stack)
    tokens = ROUNDS * _requests_of(MAX_NUM_SEQS) * OUTPUT_TOKENS
    per_token = {name: (after[name] - before[name]) / tokens * 1e6 for name in after}
    return Measured(sum(per_token.values()), {name: round(value, 1) for name, value in per_token.items()})


async def _ratio(octavo: Rate, other: Rate, concurrency: int) -> Measured:
    """Take turns; the ratio is that of the medians."""
    ours, theirs = [], []
    await octavo(concurrency)
    await other(concurrency)
    for _ in range(ROUNDS):
        ours.append(await octavo(concurrency))
        theirs.append(await other(concurrency))
    return Measured(
        statistics.median(ours) / statistics.median(theirs),
        {"octavo tokens/s": [round(rate, 1) for rate in ours], "other": [round(rate, 1) for rate in theirs]},
    )


def _requests_of(concurrency: int) -> int:
    return max(2, 2 * concurrency)


def _prompt(number: int) -> list[int]:
    """Return a prompt that shares no block with another."""
    return [10 + (number * 31 + index * 7) % 40_000 for index in range(PROMPT_TOKENS)]


async def _round(concurrency: int, ask: Callable[[list[int]], Awaitable[int]]) -> float:
    """Keep `concurrency` requests under way until all have been answered."""
    room = asyncio.Semaphore(concurrency)

    async def one(number: int) -> int:
        async with room:
            return await ask(_prompt(time.monotonic_ns() % 1_000_003 + number))

    count = _requests_of(concurrency)
    started = time.perf_counter()
    tokens = sum(await asyncio.gather(*map(one, range(count))))
    elapsed = time.perf_counter() - started
    if tokens != count * OUTPUT_TOKENS:
        raise RuntimeError(f"{tokens} tokens came, {count * OUTPUT_TOKENS} were asked for")
    return tokens / elapsed


# -- Octavo


def _stack() -> Stack:
    return Stack(
        StackConfig(
            # As `vllm serve` does, take all that comes.
            scheduler_args=("--no-overload-control",),
            worker_args=(
                *("--runner", "vllm", "--max-num-seqs", str(MAX_NUM_SEQS)),
                *("--max-num-batched-tokens", str(MAX_NUM_BATCHED_TOKENS)),
                *("--num-blocks", str(NUM_BLOCKS), "--max-model-len", str(MAX_MODEL_LEN)),
            ),
        )
    )


@asynccontextmanager
async def _octavo() -> AsyncIterator[Rate]:
    with _stack() as stack:
        await asyncio.to_thread(stack.wait_ready, READY_S)
        async with AsyncClient(stack.endpoint) as client:
            yield lambda concurrency: _octavo_round(client, concurrency)


async def _octavo_round(client: AsyncClient, concurrency: int) -> float:
    async def ask(prompt: list[int]) -> int:
        result = await client.generate(prompt, max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
        return len(result.token_ids)

    return await _round(concurrency, ask)


def _cpu_s(stack: Stack) -> dict[str, float]:
    """Return CPU seconds so far, by who spent them."""

    def of(process: psutil.Process) -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    scheduler = psutil.Process(stack.scheduler.process.pid)
    worker = psutil.Process(stack.workers[0].process.pid)
    (shell,) = [thread for thread in worker.threads() if thread.id == worker.pid]
    return {
        "scheduler": of(scheduler) + sum(of(child) for child in scheduler.children()),
        "worker shell": shell.user_time + shell.system_time,
        "client": of(psutil.Process()),
    }


# -- vllm serve


@asynccontextmanager
async def _vllm_serve() -> AsyncIterator[Rate]:
    """`vllm serve`, in the environment that our worker makes for itself."""
    import aiohttp

    async with (
        vllm_serve(
            *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS)),
            *("--block-size", str(BLOCK_SIZE), "--max-num-batched-tokens", str(MAX_NUM_BATCHED_TOKENS)),
            *("--num-gpu-blocks-override", str(NUM_BLOCKS + 1)),
        ) as server,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        yield lambda concurrency: _round(
            concurrency, lambda prompt: _completion(session, server.base_url, prompt)
        )


async def _completion(session: aiohttp.ClientSession, base: str, prompt: list[int]) -> int:
    """Stream one completion and return its number of tokens."""
    body = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    tokens = 0
    async with session.post(f"{base}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                usage = json.loads(line[len(b"data: ") :]).get("usage")
                tokens = usage["completion_tokens"] if usage else tokens
    return tokens


# -- vLLM's executor alone


@dataclass(slots=True)
class _Direct:
    """An engine without a server, which keeps so many sequences under way."""

    engine: StepEngine
    step: int = 0
    handle: int = 0

    def round(self, concurrency: int) -> float:
        from octavo.protocol.steps import Admit, Plan

        left = count = _requests_of(concurrency)
        sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        num_left: dict[int, int] = {}
        started = time.perf_counter()
        while left or self.engine.num_live:
            admits: list[Admit] = []
            while left and self.engine.num_live + len(admits) < concurrency:
                self.handle += 1
                left -= 1
                admits.append(Admit(self.handle, _prompt(self.handle), PROMPT_TOKENS, sampling))
                num_left[self.handle] = PROMPT_TOKENS
            self.step += 1
            plan = Plan(self.step, tuple(admits), tuple(num_left.items()))
            report = self.engine.run_step(plan, time.perf_counter)
            for handle, tokens in report.prefilled:
                num_left[handle] -= tokens
                if not num_left[handle]:
                    del num_left[handle]
        return count * OUTPUT_TOKENS / (time.perf_counter() - started)


@asynccontextmanager
async def _executor() -> AsyncIterator[Rate]:
    from worker_svc.config import WorkerSettings
    from worker_svc.start.load import build, load_runner

    settings = WorkerSettings.load(
        {
            "model": "demo",
            "runner": "vllm",
            "num_blocks": NUM_BLOCKS,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": MAX_NUM_SEQS,
            "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        }
    )
    runner = load_runner(settings, lambda what, fraction: None)
    direct = _Direct(build(settings, runner).engine)

    async def rate(concurrency: int) -> float:
        return direct.round(concurrency)

    try:
        yield rate
    finally:
        runner.close()


def _enter() -> None:
    from worker_svc.runner.vllm import installed, placement

    placement.enter(ranks=1, num_threads=None)
    installed.prepare()


_register()
