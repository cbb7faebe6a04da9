"""The whole system, real processes and the demo model: leaks, speed, idle cost."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter
from typing import Final

import grpc.aio
from octavo._sdk.channel import Connection
from octavo.aio import AsyncClient
from octavo.v1 import generation_pb2 as pb

from octavo_lab.scorecard import Measurement, at_least, at_most, entry, system

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
async def leaks() -> Measurement:
    """300 streams with cancellations, deadlines, dying clients and a killed worker: requests without
    exactly one end, blocks not given back, accounts that do not close

    Speaks the wire protocol itself, so that a second end could not hide behind the SDK.
    """
    tally, chance = _Tally(), random.Random(20)
    with system.running(num_workers=2, worker_args=("--num-threads", "1")) as stack:
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
            status = await system.until_idle(watcher, num_workers=2)
    left = {
        "without exactly one end": sum(tally.ends[request_id] != 1 for request_id in tally.sent),
        **system.left_behind(status),
    }
    seen = {"ends seen": dict(tally.kinds), "outcomes": dict(status.outcomes)}
    return Measurement(sum(left.values()), {"streams": NUM_STREAMS, **left, **seen})


async def _session(endpoint: str, client: int, tally: _Tally, seed: int) -> None:
    """Be one client: the first few leave in the middle of their answers."""
    chance, dies = random.Random(seed), client < NUM_DYING
    live: set[str] = set()
    async with grpc.aio.insecure_channel(endpoint) as channel:
        rpc = Connection(endpoint, channel).generation.Session(None)
        for number in range(NUM_STREAMS // NUM_CLIENTS):
            request = pb.GenerateRequest(request_id=f"{client}-{number}", text=system.PROMPT)
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
async def batch_speedup() -> Measurement:
    """the same 32 requests one after another, against all at once

    The concurrent time is taken before and after the sequential one, so that a drift hits both.
    """
    with system.running() as stack:
        async with AsyncClient(stack.endpoint) as client:

            async def ask(number: int) -> int:
                text = system.prompt(number % 32)
                answer = await client.generate(text, max_tokens=24, ignore_eos=True, temperature=0)
                return len(answer.token_ids)

            _warm_up, before, one_by_one, after = [
                await system.tokens_per_s(ask, 32, concurrency, 24) for concurrency in (32, 32, 1, 32)
            ]
    together = statistics.mean((before, after))
    figures = {"one after another tokens/s": one_by_one, "together tokens/s": together}
    return Measurement(together / one_by_one, figures)


# -- idle ----------------------------------------------------------------------------------------

IDLE_S: Final = 10.0


@entry("e2e.idle_cpu", "% of a core", at_most(1))
async def idle_cpu() -> Measurement:
    """CPU of the busiest process of a stack that has nothing to do

    For ten seconds after it has served once; a process counts with its children.
    """
    with system.running() as stack:
        async with AsyncClient(stack.endpoint) as client:
            await client.generate(system.PROMPT, max_tokens=8)
            await system.until_idle(client, num_workers=1)
            await asyncio.sleep(1.0)  # Let what follows a request, such as its log line, be over.
            before = {child.name: system.cpu_s(child) for child in stack.children}
            started = time.perf_counter()
            await asyncio.sleep(IDLE_S)
            after = {child.name: system.cpu_s(child) for child in stack.children}
            elapsed = time.perf_counter() - started
    shares = {name: round(100 * (after[name] - before[name]) / elapsed, 2) for name in before}
    return Measurement(max(shares.values()), shares)
