"""The whole system, real processes and the demo model: leaks, speed, idle cost, exactness."""

# ruff: noqa: PLC0415 - torch takes seconds to import

from __future__ import annotations

import asyncio
import copy
import os
import random
import statistics
import time
from collections import Counter
from typing import Final

import grpc.aio
from octavo._sdk.channel import Connection
from octavo.aio import AsyncClient
from octavo.sampling import SamplingParams
from octavo.v1 import generation_pb2 as pb

from octavo_lab.scorecard import Measured, at_least, at_most, entry
from octavo_lab.scorecard.demo_model import (
    demo_engine,
    judged,
    transformers_generate_s,
    transformers_model,
)
from octavo_lab.scorecard.runner_workload import Job, PlanWorkload
from octavo_lab.scorecard.system import (
    PROMPT,
    Rate,
    cpu_s,
    in_turns,
    left_behind,
    median_ratio,
    prompt,
    running,
    until_idle,
)

# -- leaks ---------------------------------------------------------------------------------------

NUM_STREAMS: Final = 300
NUM_CLIENTS: Final = 10
NUM_DYING: Final = 3


class _Tally:
    """Counts what ends the requests of clients that live to see it."""

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()
        self.sent: list[str] = []
        self.kinds: Counter[str] = Counter()

    def take(self, event: pb.RequestEvent) -> bool:
        """Take in an event of a request; return whether it ends the request."""
        kind = event.WhichOneof("event")
        if kind not in ("finished", "error"):
            return False
        self.ends[event.request_id] += 1
        self.kinds[f"{kind} {event.finished.reason if kind == 'finished' else event.error.reason}"] += 1
        return True


@entry("e2e.leaks", "count", at_most(0))
async def leaks() -> Measured:
    """300 streams with cancellations, deadlines, dying clients and a killed worker: requests without
    exactly one end, blocks not given back, accounts that do not close

    Speaks the wire protocol itself, so that a second end could not hide behind the SDK.
    """
    tally, chance = _Tally(), random.Random(20)
    with running(num_workers=2, worker_args=("--num-threads", "1")) as stack:
        async with AsyncClient(stack.endpoint) as watcher:
            tasks = [
                asyncio.create_task(_session(stack.endpoint, client, tally, chance.randrange(2**32)))
                for client in range(NUM_CLIENTS)
            ]
            async for status in watcher.watch_status(0.1):
                if sum(worker.running for worker in status.workers) >= 16:
                    break
            stack.workers[0].kill()
            await asyncio.gather(*tasks)
            stack.workers[0].start()
            status = await until_idle(watcher, num_workers=2)
    left = {
        "without exactly one end": sum(tally.ends[request_id] != 1 for request_id in tally.sent),
        **left_behind(status),
    }
    seen = {"ends seen": dict(tally.kinds), "outcomes": dict(status.outcomes)}
    return Measured(sum(left.values()), {"streams": NUM_STREAMS, **left, **seen})


