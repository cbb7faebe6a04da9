"""Overload: what is still served at twice the capacity, how soon it is over, and what refusing costs.

With real processes: a scheduler, a worker, and the load generator in this process, all on this machine.
"""

# ruff: noqa: PLC0415 - the extra `bench` need not be installed for the other measures

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final, cast

import grpc.aio
import numpy as np
import psutil
from octavo._sdk.session import next_message
from octavo.stack import Stack, StackConfig
from octavo.v1 import common_pb2, generation_pb2_grpc
from octavo.v1 import generation_pb2 as pb

from octavo_lab.scorecard import Measured, at_least, at_most, entry

if TYPE_CHECKING:
    from octavo_lab.load.records import RunRecord
    from octavo_lab.load.target import Target
    from octavo_lab.overload.drive import Calibration, Mix

SEATS: Final = 16
WINDOW_S: Final = 60.0
CALIBRATE_S: Final = 20.0
REFUSALS: Final = 60_000
MOST_GROWTH_MIB: Final = 4.0
_IN_FLIGHT: Final = 2_000
_FLOOD_MORE: Final = 2_000
"""Batch requests that take the place of those that are done."""
_MIB: Final = 1 << 20
READY_S: Final = 1200.0
_VLLM: Final = ("--max-num-batched-tokens", "512", "--max-model-len", "1024")
_SIM_SPEED: Final = ("--sim-speed", "4")
_SIM_VOCABULARY: Final = (3, 250)
_SEATS_FLAGS: Final = ("--max-num-seqs", str(SEATS))


@asynccontextmanager
async def _stack(
    *worker_args: str, scheduler_args: tuple[str, ...] = (), model: str = "demo"
) -> AsyncIterator[Stack]:
    if model == "sim":
        worker_args += ("--runner", "sim")
    config = StackConfig(model=model, worker_args=worker_args, scheduler_args=scheduler_args)
    with Stack(config) as stack:
        await asyncio.to_thread(stack.wait_ready, READY_S)
        yield stack


def _mix() -> Mix:
    """What clients ask who say what they need."""
    from octavo_lab.overload.drive import TTFT_SLO_S, Mix

    return Mix(options={"priority": "interactive", "ttft_deadline": TTFT_SLO_S})


def _figures(run: RunRecord, measured: Calibration) -> dict[str, Any]:
    """Return what became of a run, in requests per second of its window."""
    from octavo_lab.load.summary import summarize

    summary = summarize(run, measured.slo)
    return {
        "offered_per_s": round(summary.requests / summary.window_s, 2),
        "answered_per_s": round(summary.requests_per_s, 2),
        "goodput_per_s": round(summary.goodput_per_s, 2),
        "ttft_p50_s": summary.ttft_s.p50,
        "ttft_p99_s": summary.ttft_s.p99,
        "reasons": dict(summary.reasons),
        "late_sends": summary.late_sends,
    }


async def _overload(target: Target, mix: Mix, measured: Calibration) -> dict[str, Any]:
    """Drive 0.9 times and twice the capacity; return the figures of both."""
    from octavo_lab.overload.drive import at_load

    found = {}
    for load in (0.9, 2.0):
        run = await at_load(target, mix, load * measured.capacity_per_s, WINDOW_S)
        found[f"{load:g}x"] = _figures(run, measured)
    return found


@entry(
    "overload.goodput_ratio",
    "goodput at twice the capacity over that at 0.9 times, demo model",
    "ratio",
    at_least(0.9),
    long=True,
)
async def goodput_ratio() -> Measured:
    """Goodput: answered, TTFT under 1.5 s, mean TPOT under 4 times the unloaded one."""
    from octavo_lab.load.targets.octavo import OctavoTarget
    from octavo_lab.overload.drive import Mix, calibrate

    async with _stack(*_SEATS_FLAGS) as stack, OctavoTarget(stack.endpoint) as target:
        measured = await calibrate(target, Mix(), 2 * SEATS, CALIBRATE_S)
        found = await _overload(target, _mix(), measured)
    below, above = found["0.9x"], found["2x"]
    share = below["goodput_per_s"] / below["offered_per_s"]
    details = {**found, **asdict(measured), "goodput over offered at 0.9x (target 0.95)": round(share, 3)}
    return Measured(above["goodput_per_s"] / below["goodput_per_s"], details)


