from __future__ import annotations

import math

import numpy as np
import pytest
from octavo_lab.load.statistics import (
    Distribution,
    distribution,
    mean_interval,
    needed,
    quantile,
    quantile_interval,
    quantile_ratio_interval,
    ratio_interval,
)
from scipy import stats

REPEATS = 1500


def test_a_quantile_wants_five_observations_beyond_it() -> None:
    assert [needed(at) for at in (0.5, 0.9, 0.99, 0.999, 0.01)] == [10, 50, 500, 5000, 500]


def test_no_p99_from_fewer_than_500_observations() -> None:
    assert quantile([1.0] * 499, 0.99) is None
    assert quantile([1.0] * 500, 0.99) == 1.0
    small = distribution([float(value) for value in range(60)])
    assert (small.p50, small.p99, small.max) == (29.5, None, 59.0)
    assert small.p90 == pytest.approx(53.1)


def test_observations_of_few_requests_do_not_make_a_p99() -> None:
    assert distribution([1.0] * 10_000, independent=499).p99 is None
    assert distribution([1.0] * 10_000, independent=500).p99 == 1.0


def test_quantiles_are_those_of_known_distributions() -> None:
    exponential = np.random.default_rng(1).exponential(2.0, 200_000)
    found = distribution(list(exponential))
    assert found.mean == pytest.approx(2.0, rel=0.02)
    assert found.p50 == pytest.approx(2 * math.log(2), rel=0.02)
    assert found.p90 == pytest.approx(2 * math.log(10), rel=0.02)
    assert found.p99 == pytest.approx(2 * math.log(100), rel=0.03)


def test_quantiles_interpolate_between_order_statistics() -> None:
    values = [float(value) for value in range(11)]
    assert quantile(values, 0.5) == 5.0
    assert quantile([*values, 11.0], 0.5) == 5.5


def test_of_nothing_there_is_only_a_count() -> None:
    assert distribution([]) == Distribution(0)


def coverage(hits: int) -> float:
    return hits / REPEATS


@pytest.mark.parametrize(("at", "count"), [(0.5, 50), (0.9, 200), (0.99, 1000)])
def test_quantile_intervals_cover_the_truth_as_often_as_they_say(at: float, count: int) -> None:
    rng, truth = np.random.default_rng(2), stats.lognorm(1.5).ppf(at)
    hits = 0
    for _ in range(REPEATS):
        interval = quantile_interval(list(rng.lognormal(0.0, 1.5, count)), at)
        assert interval is not None
        assert interval.low is not None
        hits += interval.low <= truth and (interval.high is None or truth <= interval.high)
    # Order statistics are discrete, so the coverage is somewhat above what is asked, never far below.
    assert 0.94 <= coverage(hits) <= 0.985


def test_quantile_interval_bounds_are_the_binomial_ranks() -> None:
    interval = quantile_interval([float(rank) for rank in range(1, 101)], 0.5)
    # The textbook's 95% interval of the median of 100: order statistics 40 and 61.
    assert interval is not None
    assert (interval.low, interval.high) == (40.0, 61.0)


def test_a_quantile_interval_leaves_open_what_the_sample_does_not_reach() -> None:
    interval = quantile_interval([float(rank) for rank in range(50)], 0.9)
    assert interval is not None
    assert interval.high is not None
    # At least one bound of an extreme quantile of the smallest sample lies beyond the sample.
    extreme = quantile_interval([float(rank) for rank in range(500)], 0.99)
    assert extreme is not None
    assert extreme.low is not None
    assert quantile_interval([1.0] * 499, 0.99) is None


@pytest.mark.parametrize("count", [3, 5, 10])
def test_mean_intervals_cover_the_truth_as_often_as_they_say(count: int) -> None:
    rng = np.random.default_rng(3)
    hits = 0
    for _ in range(REPEATS):
        interval = mean_interval(list(rng.normal(7.0, 2.0, count)))
        assert interval.low is not None
        assert interval.high is not None
        hits += interval.low <= 7.0 <= interval.high
    assert coverage(hits) == pytest.approx(0.95, abs=0.02)


def test_one_repeat_has_no_interval() -> None:
    interval = mean_interval([4.0])
    assert (interval.value, interval.low, interval.high) == (4.0, None, None)
    with pytest.raises(ValueError, match="no values"):
        mean_interval([])


def test_a_drift_that_hits_both_sides_cancels_in_a_ratio() -> None:
    under = [10.0, 20.0, 40.0]
    interval = ratio_interval([2.1 * value for value in under], under)
    assert interval.value == pytest.approx(2.1)
    assert interval.low == pytest.approx(2.1)
    assert interval.high == pytest.approx(2.1)


def test_ratio_intervals_cover_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(4)
    hits = 0
    for _ in range(REPEATS):
        drift = rng.lognormal(0.0, 0.5, 4)
        over, under = 1.5 * drift * rng.lognormal(0, 0.1, 4), drift * rng.lognormal(0, 0.1, 4)
        interval = ratio_interval(list(over), list(under))
        assert interval.low is not None
        assert interval.high is not None
        hits += interval.low <= 1.5 <= interval.high
    assert coverage(hits) == pytest.approx(0.95, abs=0.02)


@pytest.mark.parametrize(("over", "under"), [([1.0], [1.0, 2.0]), ([0.0], [1.0]), ([], [])])
def test_a_ratio_wants_pairs_of_positive_values(over: list[float], under: list[float]) -> None:
    with pytest.raises(ValueError, match="pairs"):
        ratio_interval(over, under)


def clusters(rng: np.random.Generator, count: int, scale: float) -> list[list[float]]:
    """Requests that are slow or fast as a whole."""
    return [list(scale * rng.lognormal(0, 0.3) * rng.lognormal(0, 0.3, 8)) for _ in range(count)]


def test_a_ratio_of_quantiles_has_an_interval_that_covers_it() -> None:
    rng = np.random.default_rng(5)
    hits, runs = 0, 40
    for _ in range(runs):
        interval = quantile_ratio_interval(clusters(rng, 60, 0.5), clusters(rng, 60, 1.0), 0.9)
        assert interval is not None
        assert interval.low is not None
        assert interval.high is not None
        hits += interval.low <= 0.5 <= interval.high
    assert hits / runs >= 0.85


def test_a_ratio_of_p99_wants_500_requests_on_both_sides() -> None:
    rng = np.random.default_rng(6)
    assert quantile_ratio_interval(clusters(rng, 499, 1.0), clusters(rng, 600, 1.0), 0.99) is None


def test_a_ratio_of_quantiles_repeats() -> None:
    one, other = clusters(np.random.default_rng(7), 60, 0.5), clusters(np.random.default_rng(8), 60, 1.0)
    assert quantile_ratio_interval(one, other, 0.9) == quantile_ratio_interval(one, other, 0.9)
