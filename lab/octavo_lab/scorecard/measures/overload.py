"""Overload: what is still served at twice the capacity, how soon it is over, and what refusing costs.

With real processes: a scheduler, a worker, and the load generator in this process, all on this machine.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any, Final, cast

import grpc.aio
import numpy as np
import psutil
from octavo._sdk.session import next_message
from octavo.v1 import common_pb2, generation_pb2_grpc
from octavo.v1 import generation_pb2 as pb

from octavo_lab.load.arrivals import Closed, Phase, Phases, Poisson
from octavo_lab.load.generator import Traffic, generate
from octavo_lab.load.records import Outcome, RunRecord
from octavo_lab.load.summary import summarize
from octavo_lab.load.targets.octavo import OctavoTarget
from octavo_lab.load.targets.openai import OpenAiConfig, OpenAiTarget
from octavo_lab.overload.drive import (
    TTFT_SLO_S,
    Calibration,
    Mix,
    Timeline,
    at_load,
    calibrate,
    drive,
    through,
    watch,
)
from octavo_lab.scorecard import Measurement, at_least, at_most, entry, system
from octavo_lab.scorecard.vllm_server import vllm_serve

SEATS: Final = 16
WINDOW_S: Final = 60.0
CALIBRATE_S: Final = 20.0
_SEATS_FLAGS: Final = ("--max-num-seqs", str(SEATS))
_SIM: Final = ("--runner", "sim", "--sim-speed")
_SIM_VOCABULARY: Final = (3, 250)
_INTERACTIVE: Final = {"priority": "interactive", "ttft_deadline": TTFT_SLO_S}
"""What clients ask who say what they need."""


def _figures(run: RunRecord, measured: Calibration) -> dict[str, Any]:
    """Return what became of a run."""
    return asdict(summarize(run, measured.slo))


@entry("overload.goodput_ratio", "ratio", at_least(0.9), long=True)
async def goodput_ratio() -> Measurement:
    """goodput at twice the capacity over that at 0.9 times, demo model

    Goodput: answered, TTFT under 1.5 s, mean TPOT under 4 times the unloaded one.
    """
    rows = {}
    with system.running(worker_args=_SEATS_FLAGS) as stack:
        async with OctavoTarget(stack.endpoint) as target:
            measured = await calibrate(target, Mix(), 2 * SEATS, CALIBRATE_S)
            for load in (0.9, 2.0):
                rate = load * measured.capacity_per_s
                run = await at_load(target, Mix(options=_INTERACTIVE), rate, WINDOW_S)
                rows[f"{load:g}x"] = _figures(run, measured)
    below, above = rows["0.9x"], rows["2x"]
    share = round(below["goodput_per_s"] * below["window_s"] / below["requests"], 3)
    details = {**rows, **asdict(measured), "goodput over offered at 0.9x (target 0.95)": share}
    return Measurement(above["goodput_per_s"] / below["goodput_per_s"], details)


_OF_WHAT_FITS: Final = (0.5, 1.0, 2.0)
"""Bounds tried for the queue of `vllm serve`, as shares of what can start within the TTFT of the SLO."""


@entry("overload.goodput_vs_vllm", "ratio", at_least(1.0), long=True)
async def goodput_vs_vllm() -> Measurement:
    """goodput of Octavo over vLLM at twice the capacity over that of `vllm serve`, the best of seven settings

    Same model, executor and traffic. `vllm serve` as it comes, with three bounds on the requests that run or
    wait, and with three on the prompt tokens that wait.
    """
    limits = ("--max-num-batched-tokens", "512", "--max-model-len", "1024")
    with system.running(worker_args=("--runner", "vllm", *_SEATS_FLAGS, *limits)) as stack:
        async with OctavoTarget(stack.endpoint) as target:
            measured = await calibrate(target, Mix(), 2 * SEATS, 2 * CALIBRATE_S)
            rate = 2 * measured.capacity_per_s
            ours = _figures(await at_load(target, Mix(options=_INTERACTIVE), rate, WINDOW_S), measured)
    theirs: dict[str, Any] = {}
    for flags in _vllm_settings(measured.capacity_per_s):
        async with (
            vllm_serve(*flags, *limits) as server,
            OpenAiTarget(OpenAiConfig(base_url=server.base_url)) as other,
        ):
            run = await at_load(other, Mix(), rate, WINDOW_S)
            theirs[" ".join(("vllm serve", *flags))] = _figures(run, measured)
    # Nothing good at all counts as one request of the window.
    best = max(1 / WINDOW_S, *(row["goodput_per_s"] for row in theirs.values()))
    return Measurement(ours["goodput_per_s"] / best, {"octavo": ours, **theirs, **asdict(measured)})


def _vllm_settings(capacity_per_s: float) -> Iterator[tuple[str, ...]]:
    """Yield the flags of `vllm serve` among which the best one is sought."""
    yield ()
    fits = capacity_per_s * TTFT_SLO_S
    for share in _OF_WHAT_FITS:
        yield (*_SEATS_FLAGS, "--max-num-queued-reqs", str(SEATS + math.ceil(share * fits)))
    prompt_tokens = statistics.fmean(Mix().prompt_tokens)
    for share in _OF_WHAT_FITS:
        yield (*_SEATS_FLAGS, "--max-num-queued-tokens", str(math.ceil(share * fits * prompt_tokens)))


@entry("overload.recovery_s", "s", at_most(10), long=True)
async def recovery_s() -> Measurement:
    """from the end of a minute at twice the capacity to level 0 and the P99 TTFT of before, within 20%

    Before and after, half of the capacity is asked for. With simulated steps, a quarter as long as the demo
    model's: a P99 wants hundreds of requests.
    """
    plain = Mix(vocabulary=_SIM_VOCABULARY)
    with system.running(model="sim", worker_args=(*_SIM, "4", *_SEATS_FLAGS)) as stack:
        async with OctavoTarget(stack.endpoint) as target:
            measured = await calibrate(target, plain, 2 * SEATS, CALIBRATE_S)
            capacity = measured.capacity_per_s
            plan = Phases((Phase(45, capacity / 2), Phase(60, 2 * capacity), Phase(45, capacity / 2)))
            async with watch(target.client) as looks:
                run = await through(target, replace(plain, options=_INTERACTIVE), plan)
    timeline = Timeline(run, looks, measured, 45.0, 105.0, 5.0)
    details = {name: value for name, value in timeline.as_record().items() if name != "looks"}
    return Measurement(math.inf if timeline.recovery_s is None else timeline.recovery_s, details)


@entry("overload.batch_flood", "ratio", at_most(1.25), long=True)
async def batch_flood() -> Measurement:
    """interactive P99 TTFT behind 10,000 batch requests over that behind 500

    Real scheduler and worker; the worker's steps take the times of the demo model, four times as fast.
    """
    p99 = {backlog: await _interactive_p99_s(backlog) for backlog in (500, 10_000)}
    return Measurement(p99[10_000] / p99[500], {f"p99_ttft_s behind {n}": value for n, value in p99.items()})


async def _interactive_p99_s(backlog: int) -> float:
    """Return the P99 TTFT of interactive requests while a backlog of the batch class is kept up."""
    room = ("--max-waiting-requests", "40000", "--max-session-requests", "40000")
    settings = {"scheduler_args": (*room, "--max-waiting-tokens", "none"), "model": "sim"}
    batch = Mix(vocabulary=_SIM_VOCABULARY, output_tokens=(200, 300), options={"priority": "batch"})
    interactive = Mix(vocabulary=_SIM_VOCABULARY, output_tokens=(8, 16), options={"priority": "interactive"})
    with system.running(worker_args=(*_SIM, "4", *_SEATS_FLAGS), **settings) as stack:
        async with OctavoTarget(stack.endpoint) as flood, OctavoTarget(stack.endpoint) as target:
            # 2,000 more take the place of those that are done.
            requests = batch.requests(backlog + 2000, seed=5)
            traffic = Traffic(requests=requests, arrivals=Closed(backlog + SEATS))
            flooding = asyncio.create_task(generate(flood, traffic))
            async for status in target.client.watch_status(0.2):
                if sum(queue.waiting for queue in status.queues) >= 0.95 * backlog:
                    break
            run = await drive(target, interactive, Poisson(15.0), warm_up_s=3.0, seconds=45.0, seed=6)
            left = sum(queue.waiting for queue in (await target.client.status()).queues)
            flooding.cancel()
            await asyncio.gather(flooding, return_exceptions=True)
    if any(one.outcome is not Outcome.OK for one in run.measured):
        raise RuntimeError(f"not all were answered: {[one.reason for one in run.measured if one.reason][:3]}")
    if left < backlog / 3:
        raise RuntimeError(f"only {left} of {backlog} were left at the end")
    return float(np.quantile([one.ttft_s for one in run.measured], 0.99))


REFUSALS: Final = 60_000
MOST_GROWTH_MIB: Final = 4.0
_IN_FLIGHT: Final = 2_000


@entry("overload.refusals_per_s", "1/s", at_least(5000))
async def refusals_per_s() -> Measurement:
    """requests refused for load per second of the scheduler's CPU; 0 when its memory grows meanwhile

    Prompts of 2 kB on one Session, refused by a full queue; those that wait are sent together.
    """
    full = ("--max-waiting-requests", "1", "--max-session-requests", "100000", "--log-format", "json")
    terms = pb.ServiceTerms(queue_timeout_ms=3_600_000)
    long = common_pb2.SamplingParams(max_tokens=500, ignore_eos=True)
    refused = pb.GenerateRequest(request_id="refused", text="x" * 2000, terms=terms)
    slow = (*_SIM, "0.05", "--max-num-seqs", "1")
    with system.running(model="sim", worker_args=slow, scheduler_args=full) as stack:
        scheduler, memory = stack.scheduler, psutil.Process(stack.scheduler.process.pid).memory_info
        async with grpc.aio.insecure_channel(stack.endpoint) as channel:
            # The stubs' types know the synchronous kind only.
            session = cast("Any", generation_pb2_grpc.GenerationStub(channel)).Session()
            for name in ("fill-0", "fill-1"):
                filler = pb.GenerateRequest(request_id=name, text="x" * 100, sampling=long, terms=terms)
                await session.write(pb.SessionRequest(generate=filler))
                await session.read()
            await _flood(session, refused, REFUSALS // 4)
            alone_s = -system.cpu_s(scheduler)
            await _flood(session, refused, REFUSALS // 4, together=False)
            alone_s += system.cpu_s(scheduler)
            rss, spent_s, began = memory().rss, -system.cpu_s(scheduler), time.perf_counter()
            await _flood(session, refused, REFUSALS)
            took_s = time.perf_counter() - began
            spent_s += system.cpu_s(scheduler)
            growth_mib = (memory().rss - rss) / 2**20
            session.cancel()
    details = {
        "per_cpu_s": REFUSALS / spent_s,
        "per_s": REFUSALS / took_s,
        "per_cpu_s, a message for each": REFUSALS // 4 / alone_s,
        "growth_mib": growth_mib,
    }
    return Measurement(details["per_cpu_s"] if growth_mib <= MOST_GROWTH_MIB else 0.0, details)


async def _flood(session: Any, request: pb.GenerateRequest, count: int, *, together: bool = True) -> None:
    """Send so many requests, a bounded number ahead of their refusals; together as the SDK does it."""
    room = asyncio.Semaphore(_IN_FLIGHT)

    async def send() -> None:
        left = count
        while left:
            outbox = deque[pb.SessionRequest | pb.GenerateRequest]()
            while not outbox or (together and len(outbox) < left and not room.locked()):
                await room.acquire()
                outbox.append(request)
            left -= len(outbox)
            while outbox:
                await session.write(next_message(outbox))

    async def receive() -> None:
        got = 0
        while got < count:
            for event in (await session.read()).events:
                if event.WhichOneof("event") == "error":
                    if event.error.reason not in {"QUEUE_FULL", "SHED"}:
                        raise RuntimeError(f"refused for another reason: {event.error.reason}")
                    got += 1
                    room.release()

    await asyncio.gather(send(), receive())
