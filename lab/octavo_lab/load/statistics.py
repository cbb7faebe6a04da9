"""Estimates with their uncertainty: quantiles that refuse small samples, and confidence intervals.

Quantiles are interpolated linearly between order statistics (type 7 of Hyndman and Fan, numpy's
default). An estimate is given only when at least MIN_BEYOND observations are expected beyond it: a P99
wants 500, a P90 50, a P50 10.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy import stats

MIN_BEYOND: Final = 5
"""Observations on the rarer side of a quantile without which it is not estimated."""
CONFIDENCE: Final = 0.95
NUM_RESAMPLES: Final = 1000
Indices = np.ndarray[tuple[int], np.dtype[np.intp]]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its confidence interval; bounds are None where the data do not give them."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Distribution:
    """A sample in figures. What the sample is too small for is None."""

    count: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None


def needed(quantile: float) -> int:
    """Return how many observations an estimate of a quantile (0 to 1) wants."""
    return math.ceil(round(MIN_BEYOND / min(quantile, 1 - quantile), 6))


def quantile(values: Sequence[float], at: float, independent: int | None = None) -> float | None:
    """Return a quantile, or None when there are too few observations.

    `independent` is the number of observations that count when they are not independent of each other:
    the gaps between tokens of one request are told as one.
    """
    if (len(values) if independent is None else independent) < needed(at):
        return None
    return float(np.quantile(values, at))


def distribution(values: Sequence[float], independent: int | None = None) -> Distribution:
    """Return a sample in figures; `independent` as in `quantile`."""
    if not values:
        return Distribution(0)
    p50, p90, p99 = (quantile(values, at, independent) for at in (0.5, 0.9, 0.99))
    return Distribution(len(values), float(np.mean(values)), p50, p90, p99, max(values))


def quantile_interval(values: Sequence[float], at: float) -> Interval | None:
    """Return a quantile of independent observations with its interval; None when there are too few.

    The bounds are order statistics whose ranks come from the binomial distribution, so that nothing
    is assumed of the shape of the distribution.
    """
    estimate = quantile(values, at)
    if estimate is None:
        return None
    found = stats.quantile_test(values, p=at).confidence_interval(CONFIDENCE)
    # A rank that the sample does not have is no bound.
    low, high = (None if math.isnan(bound) else float(bound) for bound in (found.low, found.high))
    return Interval(estimate, low, high)


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the mean of repeats with its interval by Student's t; no bounds for fewer than two.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("no values to average")
    mean = float(np.mean(values))
    if len(values) < 2:
        return Interval(mean, None, None)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * stats.sem(values))
    return Interval(mean, mean - half, mean + half)


def ratio_interval(over: Sequence[float], under: Sequence[float]) -> Interval:
    """Return the geometric mean of paired ratios, with its interval by Student's t on their logarithms.

    The pairs are repeats taken side by side in time, so that a drift of the machine cancels.

    Raises:
        ValueError: the lengths differ, or a value is not positive.
    """
    if not over or len(over) != len(under) or min(*over, *under) <= 0:
        raise ValueError("a ratio wants pairs of positive values")
    logs = mean_interval([math.log(a / b) for a, b in zip(over, under, strict=True)])
    low, high = (None if bound is None else math.exp(bound) for bound in (logs.low, logs.high))
    return Interval(math.exp(logs.value), low, high)


def quantile_ratio_interval(
    over: Sequence[Sequence[float]],
    under: Sequence[Sequence[float]],
    at: float,
    *,
    seed: int = 1,
) -> Interval | None:
    """Return the ratio of one quantile of two samples, with its interval; None when there is too little.

    Each sample comes in clusters: what is within one (the gaps of a request) is not independent. The
    bounds are percentiles of NUM_RESAMPLES bootstrap samples, for which whole clusters are drawn.
    """
    if min(len(over), len(under)) < needed(at):
        return None
    ours, theirs = ([np.asarray(cluster) for cluster in clusters] for clusters in (over, under))

    def ratio(drawn: Indices, against: Indices) -> float:
        above = np.quantile(np.concatenate([ours[index] for index in drawn]), at)
        return float(above / np.quantile(np.concatenate([theirs[index] for index in against]), at))

    each_once = (np.arange(len(over)), np.arange(len(under)))
    low, high = stats.bootstrap(
        each_once,
        ratio,
        n_resamples=NUM_RESAMPLES,
        vectorized=False,
        confidence_level=CONFIDENCE,
        method="percentile",
        random_state=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(ratio(*each_once), float(low), float(high))
