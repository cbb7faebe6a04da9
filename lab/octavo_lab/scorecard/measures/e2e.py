"""The whole system, real processes and the demo model: leaks, speed, idle cost."""

from __future__ import annotations

import asyncio
import copy
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import grpc.aio
from octavo._sdk.channel import Connection
from octavo.aio import AsyncClient
from octavo.stack import Child, Stack, StackConfig
from octavo.status import Status
from octavo.v1 import generation_pb2 as pb

from octavo_lab.scorecard import Measured, at_least, at_most, entry

READY_S: Final = 240.0
PROMPT: Final = "The octavo is a format of book, made by folding each printed sheet three times, so that"


@contextmanager
def running(**settings: Any) -> Iterator[Stack]:
    """A stack that serves, on free ports."""
    with Stack(StackConfig(**settings)) as stack:
        stack.wait_ready(READY_S)
        yield stack


async def until_idle(client: AsyncClient, num_workers: int) -> Status:
    """Return the first status in which nothing runs or waits and every worker is there."""
    async with asyncio.timeout(READY_S):
        async for status in client.watch_status(0.1):
            ready = [worker for worker in status.workers if worker.state == "ready"]
            busy = any(worker.running or worker.pool.active for worker in ready)
            if len(ready) == num_workers and not busy and not status.live_requests:
                return status
    raise RuntimeError("the scheduler went away")


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

    @property
    def wrong(self) -> int:
        return sum(self.ends[request_id] != 1 for request_id in self.sent)


@entry(
    "e2e.leaks",
    "300 streams with cancellations, deadlines, dying clients and a killed worker: requests without "
    "exactly one end, blocks not given back, accounts that do not close",
    "count",
    at_most(0),
)
async def leaks() -> Measured:
    """Speak the wire protocol itself, so that a second end could not hide behind the SDK."""
    tally, chance = _Tally(), random.Random(20)  # for repetition, not for secrets
    with running(num_workers=2, worker_args=("--num-threads", "1")) as stack:
        async with AsyncClient(stack.endpoint) as watcher:
            clients = [
                _session(stack.endpoint, client, client < NUM_DYING, tally, chance.randrange(2**32))
                for client in range(NUM_CLIENTS)
            ]
            tasks = [asyncio.create_task(one) for one in clients]
            await _until_busy(watcher)
            stack.workers[0].kill()
            await asyncio.gather(*tasks)
            stack.workers[0].start()
            status = await until_idle(watcher, num_workers=2)
    pools = [worker.pool for worker in status.workers]
    blocks = sum(pool.total - pool.free - pool.evictable for pool in pools)
    unaccounted = abs(status.arrivals - sum(status.outcomes.values()) - status.live_requests)
    return Measured(
        tally.wrong + blocks + unaccounted,
        {
            "streams": NUM_STREAMS,
            "without exactly one end": tally.wrong,
            "blocks not given back": blocks,
            "requests unaccounted for": unaccounted,
            "ends seen": dict(tally.kinds),
            "outcomes": dict(status.outcomes),
        },
    )


async def _until_busy(client: AsyncClient) -> None:
    async for status in client.watch_status(0.1):
        if sum(worker.running for worker in status.workers) >= 16:
            return


async def _session(endpoint: str, client: int, dies: bool, tally: _Tally, seed: int) -> None:
    chance = random.Random(seed)  # for repetition, not for secrets
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
                kind = event.WhichOneof("event")
                if kind in ("finished", "error"):
                    reason = event.finished.reason if kind == "finished" else event.error.reason
                    tally.ends[event.request_id] += 1
                    tally.kinds[f"{kind} {reason}"] += 1
                    live.discard(event.request_id)
                elif event.request_id in doomed and chance.random() < 0.5:
                    doomed.discard(event.request_id)
                    cancel = pb.CancelRequest(request_id=event.request_id)
                    await rpc.write(pb.SessionRequest(cancel=cancel))
                deltas += kind == "delta"
            if dies and deltas > 40:
                return  # Leaving the channel breaks the stream under its requests.
        # A second end would come on the same stream, before its close.
        await rpc.done_writing()
        while isinstance(message := await rpc.read(), pb.SessionEvent):
            for event in message.events:
                tally.ends[event.request_id] += event.WhichOneof("event") in ("finished", "error")


# -- batching ------------------------------------------------------------------------------------

NUM_BATCHED: Final = 32
BATCHED_TOKENS: Final = 24


@entry(
    "e2e.batch_speedup",
    "the same 32 requests one after another, against all at once",
    "times faster",
    at_least(4),
)
async def batch_speedup() -> Measured:
    """Take the concurrent time before and after the sequential one, so that a drift hits both."""
    with running() as stack:
        async with AsyncClient(stack.endpoint) as client:
            await _together(client)  # warms up
            before = await _together(client)
            one_by_one = await _one_by_one(client)
            after = await _together(client)
    together = statistics.mean((before, after))
    return Measured(
        one_by_one / together,
        {"one after another s": round(one_by_one, 3), "together s": round(together, 3)},
    )


def _prompt(index: int) -> str:
    # The number comes first: no two prompts share a cached prefix.
    return f"{index} {PROMPT}"


async def _generate(client: AsyncClient, index: int) -> None:
    await client.generate(_prompt(index), max_tokens=BATCHED_TOKENS, ignore_eos=True, temperature=0)


