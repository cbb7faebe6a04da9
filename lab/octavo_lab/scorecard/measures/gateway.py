"""The OpenAI gateway: public clients, hostile bodies, leaving clients, and its cost."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import psutil
from octavo.aio import AsyncClient
from octavo.client import Client
from octavo.stack import Child, Stack

from octavo_lab.scorecard import Measured, at_least, at_most, entry
from octavo_lab.scorecard import gateway_clients as clients
from octavo_lab.scorecard.measures.e2e import PROMPT, READY_S, running, until_idle
from octavo_lab.scorecard.vllm_server import model_with_tokenizer

SIM: Final = ("--runner", "sim", "--sim-speed", "20", "--max-model-len", "512")
_HEAD: Final = ("POST /v1/completions HTTP/1.1", "host: x", "content-type: application/json")


def _gateway(stack: Stack) -> Child:
    if stack.gateway is None:
        raise RuntimeError("the stack has no gateway")
    return stack.gateway


def _base(stack: Stack) -> str:
    return f"http://{_gateway(stack).address}"


async def _open(stack: Stack, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a completion on a connection of its own."""
    host, _, port = _gateway(stack).address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(body).encode()
    head = "\r\n".join((*_HEAD, f"content-length: {len(content)}", "", ""))
    writer.write(head.encode() + content)
    await writer.drain()
    return reader, writer


# -- clients -------------------------------------------------------------------------------------


@entry(
    "gateway.clients_failing",
    "public clients (openai, langchain-openai, vllm bench serve, locust, wrk, hey, curl) that fail",
    "count",
    at_most(0),
    long=True,
)
def clients_failing() -> Measured:
    """Their output is kept in build/gateway-clients."""
    with tempfile.TemporaryDirectory(prefix="octavo-tokenizer-") as folder:
        tokenizer, _ = model_with_tokenizer(Path(folder), "auto")
        with running(gateway_port=0) as stack:
            with Client(stack.endpoint) as client:
                model = client.models()[0].id
            failing = {
                program.name: clients.fails(program)
                for program in clients.programs(_base(stack), model, tokenizer)
            }
    found = {name: why or "works" for name, why in failing.items()}
    return Measured(sum(why is not None for why in failing.values()), found)


@entry(
    "gateway.schemathesis_5xx",
    "answers of 5xx that schemathesis finds with requests drawn from the OpenAPI document",
    "count",
    at_most(0),
    long=True,
)
def schemathesis_5xx() -> Measured:
    """The model is simulated, so that many requests are answered. The report is kept."""
    program = clients.ENVIRONMENT / "bin/schemathesis"
    if shutil.which(str(program)) is None:
        raise RuntimeError("schemathesis is not installed: make clients")
    clients.OUTPUT.mkdir(parents=True, exist_ok=True)
    report = clients.OUTPUT / "schemathesis.txt"
    with running(model="sim", worker_args=SIM, gateway_port=0) as stack, report.open("w") as out:
        subprocess.run(  # noqa: S603 # ours
            [
                *(str(program), "run", f"{_base(stack)}/openapi.json", "--seed", "1", "--max-examples", "60"),
                *("--checks", "not_a_server_error", "--phases", "examples,coverage,fuzzing"),
                *("--request-timeout", "60", "--continue-on-failure"),
            ],
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=1200,
            check=False,
            env={**os.environ, "NO_COLOR": "1", "PYTHONHASHSEED": "0"},
        )
        statuses = _statuses(stack)
    said = report.read_text(errors="replace")
    if "test cases" not in said.lower() and "passed" not in said.lower():
        raise RuntimeError(f"schemathesis did not run: {said[-300:]}")
    errors = sum(count for status, count in statuses.items() if status.startswith("5"))
    found = len(re.findall(r"Server error", said))
    return Measured(max(errors, found), {"answers of generation": statuses, "reported": found})


def _metrics(stack: Stack) -> str:
    with urllib.request.urlopen(f"{_base(stack)}/metrics") as answer:  # noqa: S310 # our own address
        return str(answer.read().decode())


def _statuses(stack: Stack) -> dict[str, float]:
    """Return how many requests were answered with each status."""
    text = _metrics(stack)
    found: dict[str, float] = {}
    for status, count in re.findall(r'octavo_gateway_requests_total\{.*?status="(\d+)"\} (\S+)', text):
        found[status] = found.get(status, 0) + float(count)
    return found


# -- leaks ---------------------------------------------------------------------------------------

NUM_STREAMS: Final = 200
STREAM_TOKENS: Final = 64


