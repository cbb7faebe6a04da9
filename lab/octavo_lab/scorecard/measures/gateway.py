"""The OpenAI gateway: public clients, hostile bodies, leaving clients, cost, and `vllm serve` beside it."""

from __future__ import annotations

import asyncio
import json
import random
import re
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, Final

import aiohttp
import psutil
from octavo.aio import AsyncClient
from octavo.client import Client
from octavo.stack import Stack

from octavo_lab.scorecard import Measurement, at_least, at_most, entry, system
from octavo_lab.scorecard.gateway_clients import BIN, OUTPUT, Program, programs
from octavo_lab.scorecard.gateway_parity import answer, differences, questions
from octavo_lab.scorecard.vllm_server import MODEL, limits, model_with_tokenizer, vllm_serve

# -- clients


@entry("gateway.clients_failing", "count", at_most(0), long=True)
def clients_failing() -> Measurement:
    """public clients (openai, langchain-openai, vllm bench serve, locust, wrk, hey, curl) that fail

    Their output is kept in build/gateway-clients.
    """
    with tempfile.TemporaryDirectory(prefix="octavo-tokenizer-") as folder:
        tokenizer, _ = model_with_tokenizer(Path(folder), "auto")
        with system.running(gateway_port=0) as stack:
            found = {
                program.name: program.fails() or "works"
                for program in programs(system.base_url(stack), _model(stack), tokenizer)
            }
    return Measurement(sum(why != "works" for why in found.values()), found)


def _model(stack: Stack) -> str:
    with Client(stack.endpoint) as client:
        return client.models()[0].id


@entry("gateway.schemathesis_5xx", "count", at_most(0), long=True)
def schemathesis_5xx() -> Measurement:
    """answers of 5xx that schemathesis finds with requests drawn from the OpenAPI document

    The model is simulated, so that many requests are answered. The report is kept.
    """
    return server_errors(max_examples=60)


def server_errors(max_examples: int) -> Measurement:
    """Count answers of 5xx to so many requests of each route."""
    sim = ("--runner", "sim", "--sim-speed", "20", "--max-model-len", "512")
    with system.running(model="sim", worker_args=sim, gateway_port=0) as stack:
        flags = f"run {system.base_url(stack)}/openapi.json --seed 1 --request-timeout 60"
        flags += f" --max-examples {max_examples} --phases examples,coverage,fuzzing"
        checks = "--checks not_a_server_error --continue-on-failure"
        command = (str(BIN / "schemathesis"), *f"{flags} {checks}".split())
        env = {"NO_COLOR": "1", "PYTHONHASHSEED": "0"}
        _, said = Program("schemathesis", command, env=env).run(1200.0)
        statuses = _statuses(stack)
    if "test cases" not in said.lower() and "passed" not in said.lower():
        raise RuntimeError(f"schemathesis did not run: {said[-300:]}")
    errors = sum(count for status, count in statuses.items() if status.startswith("5"))
    found = len(re.findall(r"Server error", said))
    return Measurement(max(errors, found), {"answers of generation": statuses, "reported": found})


def _statuses(stack: Stack) -> Counter[str]:
    """Return how many requests were answered with each status."""
    found, counted = Counter[str](), r'octavo_gateway_requests_total\{.*?status="(\d+)"\} (\S+)'
    for status, count in re.findall(counted, system.metrics(system.base_url(stack))):
        found[status] += int(float(count))
    return found


# -- leaks

NUM_STREAMS: Final = 200
STREAM_TOKENS: Final = 64


@entry("gateway.leaks", "count", at_most(0))
async def leaks() -> Measurement:
    """200 concurrent SSE streams, half of their clients leave at random: requests, blocks, connections and
    descriptors that stay, and streams of the others that are not complete

    Everything has to be as before, in the gateway, the scheduler and the worker.
    """
    chance = random.Random(7)
    leave_after = [None if number % 2 else chance.random() * 3.0 for number in range(NUM_STREAMS)]
    args = ("--runner", "sim", "--max-num-seqs", "64")
    with system.running(model="sim", worker_args=args, gateway_port=0) as stack:
        base, process = system.base_url(stack), psutil.Process(system.gateway(stack).process.pid)
        async with AsyncClient(stack.endpoint) as watcher:
            await _stream(base, 0, None)
            descriptors = process.num_fds()
            incomplete = await asyncio.gather(*(_stream(base, *one) for one in enumerate(leave_after)))
            status = await system.until_idle(watcher, num_workers=1)
        for _ in range(100):  # Connections need time to close.
            if (more := process.num_fds() - descriptors) <= 0:
                break
            await asyncio.sleep(0.1)
        gauge = re.findall(r"octavo_gateway_running_requests\{.*?\} (\S+)", system.metrics(base))
        left = {
            "incomplete": sum(incomplete),
            "descriptors": max(0, more),
            "running in the gateway": int(sum(map(float, gauge))),
            **system.left_behind(status),
        }
        seen = {"outcomes": dict(status.outcomes), "answers": _statuses(stack)}
    return Measurement(sum(left.values()), {**left, **seen})