async def _together(client: AsyncClient) -> float:
    started = time.perf_counter()
    await asyncio.gather(*(_generate(client, index) for index in range(NUM_BATCHED)))
    return time.perf_counter() - started


async def _one_by_one(client: AsyncClient) -> float:
    started = time.perf_counter()
    for index in range(NUM_BATCHED):
        await _generate(client, index)
    return time.perf_counter() - started


# -- decode against transformers -----------------------------------------------------------------

DECODE_BATCH: Final = 8
DECODE_TOKENS: Final = 32
ROUNDS: Final = 3


@entry(
    "e2e.decode_vs_transformers",
    "decoding with batch 8 through the whole system, against transformers' own batched generate",
    "times faster",
    at_least(2),
)
async def decode_vs_transformers() -> Measured:
    """Take turns on the same cores; each side in the dtype that suits it best on this machine."""
    # As the worker sets it for itself, and before torch is loaded here: the same conditions for both.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    with running() as stack:
        peers = await asyncio.to_thread(_TransformersPeer.contenders)
        async with AsyncClient(stack.endpoint) as client:
            await _octavo_step_s(client)
            ours: list[float] = []
            theirs: dict[str, list[float]] = {peer.dtype: [] for peer in peers}
            for _ in range(ROUNDS):
                ours.append(await _octavo_step_s(client))
                for peer in peers:
                    theirs[peer.dtype].append(await asyncio.to_thread(peer.step_s))
    best = min(theirs, key=lambda dtype: statistics.median(theirs[dtype]))
    our_step, their_step = statistics.median(ours), statistics.median(theirs[best])
    return Measured(
        their_step / our_step,
        {
            "octavo ms per step": round(1000 * our_step, 2),
            **{
                f"transformers {dtype} ms per step": round(1000 * statistics.median(steps), 2)
                for dtype, steps in theirs.items()
            },
        },
    )


async def _octavo_step_s(client: AsyncClient) -> float:
    """Return the time between tokens while all of a batch decode."""
    results = await asyncio.gather(
        *(
            client.generate(_prompt(index), max_tokens=DECODE_TOKENS, ignore_eos=True, temperature=0)
            for index in range(DECODE_BATCH)
        )
    )
    return statistics.mean(result.timings.tpot_s for result in results)


class _TransformersPeer:
    """The demo model in Hugging Face transformers, in one dtype."""

    def __init__(self, dtype: str, model: Any, inputs: Any) -> None:
        self.dtype = dtype
        self._model = model
        self._inputs = inputs

    @classmethod
    def contenders(cls) -> list[_TransformersPeer]:
        """Return the model in each dtype that may be the fastest here, warmed up."""
        import torch  # noqa: PLC0415 # loaded for this measure only
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

        from worker_svc.models.demo_model import fetch_demo_model  # noqa: PLC0415

        path = fetch_demo_model(lambda what, fraction: None)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, padding_side="left")
        tokenizer.pad_token = tokenizer.eos_token
        prompts = [_prompt(index) for index in range(DECODE_BATCH)]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True)
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        peers = [cls("float32", model, inputs), cls("bfloat16", copy.deepcopy(model).bfloat16(), inputs)]
        for peer in peers:
            peer.generate_s(2)
        seconds = [peer.generate_s(4) for peer in peers]
        # One that is far behind will not win, and would take minutes where the CPU has no bfloat16.
        return [peer for peer, took in zip(peers, seconds, strict=True) if took < 2 * min(seconds)]

    def step_s(self) -> float:
        """Return the time per decode step: what more tokens cost more, without the prefill."""
        return (self.generate_s(DECODE_TOKENS) - self.generate_s(1)) / (DECODE_TOKENS - 1)

    def generate_s(self, num_tokens: int) -> float:
        """Return the time for a batch with that many new tokens each."""
        started = time.perf_counter()
        self._model.generate(
            **self._inputs, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False
        )
        return time.perf_counter() - started


# -- idle ----------------------------------------------------------------------------------------

IDLE_S: Final = 10.0


@entry(
    "e2e.idle_cpu", "CPU of the busiest process of a stack that has nothing to do", "% of a core", at_most(1)
)
async def idle_cpu() -> Measured:
    """Watch the processes for ten seconds after they have served once."""
    with running() as stack:
        async with AsyncClient(stack.endpoint) as client:
            await client.generate(PROMPT, max_tokens=8)
            await until_idle(client, num_workers=1)
            await asyncio.sleep(1.0)  # Let what follows a request, such as its log line, be over.
            before = _cpu_s(stack)
            started = time.perf_counter()
            await asyncio.sleep(IDLE_S)
            after, elapsed = _cpu_s(stack), time.perf_counter() - started
    shares = {name: round(100 * (after[name] - before[name]) / elapsed, 2) for name in before}
    return Measured(max(shares.values()), shares)


def _cpu_s(stack: Stack) -> dict[str, float]:
    """Return the CPU seconds of each process of the stack, with its children's."""
    return {child.name: _tree_cpu_s(child) for child in stack.children}


def _tree_cpu_s(child: Child) -> float:
    import psutil  # noqa: PLC0415 # comes with the worker's extra

    root = psutil.Process(child.process.pid)
    times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
    return sum(one.user + one.system for one in times)