@entry(
    "overload.goodput_vs_vllm",
    "goodput of Octavo over vLLM at twice the capacity over that of `vllm serve`, the better of two settings",
    "ratio",
    at_least(1.0),
    long=True,
)
async def goodput_vs_vllm() -> Measured:
    """Same model, executor and traffic. `vllm serve` has no bound on its queue, only on what runs."""
    from octavo_lab.load.targets.octavo import OctavoTarget
    from octavo_lab.load.targets.openai import OpenAiConfig, OpenAiTarget
    from octavo_lab.overload.drive import Mix, at_load, calibrate
    from octavo_lab.scorecard.vllm_server import vllm_serve

    rows: dict[str, Any] = {}
    async with (
        _stack("--runner", "vllm", *_SEATS_FLAGS, *_VLLM) as stack,
        OctavoTarget(stack.endpoint) as target,
    ):
        measured = await calibrate(target, Mix(), 2 * SEATS, 2 * CALIBRATE_S)
        rate = 2 * measured.capacity_per_s
        rows["octavo"] = _figures(await at_load(target, _mix(), rate, WINDOW_S), measured)
    for name, flags in (
        ("vllm serve, its own limit on what runs", ()),
        (f"vllm serve, at most {SEATS} run", _SEATS_FLAGS),
    ):
        async with (
            vllm_serve(*flags, *_VLLM) as server,
            OpenAiTarget(OpenAiConfig(base_url=server.base_url)) as target,
        ):
            rows[name] = _figures(await at_load(target, Mix(), rate, WINDOW_S), measured)
    best = max(row["goodput_per_s"] for name, row in rows.items() if name != "octavo")
    # Nothing good at all counts as one request of the window.
    ratio = rows["octavo"]["goodput_per_s"] / max(best, 1 / WINDOW_S)
    return Measured(ratio, {**rows, **asdict(measured)})


@entry(
    "overload.recovery_s",
    "from the end of a minute at twice the capacity to level 0 and the P99 TTFT of before, within 20%",
    "s",
    at_most(10),
    long=True,
)
async def recovery_s() -> Measured:
    """Before and after, half of the capacity is asked for.

    With simulated steps, a quarter as long as the demo model's: a P99 wants hundreds of requests.
    """
    from octavo_lab.load.arrivals import Phase, Phases
    from octavo_lab.load.targets.octavo import OctavoTarget
    from octavo_lab.overload.drive import Mix, calibrate, through, watch
    from octavo_lab.overload.timeline import Timeline

    plain = Mix(vocabulary=_SIM_VOCABULARY)
    async with (
        _stack(*_SEATS_FLAGS, *_SIM_SPEED, model="sim") as stack,
        OctavoTarget(stack.endpoint) as target,
    ):
        measured = await calibrate(target, plain, 2 * SEATS, CALIBRATE_S)
        capacity = measured.capacity_per_s
        plan = Phases((Phase(45, capacity / 2), Phase(60, 2 * capacity), Phase(45, capacity / 2)))
        async with watch(target.client) as looks:
            run = await through(target, replace(plain, options=_mix().options), plan)
    timeline = Timeline(run, looks, measured, 45.0, 105.0, 5.0)
    record = timeline.as_record()
    del record["looks"]
    return Measured(math.inf if timeline.recovery_s is None else timeline.recovery_s, record)


@entry(
    "overload.batch_flood",
    "interactive P99 TTFT behind 10,000 batch requests over that behind 500",
    "ratio",
    at_most(1.25),
    long=True,
)
async def batch_flood() -> Measured:
    """Real scheduler and worker; the worker's steps take the times of the demo model, four times as fast."""
    p99 = {backlog: await _interactive_p99_s(backlog) for backlog in (500, 10_000)}
    return Measured(p99[10_000] / p99[500], {f"p99_ttft_s behind {n}": value for n, value in p99.items()})


