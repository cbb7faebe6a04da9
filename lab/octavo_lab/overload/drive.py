"""Traffic past what a service can take: its capacity measured first, then what is asked as a share of it."""

from __future__ import annotations

import random
import statistics
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from octavo.aio import AsyncClient
from octavo.status import Status

from octavo_lab.command import BenchError
from octavo_lab.load.arrivals import Closed, Phases, Poisson, Process
from octavo_lab.load.generator import RunLimits, Traffic, generate, requests_needed
from octavo_lab.load.records import Outcome, RunRecord
from octavo_lab.load.summary import Slo
from octavo_lab.load.target import LoadTarget, PlannedRequest
from octavo_lab.load.targets.octavo import OctavoTarget
from octavo_lab.load.watch import status_told

TTFT_SLO_S: Final = 1.5
TPOT_FACTOR: Final = 4.0
"""A request is good when its mean TPOT is within this many times that of an unloaded service."""
_MOST_PER_SLOT_PER_S: Final = 10
"""Requests that are prepared for each slot of a closed loop and second."""
_LOOK_S: Final = 0.1
_DRAIN_S: Final = 20.0
"""What has not ended so long after the window cannot have been good."""
_VOCABULARY: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """What is asked for: lengths drawn evenly from ranges, in tokens, no two prompts alike."""

    prompt_tokens: tuple[int, int] = (64, 192)
    output_tokens: tuple[int, int] = (32, 96)
    vocabulary: tuple[int, int] = (10, 10 + _VOCABULARY)
    """Token ids that prompts are made of."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of every request, by the names of `octavo.types.GenerateOptions`."""

    def requests(self, count: int, seed: int) -> list[PlannedRequest]:
        """Return so many requests."""
        rng = random.Random(seed)

        def one() -> PlannedRequest:
            prompt = [rng.randrange(*self.vocabulary) for _ in range(rng.randint(*self.prompt_tokens))]
            tokens = {"prompt_tokens": len(prompt), "output_tokens": rng.randint(*self.output_tokens)}
            return PlannedRequest(prompt=prompt, **tokens, options=self.options)

        return [one() for _ in range(count)]


def seats_of(details: Mapping[str, Any]) -> int:
    """Return the requests that all workers run at a time.

    Raises:
        BenchError: the service does not say.
    """
    if not (details.get("max_num_seqs") and details.get("workers")):
        raise BenchError(
            "the service does not tell what its workers hold: it takes a key that may see the status"
        )
    return int(details["max_num_seqs"] * details["workers"])


async def vocabulary_of(target: OctavoTarget) -> tuple[int, int]:
    """Return a range of token ids that the model of a target has."""
    served = await target.client.models()
    models = {name: model for model in served for name in (*model.adapters, model.id)}
    first, last = Mix().vocabulary
    return first, min(last, models[target.record.model].vocab_size)


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a service can do, measured before it is overloaded."""

    capacity_per_s: float
    """Requests per second that are answered when there are always more."""
    unloaded_tpot_s: float
    """Mean TPOT of one request at a time."""
    unloaded_ttft_s: float

    @property
    def slo(self) -> Slo:
        """What a good answer keeps."""
        return Slo(ttft_s=TTFT_SLO_S, tpot_s=TPOT_FACTOR * self.unloaded_tpot_s)


async def calibrate(target: LoadTarget, mix: Mix, concurrency: int, seconds: float) -> Calibration:
    """Measure a service unloaded for half the time, then with `concurrency` requests under way all the time.

    Raises:
        BenchError: it does not answer.
    """
    alone = await drive(target, mix, Closed(1), seconds=seconds / 2, seed=1)
    answered = [one for one in alone.requests if one.outcome is Outcome.OK][1:]
    if not answered:
        said = alone.requests[0].reason or f"{seconds / 2:g} s are too short for a second answer"
        raise BenchError(f"the service cannot be measured unloaded: {said}")
    full = await drive(target, mix, Closed(concurrency), warm_up_s=seconds / 4, seconds=seconds, seed=2)
    # By when they ended: those under way at both ends of the window cancel out.
    ended = sum(
        one.outcome is Outcome.OK and full.warm_up_s <= one.ended_s < full.until_s for one in full.requests
    )
    return Calibration(
        capacity_per_s=ended / full.window_s,
        unloaded_tpot_s=statistics.fmean(one.tpot_s for one in answered if one.tpot_s is not None),
        unloaded_ttft_s=statistics.fmean(one.ttft_s for one in answered if one.ttft_s is not None),
    )


async def drive(
    target: LoadTarget, mix: Mix, arrivals: Process, *, warm_up_s: float = 0.0, seconds: float, seed: int
) -> RunRecord:
    """Send a mix for so many seconds after the warm-up."""
    end_s = warm_up_s + seconds
    if isinstance(arrivals, Closed):
        count = arrivals.concurrency * (1 + round(_MOST_PER_SLOT_PER_S * end_s))
    else:
        count = requests_needed(arrivals, seed, end_s)
    traffic = Traffic(
        requests=mix.requests(count, seed),
        arrivals=arrivals,
        seed=seed,
        dataset=f"prompts of {mix.prompt_tokens} tokens, outputs of {mix.output_tokens}, drawn evenly",
        warm_up_s=warm_up_s,
        duration_s=seconds,
    )
    return await generate(target, traffic, RunLimits(drain_s=_DRAIN_S))


async def at_load(
    target: LoadTarget, mix: Mix, rate_per_s: float, seconds: float, seed: int = 3
) -> RunRecord:
    """Drive a Poisson load; an eighth of the time on top is warm-up."""
    return await drive(target, mix, Poisson(rate_per_s), warm_up_s=seconds / 8, seconds=seconds, seed=seed)


@dataclass(frozen=True, slots=True)
class Look:
    """What the service said of itself at one moment, in seconds since the watch began."""

    at_s: float
    level: int
    waiting: int
    running: int


@asynccontextmanager
async def watch(client: AsyncClient) -> AsyncIterator[list[Look]]:
    """Note level and queue ten times a second for as long as the block lasts."""
    looks: list[Look] = []

    def note(status: Status, at_s: float) -> None:
        waiting = sum(queue.waiting for queue in status.queues)
        looks.append(Look(at_s, status.level, waiting, sum(worker.running for worker in status.workers)))

    async with status_told(client, _LOOK_S, note):
        yield looks


async def through(target: LoadTarget, mix: Mix, phases: Phases, seed: int = 4) -> RunRecord:
    """Drive phases of different load, one after the other."""
    return await drive(target, mix, phases, seconds=phases.duration_s, seed=seed)
