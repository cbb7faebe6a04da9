"""Constrained output: whether it is valid, what it costs, and what others notice of it."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from octavo.aio import AsyncClient
from octavo.protocol.steps import FinishReason
from octavo.sampling import StructuredOutput
from octavo.stack import Stack

from octavo_lab.scorecard import Measurement, at_least, at_most, entry, system
from octavo_lab.scorecard.schemas import Schema, schemas

NUM_SCHEMAS: Final = 300
_CONCURRENT: Final = 16
_MAX_TOKENS: Final = 160
_QUEUE_S: Final = 1800.0
"""A slow machine is no fault."""
_PEACE_S: Final = 15.0
_SMALL_POOL: Final = ("--num-blocks", "96", "--max-num-seqs", "16", "--max-model-len", "512")
"""Room for some of what runs: sequences are preempted."""
_PATIENT: Final = (*system.UNSHED, "--no-worker-timeout-s", "600")
_RUNNERS: Final = {"torch": (), "vllm": ("--runner", "vllm", "--enforce-eager")}
_ENDLESS: Final = StructuredOutput(regex=r"[a-z ,.A-Z]{2000}")
_NUM_PLAIN: Final = 4
_PLAIN_TOKENS: Final = 160


def _valid(schema: Schema, text: str) -> bool:
    import jsonschema  # noqa: PLC0415 - heavy

    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        return bool(kind(schema, format_checker=kind.FORMAT_CHECKER).is_valid(json.loads(text)))
    except ValueError:
        return False


async def _disturb(stack: Stack) -> None:
    """Kill a worker, and later the scheduler, in the middle of it."""
    for victim in (stack.workers[0], stack.scheduler):
        await asyncio.sleep(_PEACE_S)
        victim.kill()
        victim.start()


async def _answers(stack: Stack, asked: Sequence[Schema], *, disturbed: bool) -> Counter[str]:
    """Ask for output of each schema; return how the answers ended, and which were not valid."""
    seen: Counter[str] = Counter()
    seats = asyncio.Semaphore(_CONCURRENT)
    async with AsyncClient(stack.endpoints) as client:

        async def ask(number: int, schema: Schema) -> None:
            async with seats:
                result = await client.chat(
                    f"{number}: an example of JSON that follows {json.dumps(schema)[:300]}",
                    structured=StructuredOutput(
                        json_schema=json.dumps(schema), strict=True, compact=number % 2 == 0
                    ),
                    temperature=1.0,
                    seed=number,
                    max_tokens=_MAX_TOKENS,
                    queue_timeout=_QUEUE_S,
                )
            ended = result.finish_reason is FinishReason.STOP
            seen["ended"] += ended
            seen["invalid"] += ended and not _valid(schema, result.text)
            seen["moved"] += result.timings.recoveries
            seen["preempted"] += result.timings.preemptions

        disturbing = asyncio.ensure_future(_disturb(stack)) if disturbed else None
        await asyncio.gather(*itertools.starmap(ask, enumerate(asked)))
        if disturbing is not None:
            await disturbing
    return seen


@entry("requests.schema_valid", "share of outputs", at_least(1), long=True)
async def schema_valid() -> Measurement:
    """outputs that ended by themselves and follow their schema: 300 schemas made by chance, the demo model
    at temperature 1 on the torch runner, in a pool so small that sequences are preempted, with a worker and
    then the scheduler killed in the middle
    """
    with system.running(num_workers=2, worker_args=_SMALL_POOL, scheduler_args=_PATIENT) as stack:
        seen = await _answers(stack, schemas(NUM_SCHEMAS), disturbed=True)
    return Measurement(1 - seen["invalid"] / max(1, seen["ended"]), dict(seen))


@entry("requests.schema_valid_vllm", "share of outputs", at_least(1), long=True)
async def schema_valid_vllm() -> Measurement:
    """the same on the vllm runner, left in peace"""
    with system.running(worker_args=_RUNNERS["vllm"], scheduler_args=system.UNSHED) as stack:
        seen = await _answers(stack, schemas(NUM_SCHEMAS), disturbed=False)
    return Measurement(1 - seen["invalid"] / max(1, seen["ended"]), dict(seen))


@entry("requests.grammar_cost", "times as fast", at_least(0.95), long=True)
async def grammar_cost() -> Measurement:
    """tokens per second with a grammar against those without, of 8 and of 32 requests at once: the worse

    In turns, after both were warmed up; the grammar allows a fifth of the vocabulary.
    """
    rounds, figures = 3, dict[str, Any]()
    with system.running(scheduler_args=system.UNSHED) as stack:
        async with AsyncClient(stack.endpoint) as client:

            async def ask(number: int, structured: StructuredOutput | None) -> int:
                more: dict[str, Any] = {} if structured is None else {"structured": structured}
                text = system.prompt(number % 32)
                answer = await client.generate(text, max_tokens=48, ignore_eos=True, seed=number, **more)
                return len(answer.token_ids)

            for concurrency in (8, 32):
                ratios = []
                for number in range(rounds + 1):
                    speeds = [
                        await system.tokens_per_s(
                            lambda one, kind=kind: ask(one, kind),  # type: ignore[misc]
                            concurrency,
                            concurrency,
                            48,
                        )
                        for kind in (None, _ENDLESS)
                    ]
                    if number:
                        ratios.append(speeds[1] / speeds[0])
                figures[f"at {concurrency}"] = statistics.median(ratios)
    return Measurement(min(figures.values()), figures)


@entry("requests.grammar_neighbours", "times as long", at_most(1.1), long=True)
async def grammar_neighbours() -> Measurement:
    """99th percentile of the time between tokens of four plain streams while a new schema comes four times a
    second, against the same streams beside as many plain requests
    """
    with system.running(scheduler_args=system.UNSHED) as stack:
        async with AsyncClient(stack.endpoint) as client:
            fresh = iter(schemas(10_000, seed=9))
            waits: dict[str, list[float]] = {"plain": [], "constrained": []}
            for _ in range(3):
                for kind, found in waits.items():
                    stop = asyncio.Event()
                    others = asyncio.ensure_future(_others(client, fresh, stop, plain=kind == "plain"))
                    streams = await asyncio.gather(*(_stream(client, one) for one in range(_NUM_PLAIN)))
                    stop.set()
                    await others
                    found.extend(itertools.chain.from_iterable(streams))
    p99 = {kind: float(np.percentile(found, 99)) for kind, found in waits.items()}
    return Measurement(p99["constrained"] / p99["plain"], {f"{kind} p99 s": one for kind, one in p99.items()})


async def _others(client: AsyncClient, fresh: Any, stop: asyncio.Event, *, plain: bool) -> None:
    under_way = []
    while not stop.is_set():
        schema = StructuredOutput(json_schema=json.dumps(next(fresh)))
        more: dict[str, Any] = {} if plain else {"structured": schema}
        asked = client.generate("JSON:", max_tokens=12, ignore_eos=True, temperature=1.0, **more)
        under_way.append(asyncio.ensure_future(asked))
        await asyncio.sleep(0.25)
    await asyncio.gather(*under_way)


async def _stream(client: AsyncClient, number: int) -> list[float]:
    """Return the times between the tokens of one stream."""
    came: list[float] = []
    stream = client.stream(system.prompt(number), max_tokens=_PLAIN_TOKENS, ignore_eos=True, seed=number)
    async for delta in stream:
        came.extend([time.perf_counter()] * len(delta.token_ids))
    return [after - before for before, after in itertools.pairwise(came)]
