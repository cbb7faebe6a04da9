"""What measures of a running system share: a stack that serves, what it holds and costs, rounds in turns."""

from __future__ import annotations

import asyncio
import re
import statistics
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import aiohttp
import psutil
from octavo.aio import AsyncClient
from octavo.stack import Child, Stack, StackConfig
from octavo.status import Status

from octavo_lab.scorecard import Measurement

READY_S: Final = 1200.0
"""vLLM compiles while it starts."""
ROUNDS: Final = 3
PROMPT: Final = "The octavo is a format of book, made by folding each printed sheet three times, so that"
UNSHED: Final = ("--no-overload-control",)
"""Arguments of a scheduler that takes all that comes: on a slow machine it would refuse some of the load."""


def prompt(number: int) -> str:
    """Return a prompt that shares no prefix with one of another number."""
    return f"{number}: {PROMPT}"


@contextmanager
def running(**settings: Any) -> Iterator[Stack]:
    """A stack that serves, on free ports; `settings` are those of StackConfig.

    Its children die with the thread that enters, so this is no place for `asyncio.to_thread`.
    """
    with Stack(StackConfig(**settings)) as stack:
        stack.wait_ready(READY_S)
        yield stack


async def until_idle(client: AsyncClient, num_workers: int) -> Status:
    """Return the first status in which nothing runs or waits and every worker is there."""
    async with asyncio.timeout(240.0):
        async for status in client.watch_status(0.1):
            ready = [worker for worker in status.workers if worker.state == "ready"]
            busy = any(worker.running or worker.pool.active for worker in ready)
            if len(ready) == num_workers and not busy and not status.live_requests:
                return status
    raise RuntimeError("the scheduler went away")


def left_behind(status: Status) -> dict[str, int]:
    """Count what an idle system should not have: blocks in use, and requests without an outcome."""
    pools = [worker.pool for worker in status.workers]
    blocks = sum(pool.total - pool.free - pool.evictable for pool in pools)
    requests = abs(status.arrivals - sum(status.outcomes.values()) - status.live_requests)
    return {"blocks not given back": blocks, "requests unaccounted for": requests}


def gateway(stack: Stack) -> Child:
    """Return the gateway of a stack that has one."""
    assert stack.gateway is not None
    return stack.gateway


def base_url(stack: Stack) -> str:
    """Return the address of the stack's gateway as a URL."""
    return f"http://{gateway(stack).address}"


def metrics(base: str) -> str:
    """Return the metrics that a server of ours shows."""
    with urllib.request.urlopen(f"{base}/metrics", timeout=10) as answer:  # noqa: S310 # our own address
        return str(answer.read().decode())


def cpu_s(child: Child | None = None) -> float:
    """Return the CPU seconds so far of a child with all that it started, or of this process."""
    root = psutil.Process(None if child is None else child.process.pid)
    times = [one.cpu_times() for one in (root, *(root.children(recursive=True) if child else ()))]
    return float(sum(one.user + one.system for one in times))


async def completion(
    session: aiohttp.ClientSession, base: str, model: str, prompt: str | list[int], max_tokens: int
) -> int:
    """Stream a greedy completion over HTTP; return how many tokens the server says it has sent."""
    body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": max_tokens}
    body.update(temperature=0, ignore_eos=True, stream=True, stream_options={"include_usage": True})
    last = b""
    async with session.post(f"{base}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for piece in answer.content.iter_any():
            last = (last + piece)[-4096:]
    found = re.search(rb'"completion_tokens":\s*(\d+)', last)
    if found is None or b"data: [DONE]" not in last:
        raise RuntimeError("the stream broke off")
    return int(found[1])


Rate = Callable[[], Awaitable[float]]
"""Runs one round; returns its rate, the more the better."""


async def tokens_per_s(
    ask: Callable[[int], Awaitable[int]], count: int, concurrency: int, tokens_each: int
) -> float:
    """Keep `concurrency` requests under way until all have been answered, no two rounds the same.

    `ask` makes the request of a number and returns its output tokens, which must be `tokens_each`.
    """
    room, first = asyncio.Semaphore(concurrency), time.monotonic_ns() % 1_000_003

    async def one(number: int) -> int:
        async with room:
            return await ask(first + number)

    started = time.perf_counter()
    tokens = sum(await asyncio.gather(*map(one, range(count))))
    if tokens != count * tokens_each:
        raise RuntimeError(f"{tokens} tokens came, {count * tokens_each} were asked for")
    return tokens / (time.perf_counter() - started)


async def in_turns(arms: Mapping[str, Rate], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Let each arm warm up, then have its rounds in turn, so that what else the machine does hits all."""
    found: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(1 + rounds):
        for name, rate in arms.items():
            found[name].append(await rate())
    return {name: rates[1:] for name, rates in found.items()}


def median_ratio(over: Sequence[float], under: Sequence[float], **details: Any) -> Measurement:
    """Return the ratio of two medians."""
    return Measurement(statistics.median(over) / statistics.median(under), details)


def rounded(figures: Mapping[str, Sequence[float]], digits: int = 1) -> dict[str, list[float]]:
    """Return figures of rounds as a person reads them."""
    return {name: [round(value, digits) for value in values] for name, values in figures.items()}
