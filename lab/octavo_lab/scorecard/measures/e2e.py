"""The whole system, real processes and the demo model: leaks, speed, idle cost."""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import grpc.aio
from octavo._sdk.channel import Connection
from octavo.aio import AsyncClient
from octavo.service.authority import Authority
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


# -- TLS


@entry("e2e.tls_overhead", "% of throughput", at_most(3), long=True)
async def tls_overhead() -> Measurement:
    """what mutual TLS on every hop takes of the throughput at concurrency 32, in turns with plaintext

    A simulated worker at its own pace. Also the CPU time that a step costs scheduler, worker and client.
    """
    certs, authority = Path(tempfile.mkdtemp(prefix="octavo-certs-")), Authority.create()
    authority.save(certs)
    for part in ("scheduler", "worker", "gateway", "client"):
        authority.issue(certs, part, ("127.0.0.1",), timedelta(days=1))
    cpu_us: dict[str, list[float]] = {"plaintext": [], "mTLS": []}
    async with AsyncExitStack() as entered:

        async def arm(name: str, certs: Path | None) -> system.Rate:
            settings: dict[str, Any] = {"worker_args": ("--runner", "sim"), "certs": certs}
            stack = entered.enter_context(
                system.running(model="sim", scheduler_args=system.UNSHED, **settings)
            )
            client = await entered.enter_async_context(AsyncClient(stack.endpoint, tls=stack.tls))
            processes = (stack.scheduler, stack.workers[0], None)

            async def ask(number: int) -> int:
                answer = await client.generate(system.prompt(number), max_tokens=64, ignore_eos=True)
                return len(answer.token_ids)

            async def rate() -> float:
                steps, spent_s = (await client.status()).workers[0].steps, sum(map(system.cpu_s, processes))
                found = await system.tokens_per_s(ask, 128, 32, 64)
                steps -= (await client.status()).workers[0].steps
                cpu_us[name].append(1e6 * (spent_s - sum(map(system.cpu_s, processes))) / steps)
                return found

            return rate

        arms = {"plaintext": await arm("plaintext", None), "mTLS": await arm("mTLS", certs)}
        rates = await system.in_turns(arms, rounds=5)
    cpu_us = {name: found[1:] for name, found in cpu_us.items()}  # the first was to warm up
    taken, cost = (
        statistics.median(of["mTLS"]) / statistics.median(of["plaintext"]) for of in (rates, cpu_us)
    )
    details = {"tokens/s": system.rounded(rates), "CPU us per step": system.rounded(cpu_us, 0)}
    return Measurement(100 * (1 - taken), {**details, "CPU per step, % more": round(100 * (cost - 1), 1)})