async def _session(endpoint: str, client: int, tally: _Tally, seed: int) -> None:
    """Be one client: the first few leave in the middle of their answers."""
    chance, dies = random.Random(seed), client < NUM_DYING
    live: set[str] = set()
    async with grpc.aio.insecure_channel(endpoint) as channel:
        rpc = Connection(endpoint, channel).generation.Session(None)
        for number in range(NUM_STREAMS // NUM_CLIENTS):
            request = pb.GenerateRequest(request_id=f"{client}-{number}", text=PROMPT)
            request.sampling.max_tokens = chance.randint(4, 32)
            request.sampling.ignore_eos = True
            if chance.random() < 0.2:
                request.terms.deadline_ms = chance.randint(50, 3000)
            live.add(request.request_id)
            await rpc.write(pb.SessionRequest(generate=request))
        if not dies:
            tally.sent.extend(live)
        doomed = {request_id for request_id in sorted(live) if chance.random() < 0.3}
        deltas = 0
        while live and isinstance(message := await rpc.read(), pb.SessionEvent):
            for event in message.events:
                if tally.take(event):
                    live.discard(event.request_id)
                elif event.request_id in doomed and chance.random() < 0.5:
                    doomed.discard(event.request_id)
                    cancel = pb.CancelRequest(request_id=event.request_id)
                    await rpc.write(pb.SessionRequest(cancel=cancel))
                deltas += event.WhichOneof("event") == "delta"
            if dies and deltas > 40:
                return  # Leaving the channel breaks the stream under its requests.
        # A second end would come on the same stream, before its close.
        await rpc.done_writing()
        while isinstance(message := await rpc.read(), pb.SessionEvent):
            for event in message.events:
                tally.take(event)


# -- batching ------------------------------------------------------------------------------------


@entry("e2e.batch_speedup", "times faster", at_least(4))
async def batch_speedup() -> Measured:
    """the same 32 requests one after another, against all at once

    The concurrent time is taken before and after the sequential one, so that a drift hits both.
    """
    with running() as stack:
        async with AsyncClient(stack.endpoint) as client:

            async def took_s(concurrency: int) -> float:
                room = asyncio.Semaphore(concurrency)

                async def one(number: int) -> None:
                    async with room:
                        await client.generate(prompt(number), max_tokens=24, ignore_eos=True, temperature=0)

                started = time.perf_counter()
                await asyncio.gather(*map(one, range(32)))
                return time.perf_counter() - started

            _warm_up, before, one_by_one, after = [await took_s(size) for size in (32, 32, 1, 32)]
    together = statistics.mean((before, after))
    return Measured(
        one_by_one / together,
        {"one after another s": round(one_by_one, 3), "together s": round(together, 3)},
    )


# -- against transformers ------------------------------------------------------------------------

DECODE_BATCH: Final = 8
DECODE_TOKENS: Final = 32


@entry("e2e.decode_vs_transformers", "times faster", at_least(2))
async def decode_vs_transformers() -> Measured:
    """decoding with batch 8 through the whole system, against transformers' own batched generate

    On the same cores in turns; each side in the dtype that suits it best on this machine.
    """
    # As the worker sets it for itself, and before torch is loaded here: the same conditions for both.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    with running() as stack:
        async with AsyncClient(stack.endpoint) as client:
            prompts = [[*(await client.tokenize(prompt(index))).token_ids] for index in range(DECODE_BATCH)]
            rates = await in_turns({"octavo": _octavo(client, prompts), **_transformers(prompts)})
    ours = rates.pop("octavo")
    best = max(rates.values(), key=statistics.median)
    ms_per_step = {
        f"{name} ms per step": round(1000 / statistics.median(found), 2)
        for name, found in {"octavo": ours, **rates}.items()
    }
    return median_ratio(ours, best, **ms_per_step)


def _octavo(client: AsyncClient, prompts: list[list[int]]) -> Rate:
    """Decode steps per second while all of a batch decode."""

    async def rate() -> float:
        asked = [
            client.generate(ids, max_tokens=DECODE_TOKENS, ignore_eos=True, temperature=0) for ids in prompts
        ]
        return 1 / statistics.mean(result.timings.tpot_s for result in await asyncio.gather(*asked))

    return rate


def _transformers(prompts: list[list[int]]) -> dict[str, Rate]:
    """The same of transformers, in each dtype that may be the fastest here."""
    model = transformers_model()
    models = {"float32": model, "bfloat16": copy.deepcopy(model).bfloat16()}
    for one in models.values():
        transformers_generate_s(one, prompts, 2)
    seconds = {dtype: transformers_generate_s(one, prompts, 4) for dtype, one in models.items()}

    def rate_of(dtype: str) -> Rate:
        async def rate() -> float:
            # What more tokens cost more, without the prefill.
            long, short = (
                await asyncio.to_thread(transformers_generate_s, models[dtype], prompts, count)
                for count in (DECODE_TOKENS, 1)
            )
            return (DECODE_TOKENS - 1) / (long - short)

        return rate

    # One that is far behind will not win, and would take minutes where the CPU has no bfloat16.
    fastest = min(seconds.values())
    return {f"transformers {dtype}": rate_of(dtype) for dtype in models if seconds[dtype] < 2 * fastest}


NUM_PROMPTS: Final = 24
LONGEST: Final = 1500
PARITY_TOKENS: Final = 64
PARITY_BATCH: Final = 32


@entry("e2e.parity", "tokens", at_most(0), long=True)
def parity() -> Measured:
    """greedy tokens that differ from transformers in float32 without a tie: 24 prompts of 1 to 1500 tokens,
    64 tokens each, alone and mixed in a batch of 32 with staggered arrivals and random chunks

    Worker engine and runner; the reference judges each token after the prompt and our output so far.
    """
    chance = random.Random(135)
    lengths = [round(LONGEST ** (n / (NUM_PROMPTS - 1))) for n in range(NUM_PROMPTS)]
    chance.shuffle(lengths)
    limits = {"max_num_seqs": PARITY_BATCH, "max_model_len": LONGEST + PARITY_TOKENS, "block_size": 16}
    num_blocks = PARITY_BATCH * -(-(LONGEST + PARITY_TOKENS + 1) // 16)
    sampling = SamplingParams(temperature=0.0, max_tokens=PARITY_TOKENS, ignore_eos=True)
    reference = transformers_model()
    prompts = [[chance.randrange(reference.config.vocab_size) for _ in range(length)] for length in lengths]
    alone = [[Job(prompt, sampling)] for prompt in prompts]
    mixed = [Job(prompt, sampling) for prompt in (*prompts, *prompts[: PARITY_BATCH - NUM_PROMPTS])]
    with demo_engine("torch", dtype="float32", num_blocks=num_blocks, **limits) as engine:
        for jobs in (*alone, mixed):
            engine.drop_all()
            PlanWorkload(engine, None, PARITY_BATCH, seed=len(jobs)).run(jobs, disturb=True, most=500)
    verdict = judged(reference, [job for jobs in (*alone, mixed) for job in jobs])
    return Measured(verdict["unexcused"], verdict)


# -- idle ----------------------------------------------------------------------------------------

IDLE_S: Final = 10.0


@entry("e2e.idle_cpu", "% of a core", at_most(1))
async def idle_cpu() -> Measured:
    """CPU of the busiest process of a stack that has nothing to do

    For ten seconds after it has served once; a process counts with its children.
    """
    with running() as stack:
        async with AsyncClient(stack.endpoint) as client:
            await client.generate(PROMPT, max_tokens=8)
            await until_idle(client, num_workers=1)
            await asyncio.sleep(1.0)  # Let what follows a request, such as its log line, be over.
            before = {child.name: cpu_s(child) for child in stack.children}
            started = time.perf_counter()
            await asyncio.sleep(IDLE_S)
            after = {child.name: cpu_s(child) for child in stack.children}
            elapsed = time.perf_counter() - started
    shares = {name: round(100 * (after[name] - before[name]) / elapsed, 2) for name in before}
    return Measured(max(shares.values()), shares)
