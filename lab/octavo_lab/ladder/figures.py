"""Figures of one arm at one rung: its repeats together, with intervals."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Final

from octavo_lab.ladder.cells import CellResult, series_to_json
from octavo_lab.ladder.config import LadderConfig
from octavo_lab.load.records import Outcome, RequestMeasurement
from octavo_lab.load.statistics import Interval, mean_interval, needed, quantile_interval
from octavo_lab.load.summary import summarize
from octavo_lab.serve.plan import parse_slo

CDF_POINTS: Final = 100
SERIES_POINTS: Final = 60


@dataclass(frozen=True, slots=True)
class Quantile:
    """A quantile of a latency, where a request that was not answered counts as slower than any that was."""

    count: int
    """Requests behind it."""
    interval: Interval | None = None
    """None: too few requests, or beyond what was answered."""
    over_s: float | None = None
    """Set when it lies among the requests that were not answered: it is more than this."""


@dataclass(frozen=True, slots=True)
class Latency:
    """One kind of latency of one arm at one rung."""

    count: int
    unanswered: int
    mean_s: float | None
    """Of those answered."""
    p50: Quantile
    p90: Quantile
    p99: Quantile
    cdf_s: tuple[float, ...] = ()
    """Quantiles 0, 1/n, ... as far as they were answered."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One arm at one rung.

    Intervals of rates and shares are over repeats: parts of one window share whatever the machine did then,
    and would promise more than is known.
    """

    arm: str
    rung: str
    rate_per_s: float
    repeats: int
    window_s: float
    """All windows together."""
    requests: int
    """Planned within the windows, and sent."""
    outcomes: dict[str, int]
    reasons: dict[str, int]
    e2e: Latency
    ttft: Latency
    tpot: Latency
    itl: Latency
    queue: Latency
    queue_by_bucket: dict[str, Latency]
    """By prompt length: `<= 64`, ..."""
    tokens_per_s: Interval
    requests_per_s: Interval
    goodput_per_s: Interval
    good_share: float
    tokens_per_s_by_repeat: dict[int, float]
    kv_written: Interval
    """Mean share of all slots that is written, over time."""
    kv_written_waited: float | None
    """The same over the time in which requests waited, so that memory or places were all that was missing."""
    kv_active: float
    kv_cached: float
    internal: float
    external: float
    running: float
    host_bytes: int
    device_bytes: int | None
    preemptions: int
    cached_share: float | None
    cost_per_1k_tokens: float | None
    late_sends: int
    max_lateness_s: float
    generator_cpu_share: float
    """CPU seconds of the generator per second."""
    series: dict[str, list[Any]] = field(default_factory=dict)
    """Samples of the first repeat, thinned out."""


def figures_of(results: Sequence[CellResult], config: LadderConfig) -> Figures:
    """Return the figures of the repeats of one arm at one rung."""
    slo = parse_slo(config.slo)
    summaries = [summarize(result.run, slo) for result in results]
    measured = [one for result in results for one in result.run.measured]
    samples = [sample for result in results for sample in result.within_window()]
    first = results[0].cell
    waited = [sample for sample in samples if sample.waiting > 0]
    tokens = [one.output_tokens_per_s for one in summaries]
    rate = mean_interval(tokens)
    counted = [one for one in measured if one.cached_tokens is not None and one.prompt_tokens]
    prompts = sum(one.prompt_tokens or 0 for one in counted)
    cached = sum(one.cached_tokens or 0 for one in counted)
    busy_s = (result.run.generator.cpu_s / max(result.run.ended_s, 1e-9) for result in results)
    return Figures(
        arm=first.arm,
        rung=first.rung,
        rate_per_s=first.rate_per_s,
        repeats=len(results),
        window_s=sum(result.run.window_s for result in results),
        requests=len(measured),
        outcomes=_summed(one.outcomes for one in summaries),
        reasons=_summed(one.reasons for one in summaries),
        e2e=latency(measured, lambda one: one.e2e_s),
        ttft=latency(measured, lambda one: one.ttft_s),
        tpot=latency(measured, lambda one: one.tpot_s, of_all=False),
        itl=_gaps(measured),
        queue=latency(measured, _queue_s, of_all=False),
        queue_by_bucket=_by_bucket(measured, config.bucket_bounds),
        tokens_per_s=rate,
        requests_per_s=mean_interval([one.requests_per_s for one in summaries]),
        goodput_per_s=mean_interval([one.goodput_per_s for one in summaries]),
        good_share=sum(one.good_share * one.requests for one in summaries) / max(1, len(measured)),
        tokens_per_s_by_repeat=dict(zip((one.cell.repeat for one in results), tokens, strict=True)),
        kv_written=mean_interval([_mean(at.written for at in one.within_window()) for one in results]),
        kv_written_waited=_mean(at.written for at in waited) if waited else None,
        kv_active=_mean(at.active for at in samples),
        kv_cached=_mean(at.cached for at in samples),
        internal=_mean(at.internal for at in samples if at.active),
        external=_mean(at.external for at in samples if at.active < 1),
        running=_mean(at.running for at in samples),
        host_bytes=max((at.host_bytes for at in samples), default=0),
        device_bytes=max((at.device_bytes for at in samples if at.device_bytes is not None), default=None),
        preemptions=sum(one.preemptions or 0 for one in measured),
        cached_share=cached / prompts if prompts else None,
        cost_per_1k_tokens=config.price_per_hour / 3600 / rate.value * 1000 if rate.value > 0 else None,
        late_sends=sum(one.late_sends for one in summaries),
        max_lateness_s=max((one.lateness_s for one in measured), default=0.0),
        generator_cpu_share=fmean(busy_s),
        series=series_to_json(results[0].samples[:: math.ceil(len(results[0].samples) / SERIES_POINTS) or 1]),
    )


def latency(
    requests: Iterable[RequestMeasurement],
    value: Callable[[RequestMeasurement], float | None],
    *,
    of_all: bool = True,
) -> Latency:
    """Return a latency over all requests; those that were not answered count as slower than all others.

    Otherwise an arm that refuses, or keeps waiting, whom it cannot serve would look faster for it. What
    says nothing of the whole, such as a gap, is told of those answered alone (`of_all` false), in quantiles.
    """
    values = [value(one) if one.outcome is Outcome.OK else None for one in requests]
    answered = sorted(one for one in values if one is not None)
    told = _latency(answered, len(values) - len(answered) if of_all else 0)
    places = [round((told.count - 1) * step / CDF_POINTS) for step in range(CDF_POINTS + 1)]
    cdf_s = tuple(round(answered[place], 4) for place in places if of_all and 0 <= place < len(answered))
    return replace(told, cdf_s=cdf_s)


def _latency(answered: Sequence[float], unanswered: int, independent: int | None = None) -> Latency:
    p50, p90, p99 = (_quantile(answered, unanswered, at, independent) for at in (0.5, 0.9, 0.99))
    mean_s = fmean(answered) if answered else None
    return Latency(len(answered) + unanswered, unanswered, mean_s, p50, p90, p99)


def _quantile(answered: Sequence[float], unanswered: int, at: float, independent: int | None) -> Quantile:
    """Return a quantile of sorted values; `independent` is their number where they depend on each other."""
    count = len(answered) + unanswered
    told = count if independent is None else independent
    if told < needed(at):
        return Quantile(told)
    if math.ceil((count - 1) * at) >= len(answered):
        return Quantile(told, over_s=answered[-1] if answered else 0.0)
    # Any value beyond the largest stands for those without an answer: ranks are all that matters.
    beyond = answered[-1] + 1.0
    found = quantile_interval([*answered, *[beyond] * unanswered], at)
    assert found is not None
    if told < count:
        # The gaps of one request are not independent of each other: no interval can be had this way.
        return Quantile(told, Interval(found.value, None, None))
    return Quantile(told, replace(found, high=None) if unanswered and found.high == beyond else found)


def _gaps(requests: Iterable[RequestMeasurement]) -> Latency:
    done = [one for one in requests if one.outcome is Outcome.OK and len(one.chunk_times_s) > 1]
    return _latency(sorted(gap for one in done for gap in one.gaps_s), 0, independent=len(done))


def _by_bucket(requests: Iterable[RequestMeasurement], bounds: Sequence[int]) -> dict[str, Latency]:
    between = [f"{low + 1} to {high}" for low, high in itertools.pairwise(bounds)]
    names = [f"up to {bounds[0]}", *between, f"over {bounds[-1]}"] if bounds else ["any length"]
    parts: dict[str, list[RequestMeasurement]] = {name: [] for name in names}
    for one in requests:
        tokens = one.offered.prompt_tokens if one.prompt_tokens is None else one.prompt_tokens
        parts[names[bisect.bisect_left(bounds, tokens)]].append(one)
    return {name: latency(part, _queue_s, of_all=False) for name, part in parts.items()}


def _queue_s(one: RequestMeasurement) -> float | None:
    return one.queue_s


def _summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    return dict(+sum(map(Counter, counts), Counter[str]()))


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return fmean(known) if known else 0.0
