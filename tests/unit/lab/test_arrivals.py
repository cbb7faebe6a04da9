from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from octavo_lab.command import BenchError
from octavo_lab.load.arrivals import (
    Arrivals,
    Bursty,
    Closed,
    Even,
    Gamma,
    Phase,
    Phases,
    Poisson,
    Replay,
)
from scipy import stats

COUNT = 4000
SIGNIFICANCE = 0.01
"""Seeds are fixed, so that a test which passes once passes always; a wrong process fails by far."""


def gaps(arrivals: Arrivals, seed: int, count: int = COUNT) -> np.ndarray:
    times = np.fromiter(itertools.islice(arrivals.times(seed), count), dtype=float)
    return np.diff(times, prepend=0.0)


def times_until(times: Iterator[float], end: float) -> np.ndarray:
    return np.array(list(itertools.takewhile(lambda at: at < end, times)))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_poisson_gaps_are_exponential(seed: int) -> None:
    result = stats.kstest(gaps(Poisson(7.0), seed), stats.expon(scale=1 / 7.0).cdf)
    assert result.pvalue > SIGNIFICANCE


def test_poisson_counts_vary_as_much_as_their_mean() -> None:
    times = np.fromiter(itertools.islice(Poisson(5.0).times(4), COUNT), dtype=float)
    counts = np.bincount(times.astype(int))[:-1]
    # The index of dispersion times its degrees of freedom is chi-squared for a Poisson process.
    statistic = counts.var(ddof=1) / counts.mean() * (len(counts) - 1)
    assert 0.005 < stats.chi2.cdf(statistic, len(counts) - 1) < 0.995
    assert abs(np.corrcoef(counts[:-1], counts[1:])[0, 1]) < 3 / math.sqrt(len(counts))


@pytest.mark.parametrize("cv", [0.25, 1.0, 2.0])
def test_gamma_gaps_have_the_stated_variation(cv: float) -> None:
    sample = gaps(Gamma(2.0, cv), seed=5)
    shape = 1 / cv**2
    result = stats.kstest(sample, stats.gamma(shape, scale=1 / (shape * 2.0)).cdf)
    assert result.pvalue > SIGNIFICANCE


def test_the_goodness_of_fit_test_tells_processes_apart() -> None:
    assert stats.kstest(gaps(Gamma(7.0, 1.2), 1), stats.expon(scale=1 / 7.0).cdf).pvalue < SIGNIFICANCE
    assert stats.kstest(gaps(Bursty(7.0), 1), stats.expon(scale=1 / 7.0).cdf).pvalue < SIGNIFICANCE


def test_bursty_keeps_its_rate_and_clusters() -> None:
    process = Bursty(5.0, ratio=10.0, burst_s=2.0, calm_s=8.0)
    times = times_until(process.times(1), 40_000.0)
    assert len(times) / 40_000.0 == pytest.approx(5.0, rel=0.05)
    counts = np.bincount(times.astype(int))
    assert counts.var() / counts.mean() > 3


def test_bursty_states_have_their_rates() -> None:
    burst, calm = Bursty(5.0, ratio=10.0, burst_s=2.0, calm_s=8.0).rates_per_s
    assert burst == pytest.approx(10 * calm)
    assert 0.2 * burst + 0.8 * calm == pytest.approx(5.0)


def test_on_off_is_silent_between_bursts() -> None:
    process = Bursty(5.0, ratio=math.inf, burst_s=1.0, calm_s=9.0)
    times = times_until(process.times(2), 5_000.0)
    assert len(times) / 5_000.0 == pytest.approx(5.0, rel=0.1)
    silent = np.diff(times)
    assert silent[silent > 1.0].sum() > 0.75 * 5_000.0


def test_phases_change_the_rate_at_their_time_and_end() -> None:
    process = Phases((Phase(400.0, 2.0), Phase(100.0, 0.0), Phase(400.0, 8.0)))
    times = np.array(list(process.times(3)))
    counts, _ = np.histogram(times, bins=[0, 400, 500, 900])
    assert counts[1] == 0
    assert counts[0] == pytest.approx(800, abs=3 * math.sqrt(800))
    assert counts[2] == pytest.approx(3200, abs=3 * math.sqrt(3200))
    assert times[-1] < 900
    assert process.rate_per_s == pytest.approx(4000 / 900)


def test_even_comes_like_a_clock() -> None:
    assert gaps(Even(4.0), 0, 8) == pytest.approx([0.25] * 8)


@pytest.mark.parametrize("process", [Poisson(3.0), Gamma(3.0, 2.0), Bursty(3.0), Phases((Phase(50, 3),))])
def test_a_seed_gives_the_same_times_and_another_others(process: Arrivals) -> None:
    first, again, other = (list(itertools.islice(process.times(seed), 50)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_replay_begins_at_zero_and_stretches_to_a_rate() -> None:
    trace = Replay((10.0, 11.0, 14.0), "a trace")
    assert list(trace.times(0)) == [0.0, 1.0, 4.0]
    assert trace.rate_per_s == 0.5
    assert list(trace.at_rate(1.0).times(0)) == [0.0, 0.5, 2.0]
    assert trace.at_rate(1.0).rate_per_s == pytest.approx(1.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Poisson(0.0),
        lambda: Poisson(math.nan),
        lambda: Gamma(1.0, 0.0),
        lambda: Bursty(1.0, ratio=0.5),
        lambda: Phases((Phase(0.0, 1.0),)),
        lambda: Phases((Phase(1.0, -1.0),)),
        lambda: Replay((1.0,)),
        lambda: Closed(0),
    ],
)
def test_nonsense_is_refused(make: object) -> None:
    with pytest.raises(BenchError):
        make()  # type: ignore[operator]
