"""The OpenAI gateway: public clients, hostile bodies, leaving clients, cost, and `vllm serve` beside it."""

from __future__ import annotations

import asyncio
import json
import random
import re
import tempfile
from collections import Counter
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

# -- clients -------------------------------------------------------------------------------------


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
    sim = ("--runner", "sim", "--sim-speed", "20", "--max-model-len", "512")
    with system.running(model="sim", worker_args=sim, gateway_port=0) as stack:
        command = (
            *(str(BIN / "schemathesis"), "run", f"{system.base_url(stack)}/openapi.json", "--seed", "1"),
            *("--max-examples", "60", "--checks", "not_a_server_error", "--continue-on-failure"),
            *("--phases", "examples,coverage,fuzzing", "--request-timeout", "60"),
        )
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
    found = Counter[str]()
    counted = r'octavo_gateway_requests_total\{.*?status="(\d+)"\} (\S+)'
    for status, count in re.findall(counted, system.metrics(system.base_url(stack))):
        found[status] += int(float(count))
    return found


# -- leaks ---------------------------------------------------------------------------------------

NUM_STREAMS: Final = 200
STREAM_TOKENS: Final = 64


@entry("gateway.leaks", "count", at_most(0))
async def leaks() -> Measurement:
    """200 concurrent SSE streams, half of their clients leave at random: requests, blocks, connections and
    descriptors that stay, and streams of the others that are not complete

    Everything has to be as before, in the gateway, the scheduler and the worker.
    """
    chance = random.Random(7)
    args = ("--runner", "sim", "--max-num-seqs", "64")
    with system.running(model="sim", worker_args=args, gateway_port=0) as stack:
        process = psutil.Process(system.gateway(stack).process.pid)
        async with AsyncClient(stack.endpoint) as watcher:
            await _stream(stack, 0, None)
            descriptors = process.num_fds()
            staying = [None if number % 2 else chance.random() * 3.0 for number in range(NUM_STREAMS)]
            complete = await asyncio.gather(
                *(_stream(stack, number, leaves_after) for number, leaves_after in enumerate(staying))
            )
            status = await system.until_idle(watcher, num_workers=1)
        for _ in range(100):  # Connections need time to close.
            if (more := process.num_fds() - descriptors) <= 0:
                break
            await asyncio.sleep(0.1)
        gauge = re.findall(
            r"octavo_gateway_running_requests\{.*?\} (\S+)", system.metrics(system.base_url(stack))
        )
        left = {
            "incomplete": sum(
                leaves_after is None and not whole
                for leaves_after, whole in zip(staying, complete, strict=True)
            ),
            "descriptors": max(0, more),
            "running in the gateway": int(sum(map(float, gauge))),
            **system.left_behind(status),
        }
        seen = {"outcomes": dict(status.outcomes), "answers": _statuses(stack)}
    return Measurement(sum(left.values()), {**left, **seen})


async def _stream(stack: Stack, number: int, leaves_after: float | None) -> bool:
    """Read a stream to its end on a connection of its own, or leave it; return whether it was complete."""
    async with aiohttp.ClientSession() as session:
        try:
            async with asyncio.timeout(system.READY_S if leaves_after is None else leaves_after):
                base, prompt = system.base_url(stack), system.prompt(number)
                tokens = await system.completion(session, base, "sim", prompt, STREAM_TOKENS)
        except (TimeoutError, aiohttp.ClientError, RuntimeError):
            return False
    return tokens == STREAM_TOKENS


# -- cost ----------------------------------------------------------------------------------------

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
                tokens = 0
                async for delta in client.stream(
                    system.prompt(number), max_tokens=OUTPUT_TOKENS, temperature=0, ignore_eos=True
                ):
                    tokens += len(delta.token_ids)
                return tokens

            async def over_http(number: int) -> int:
                return await system.completion(session, base, model, system.prompt(number), OUTPUT_TOKENS)

            before = system.cpu_s(system.gateway(stack))
            size = (CONCURRENCY, CONCURRENCY, OUTPUT_TOKENS)
            rates = await system.in_turns(
                {
                    "gateway": lambda: system.tokens_per_s(over_http, *size),
                    "grpc": lambda: system.tokens_per_s(over_grpc, *size),
                }
            )
            cpu_s = system.cpu_s(system.gateway(stack)) - before
    tokens = (1 + system.ROUNDS) * CONCURRENCY * OUTPUT_TOKENS
    details: dict[str, Any] = system.rounded(rates)
    details["gateway CPU us per token"] = round(1e6 * cpu_s / tokens, 1)
    return system.median_ratio(rates["gateway"], rates["grpc"], **details)


# -- beside `vllm serve` -------------------------------------------------------------------------


@entry("gateway.vllm_mismatches", "count", at_most(0), long=True)
async def vllm_mismatches() -> Measurement:
    """of 50 greedy requests, those whose text, end, usage or log probabilities differ from `vllm serve`

    The same model in float32. One server after the other, one request after the other: each has the machine
    to itself.
    """
    wanted = questions()
    eager = ("--dtype", "float32", "--enforce-eager")
    with system.running(worker_args=("--runner", "vllm", *limits(32), *eager), gateway_port=0) as stack:
        model = _model(stack)
        ours = [answer(system.base_url(stack), model, one) for one in wanted]
    async with vllm_serve(*limits(32, serve=True), eager[-1], dtype="float32") as server:
        theirs = [answer(server.base_url, MODEL, one) for one in wanted]
    OUTPUT.mkdir(parents=True, exist_ok=True)
    kept = [
        {"path": path, "body": body, "octavo": mine, "vllm serve": yours}
        for (path, body), mine, yours in zip(wanted, ours, theirs, strict=True)
    ]
    (OUTPUT / "vllm-answers.json").write_text(json.dumps(kept, indent=1, ensure_ascii=False))
    found = {
        f"{number} {path} {json.dumps(body, ensure_ascii=False)}": differing
        for number, ((path, body), mine, yours) in enumerate(zip(wanted, ours, theirs, strict=True))
        if (differing := [*differences(mine, yours)])
    }
    answered = sum("choices" in one for one in theirs)
    return Measurement(len(found), {"requests": len(wanted), "answered by vllm serve": answered, **found})