@entry(
    "gateway.leaks",
    "200 concurrent SSE streams, half of their clients leave at random: requests, blocks, connections and "
    "descriptors that stay, and streams of the others that are not complete",
    "count",
    at_most(0),
)
async def leaks() -> Measured:
    """Everything has to be as before, in the gateway, the scheduler and the worker."""
    chance = random.Random(7)
    args = ("--runner", "sim", "--max-num-seqs", "64")
    with running(model="sim", worker_args=args, gateway_port=0) as stack:
        process = psutil.Process(_gateway(stack).process.pid)
        async with AsyncClient(stack.endpoint) as watcher:
            await _stream(stack, 0, leaves_after=None)
            descriptors = process.num_fds()
            leaving = [number % 2 == 0 for number in range(NUM_STREAMS)]
            outcomes = await asyncio.gather(
                *(
                    _stream(stack, number, leaves_after=chance.random() * 3.0 if leaves else None)
                    for number, leaves in enumerate(leaving)
                )
            )
            status = await until_idle(watcher, num_workers=1)
        incomplete = sum(
            not complete for complete, leaves in zip(outcomes, leaving, strict=True) if not leaves
        )
        left = await asyncio.to_thread(_settle, process, descriptors)
        running_now = _gauge(stack)
        blocks = sum(
            worker.pool.total - worker.pool.free - worker.pool.evictable for worker in status.workers
        )
        unaccounted = abs(status.arrivals - sum(status.outcomes.values()) - status.live_requests)
        details = {
            "incomplete": incomplete,
            "descriptors": left,
            "running in the gateway": running_now,
            "blocks": blocks,
            "unaccounted": unaccounted,
            "outcomes": dict(status.outcomes),
            "answers": _statuses(stack),
        }
    return Measured(incomplete + left + running_now + blocks + unaccounted, details)


async def _stream(stack: Stack, number: int, leaves_after: float | None) -> bool:
    """Read a stream to its end, or leave it; return whether it was complete."""
    body = {
        "model": "sim",
        "prompt": f"{number}: {PROMPT}",
        "max_tokens": STREAM_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    reader, writer = await _open(stack, body)
    data = b""
    try:
        async with asyncio.timeout(leaves_after if leaves_after is not None else READY_S):
            while b"data: [DONE]" not in data:
                piece = await reader.read(65536)
                if not piece:
                    return False
                data += piece
    except TimeoutError:
        if leaves_after is None:
            raise
        return False
    finally:
        writer.transport.abort()
    return f'"completion_tokens":{STREAM_TOKENS},'.encode() in data


def _settle(process: psutil.Process, descriptors: int) -> int:
    """Return how many descriptors stay beyond those from before, after connections had time to close."""
    for _ in range(100):
        if process.num_fds() <= descriptors:
            return 0
        time.sleep(0.1)
    return int(process.num_fds()) - descriptors


def _gauge(stack: Stack) -> int:
    return int(sum(map(float, re.findall(r"octavo_gateway_running_requests\{.*?\} (\S+)", _metrics(stack)))))


# -- cost ----------------------------------------------------------------------------------------

CONCURRENCY: Final = 32
OUTPUT_TOKENS: Final = 48
ROUNDS: Final = 3


@entry(
    "gateway.cost_ratio",
    "output tokens per second streamed through the gateway over those streamed over gRPC, 32 at a time",
    "ratio",
    at_least(0.95),
    long=True,
)
async def cost_ratio() -> Measured:
    """The demo model, in turns; the ratio of the medians."""
    with running(gateway_port=0) as stack:
        async with AsyncClient(stack.endpoint) as client:
            model = (await client.models())[0].id

            async def over_grpc(number: int) -> int:
                tokens = 0
                async for delta in client.stream(
                    _prompt(number), max_tokens=OUTPUT_TOKENS, temperature=0, ignore_eos=True
                ):
                    tokens += len(delta.token_ids)
                return tokens

            async def over_http(number: int) -> int:
                return await _count(stack, model, _prompt(number))

            rates: dict[str, list[float]] = {"gateway": [], "grpc": []}
            await _rate(over_http)
            cpu = 0.0
            for _ in range(ROUNDS):
                rates["grpc"].append(await _rate(over_grpc))
                before = _cpu_s(stack)
                rates["gateway"].append(await _rate(over_http))
                cpu += _cpu_s(stack) - before
    medians = {name: statistics.median(values) for name, values in rates.items()}
    details: dict[str, Any] = {name: [round(rate, 1) for rate in values] for name, values in rates.items()}
    details["gateway CPU us per token"] = round(cpu / ROUNDS / CONCURRENCY / OUTPUT_TOKENS * 1e6, 1)
    return Measured(medians["gateway"] / medians["grpc"], details)


def _prompt(number: int) -> str:
    return f"{number}: {PROMPT}"


def _cpu_s(stack: Stack) -> float:
    times = psutil.Process(_gateway(stack).process.pid).cpu_times()
    return float(times.user + times.system)


async def _rate(ask: Callable[[int], Awaitable[int]]) -> float:
    started = time.perf_counter()
    first = time.monotonic_ns() % 1_000_003
    tokens = sum(await asyncio.gather(*(ask(first + number) for number in range(CONCURRENCY))))
    if tokens != CONCURRENCY * OUTPUT_TOKENS:
        raise RuntimeError(f"{tokens} tokens came, {CONCURRENCY * OUTPUT_TOKENS} were asked for")
    return tokens / (time.perf_counter() - started)


async def _count(stack: Stack, model: str, prompt: str) -> int:
    """Stream a completion and return its number of events with output."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    reader, writer = await _open(stack, body)
    last = b""
    while b"data: [DONE]" not in last:
        piece = await reader.read(65536)
        if not piece:
            raise RuntimeError("the stream broke off")
        last = (last + piece)[-4096:]
    writer.close()
    found = re.search(rb'"completion_tokens":(\d+)', last)
    return int(found[1]) if found else 0