async def _stream(base: str, number: int, leave_after: float | None) -> bool:
    """Read a stream on a connection of its own, or leave it; return whether it ended before it should."""
    async with aiohttp.ClientSession() as session:
        try:
            async with asyncio.timeout(leave_after or system.READY_S):
                tokens = await system.completion(session, base, "sim", system.prompt(number), STREAM_TOKENS)
        except (TimeoutError, aiohttp.ClientError, RuntimeError):
            return leave_after is None
    return leave_after is None and tokens != STREAM_TOKENS


# -- cost

CONCURRENCY: Final = 32
OUTPUT_TOKENS: Final = 48


@entry("gateway.cost_ratio", "ratio", at_least(0.95), long=True)
async def cost_ratio() -> Measurement:
    """output tokens per second streamed through the gateway over those streamed over gRPC, 32 at a time

    The demo model, in turns; the ratio of the medians.
    """
    with system.running(gateway_port=0) as stack:
        async with (
            AsyncClient(stack.endpoint) as client,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session,
        ):
            base, model = system.base_url(stack), (await client.models())[0].id

            async def over_grpc(number: int) -> int:
                deltas = client.stream(
                    system.prompt(number), max_tokens=OUTPUT_TOKENS, temperature=0, ignore_eos=True
                )
                return sum([len(delta.token_ids) async for delta in deltas])

            async def over_http(number: int) -> int:
                return await system.completion(session, base, model, system.prompt(number), OUTPUT_TOKENS)

            before = system.cpu_s(system.gateway(stack))
            size = (CONCURRENCY, CONCURRENCY, OUTPUT_TOKENS)
            arms = {"gateway": over_http, "grpc": over_grpc}
            rates = await system.in_turns(
                {name: partial(system.tokens_per_s, ask, *size) for name, ask in arms.items()}
            )
            cpu_s = system.cpu_s(system.gateway(stack)) - before
    tokens = (1 + system.ROUNDS) * CONCURRENCY * OUTPUT_TOKENS
    details: dict[str, Any] = system.rounded(rates)
    details["gateway CPU us per token"] = round(1e6 * cpu_s / tokens, 1)
    return system.median_ratio(rates["gateway"], rates["grpc"], **details)


# -- beside `vllm serve`


@entry("gateway.vllm_mismatches", "count", at_most(0), long=True)
async def vllm_mismatches() -> Measurement:
    """of 50 greedy requests, those whose text, end, usage or log probabilities differ from `vllm serve`

    The same model in float32. One server after the other, one request after the other: each has the machine
    to itself.
    """
    eager = ("--dtype", "float32", "--enforce-eager")
    with system.running(worker_args=("--runner", "vllm", *limits(32), *eager), gateway_port=0) as stack:
        model = _model(stack)
        ours = [answer(system.base_url(stack), model, one) for one in questions()]
    async with vllm_serve(*limits(32, serve=True), eager[-1], dtype="float32") as server:
        theirs = [answer(server.base_url, MODEL, one) for one in questions()]
    asked = list(zip(questions(), ours, theirs, strict=True))
    kept = [
        {"path": path, "body": body, "octavo": mine, "vllm serve": yours}
        for (path, body), mine, yours in asked
    ]
    OUTPUT.mkdir(parents=True, exist_ok=True)
    (OUTPUT / "vllm-answers.json").write_text(json.dumps(kept, indent=1, ensure_ascii=False))
    found = {
        f"{number} {path} {json.dumps(body, ensure_ascii=False)}": differing
        for number, ((path, body), mine, yours) in enumerate(asked)
        if (differing := [*differences(mine, yours)])
    }
    answered = sum("choices" in one for one in theirs)
    return Measurement(len(found), {"requests": len(asked), "answered by vllm serve": answered, **found})
