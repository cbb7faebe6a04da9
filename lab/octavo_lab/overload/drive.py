"""Traffic past what a service can take, as a share of its capacity, and the timeline of what came of it."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np
from octavo.aio import AsyncClient
from octavo.status import Status

from octavo_lab.command import BenchError
from octavo_lab.load.arrivals import Closed, Phases, Poisson, Process
from octavo_lab.load.generator import RunLimits, Traffic, generate, requests_needed
from octavo_lab.load.records import Outcome, RequestMeasurement, RunRecord
from octavo_lab.load.statistics import needed, quantile
from octavo_lab.load.summary import Slo
from octavo_lab.load.target import LoadTarget, PlannedRequest
from octavo_lab.load.watch import status_told

TTFT_SLO_S: Final = 1.5
TPOT_FACTOR: Final = 4.0
"""A request is good when its mean TPOT is within this many times that of an unloaded service."""
_MOST_PER_SLOT_PER_S: Final = 10
"""Requests that are prepared for each slot of a closed loop and second."""
_LOOK_S: Final = 0.1
_DRAIN_S: Final = 20.0
"""What has not ended so long after the window cannot have been good."""
WITHIN: Final = 1.2
"""A TTFT is slow that is more than this many times the baseline's quantile."""
QUANTILES: Final = (0.99, 0.9, 0.5)
"""Of the baseline's TTFT: the first that it has enough requests for is what latency is to be back at."""
_STEP_S: Final = 0.5
_LEAST_REQUESTS: Final = 10
"""Without which nothing is said of the latency from some time on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """What is asked for: lengths drawn evenly from ranges, in tokens, no two prompts alike."""

    prompt_tokens: tuple[int, int] = (64, 192)
    output_tokens: tuple[int, int] = (32, 96)
    vocabulary: tuple[int, int] = (10, 1010)
    """Token ids that prompts are made of."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of every request, by the names of `octavo.types.GenerateOptions`."""

    def requests(self, count: int, seed: int) -> list[PlannedRequest]:
        """Return so many requests."""
        rng = random.Random(seed)

        def one() -> PlannedRequest:
            prompt = [rng.randrange(*self.vocabulary) for _ in range(rng.randint(*self.prompt_tokens))]
            output, size = rng.randint(*self.output_tokens), len(prompt)
            return PlannedRequest(
                prompt=prompt, prompt_tokens=size, output_tokens=output, options=self.options
            )

        return [one() for _ in range(count)]


def seats_of(details: Mapping[str, Any]) -> int:
    """Return the requests that all workers run at a time; BenchError: the service does not say."""
    if not (details.get("max_num_seqs") and details.get("workers")):
        raise BenchError(
            "the service does not tell what its workers hold: it takes a key that may see the status"
        )
    return int(details["max_num_seqs"] * details["workers"])


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
    """Measure a service unloaded for half the time, then kept busy by so many; BenchError: it is silent."""
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


@dataclass(frozen=True, slots=True)
class Timeline:
    """A run of three phases: baseline, overload, recovery. Times in seconds since the run began."""

    run: RunRecord
    looks: Sequence[Look]
    calibration: Calibration
    overload_from_s: float
    overload_to_s: float
    baseline_from_s: float

    @property
    def slo(self) -> Slo:
        """What a good answer keeps."""
        return self.calibration.slo

    def between(self, start_s: float, end_s: float) -> list[RequestMeasurement]:
        """Return the requests planned in a stretch of time."""
        return [one for one in self.run.requests if start_s <= one.offered.planned_s < end_s]

    def phase(self, start_s: float, end_s: float) -> dict[str, Any]:
        """Return the figures of a stretch of time."""
        requests, seconds = self.between(start_s, end_s), end_s - start_s
        levels = (look.level for look in self.looks if start_s <= look.at_s < end_s)
        outcomes = Counter(one.reason or one.outcome.value for one in requests)
        return {
            "offered_per_s": len(requests) / seconds,
            "goodput_per_s": sum(map(self.slo.met_by, requests)) / seconds,
            "ttft_p50_s": quantile(_ttfts(requests), 0.5),
            "ttft_p99_s": quantile(_ttfts(requests), 0.99),
            "highest_level": max(levels, default=0),
            "outcomes": dict(outcomes.most_common()),
        }

    @property
    def level_zero_s(self) -> float:
        """Seconds from the end of the overload until the level is 0 for good."""
        above = [look.at_s for look in self.looks if look.level > 0 and look.at_s < self.run.until_s]
        return max(0.0, max(above, default=0.0) - self.overload_to_s)

    @property
    def _baseline(self) -> list[float]:
        return _ttfts(self.between(self.baseline_from_s, self.overload_from_s))

    @property
    def latency_quantile(self) -> float | None:
        """The highest of QUANTILES that the baseline has enough requests for; None: there is none."""
        return next((at for at in QUANTILES if len(self._baseline) >= needed(at)), None)

    @property
    def latency_back_s(self) -> float | None:
        """Seconds from the end of the overload until TTFTs are those of the baseline again.

        The least t from which on, and among the ten requests that come first then, no larger share is slow,
        or not answered, than `latency_quantile` leaves. None: there is none, or too few requests to say.
        """
        at = self.latency_quantile
        if at is None:
            return None
        bound_s = WITHIN * float(np.quantile(self._baseline, at))
        for since_s in np.arange(self.overload_to_s, self.run.until_s, _STEP_S).tolist():
            after = self.between(since_s, self.run.until_s)
            if len(after) < _LEAST_REQUESTS:
                break
            parts = after, after[:_LEAST_REQUESTS]
            quick = [sum(ttft_s <= bound_s for ttft_s in _ttfts(part)) for part in parts]
            if all(at * len(part) <= count + 1e-9 for part, count in zip(parts, quick, strict=True)):
                return float(since_s - self.overload_to_s)
        return None

    @property
    def recovery_s(self) -> float | None:
        """Seconds until both are back; None when it is not known of the latency."""
        latency = self.latency_back_s
        return None if latency is None else max(self.level_zero_s, latency)

    def as_record(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        return {
            "calibration": asdict(self.calibration),
            "slo": str(self.slo),
            "recovery_s": self.recovery_s,
            "level_zero_s": self.level_zero_s,
            "latency_back_s": self.latency_back_s,
            "latency_quantile": self.latency_quantile,
            "baseline": self.phase(self.baseline_from_s, self.overload_from_s),
            "overload": self.phase(self.overload_from_s, self.overload_to_s),
            "recovery": self.phase(self.overload_to_s, self.run.until_s),
            "target": asdict(self.run.target),
            "traffic": asdict(self.run.traffic),
            "looks": [asdict(look) for look in self.looks],
        }


def _ttfts(requests: Sequence[RequestMeasurement]) -> list[float]:
    return [one.ttft_s for one in requests if one.outcome is Outcome.OK and one.ttft_s is not None]
