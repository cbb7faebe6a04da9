"""The whole system, real processes and the demo model: leaks, speed, idle cost."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import grpc.aio
from octavo._sdk.channel import Connection
from octavo.aio import AsyncClient
from octavo.v1 import generation_pb2 as pb

from octavo_lab.scorecard import Measurement, at_least, at_most, entry, system

# -- leaks

NUM_STREAMS: Final = 300
NUM_CLIENTS: Final = 10
NUM_DYING: Final = 3


@dataclass(slots=True)
class _Tally:
    """Counts what ends the requests of clients that live to see it."""

    ends: Counter[str] = field(default_factory=Counter)
    sent: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)

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
            sessions = (_session(stack.endpoint, client, tally, chance) for client in range(NUM_CLIENTS))
            clients = asyncio.gather(*sessions)
            async for status in watcher.watch_status(0.1):
                if sum(worker.running for worker in status.workers) >= 16:
                    break
            stack.workers[0].kill()
            await clients
            stack.workers[0].start()
            status = await system.until_idle(watcher, num_workers=2)
    left = {
        "without exactly one end": sum(tally.ends[request_id] != 1 for request_id in tally.sent),
        **system.left_behind(status),
    }
    seen = {"ends seen": dict(tally.kinds), "outcomes": dict(status.outcomes)}
    return Measurement(sum(left.values()), {"streams": NUM_STREAMS, **left, **seen})


async def _session(endpoint: str, client: int, tally: _Tally, chance: random.Random) -> None:
    """Be one client: the first few leave in the middle of their answers."""
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
        if client >= NUM_DYING:
            tally.sent.extend(live)
        doomed = {request_id for request_id in sorted(live) if chance.random() < 0.3}
        deltas = 0
        while live and isinstance(message := await rpc.read(), pb.SessionEvent):
            for event in message.events:
                if tally.take(event):
                    live.discard(event.request_id)
                elif event.request_id in doomed and chance.random() < 0.5:
                    doomed.discard(event.request_id)
                    await rpc.write(pb.SessionRequest(cancel=pb.CancelRequest(request_id=event.request_id)))
                deltas += event.WhichOneof("event") == "delta"
            if client < NUM_DYING and deltas > 40:
                return  # Leaving the channel breaks the stream under its requests.
        # A second end would come on the same stream, before its close.
        await rpc.done_writing()
        while isinstance(message := await rpc.read(), pb.SessionEvent):
            for event in message.events:
                tally.take(event)


# -- batching


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


# -- idle

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
            before, started = {one.name: system.cpu_s(one) for one in stack.children}, time.perf_counter()
            await asyncio.sleep(IDLE_S)
            spent_s = {one.name: system.cpu_s(one) - before[one.name] for one in stack.children}
            elapsed_s = time.perf_counter() - started
    shares = {name: round(100 * cpu_s / elapsed_s, 2) for name, cpu_s in spent_s.items()}
    return Measurement(max(shares.values()), shares)