async def _interactive_p99_s(backlog: int) -> float:
    """Return the P99 TTFT of interactive requests while a backlog of the batch class is kept up."""
    from octavo_lab.load.arrivals import Closed, Poisson
    from octavo_lab.load.generator import Traffic, generate
    from octavo_lab.load.records import Outcome
    from octavo_lab.load.targets.octavo import OctavoTarget
    from octavo_lab.overload.drive import Mix, drive

    flags = (
        "--max-waiting-requests",
        "40000",
        "--max-waiting-tokens",
        "none",
        "--max-session-requests",
        "40000",
    )
    batch = Mix(vocabulary=_SIM_VOCABULARY, output_tokens=(200, 300), options={"priority": "batch"})
    interactive = Mix(vocabulary=_SIM_VOCABULARY, output_tokens=(8, 16), options={"priority": "interactive"})
    async with (
        _stack(*_SEATS_FLAGS, *_SIM_SPEED, scheduler_args=flags, model="sim") as stack,
        OctavoTarget(stack.endpoint) as flood,
        OctavoTarget(stack.endpoint) as target,
    ):
        requests = batch.requests(backlog + _FLOOD_MORE, seed=5)
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


async def _refusals() -> dict[str, float]:
    """Have a full queue refuse tens of thousands of requests on one Session stream."""
    flags = ("--max-waiting-requests", "1", "--max-session-requests", "100000", "--log-format", "json")
    terms = pb.ServiceTerms(queue_timeout_ms=3_600_000)
    async with (
        _stack("--max-num-seqs", "1", "--sim-speed", "0.05", scheduler_args=flags, model="sim") as stack,
        grpc.aio.insecure_channel(stack.endpoint) as channel,
    ):
        # The stubs' types know the synchronous kind only.
        session = cast("Any", generation_pb2_grpc.GenerationStub(channel)).Session()
        sampling = common_pb2.SamplingParams(max_tokens=500, ignore_eos=True)
        for number in range(2):
            filler = pb.GenerateRequest(
                request_id=f"fill-{number}", text="x" * 100, sampling=sampling, terms=terms
            )
            await session.write(pb.SessionRequest(generate=filler))
            await session.read()
        refused = pb.GenerateRequest(request_id="refused", text="x" * 2000, terms=terms)
        process = psutil.Process(stack.scheduler.process.pid)
        await _flood(session, refused, REFUSALS // 4)
        alone_s = -_cpu_s(process)
        await _flood(session, refused, REFUSALS // 4, together=False)
        alone_s += _cpu_s(process)
        rss, cpu_s, began = process.memory_info().rss, _cpu_s(process), time.perf_counter()
        await _flood(session, refused, REFUSALS)
        took_s, cpu_s = time.perf_counter() - began, _cpu_s(process) - cpu_s
        growth = process.memory_info().rss - rss
        session.cancel()
    return {
        "per_cpu_s": REFUSALS / cpu_s,
        "per_s": REFUSALS / took_s,
        "per_cpu_s, a message for each": REFUSALS // 4 / alone_s,
        "growth_mib": growth / _MIB,
    }


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
            message = await session.read()
            for event in message.events:
                if event.WhichOneof("event") == "error":
                    if event.error.reason not in {"QUEUE_FULL", "SHED"}:
                        raise RuntimeError(f"refused for another reason: {event.error.reason}")
                    got += 1
                    room.release()

    await asyncio.gather(send(), receive())


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@entry(
    "overload.refusals_per_s",
    "requests refused for load per second of the scheduler's CPU; 0 when its memory grows meanwhile",
    "1/s",
    at_least(5000),
)
async def refusals_per_s() -> Measured:
    """Prompts of 2 kB on one Session, refused by a full queue; those that wait are sent together."""
    found = await _refusals()
    return Measured(found["per_cpu_s"] if found["growth_mib"] <= MOST_GROWTH_MIB else 0.0, found)
