from __future__ import annotations

import random

from scheduler_svc.observe.recent import RecentTimes


def test_quantiles_are_those_of_the_values_within_three_per_cent() -> None:
    rng = random.Random(1)
    times, values = RecentTimes(), []
    for index in range(5000):
        value, count = rng.lognormvariate(-4, 1.5), rng.randint(1, 20)
        times.add(100 + index * 0.001, value, count)
        values += [value] * count
    values.sort()
    for share in (0.01, 0.5, 0.9, 0.99, 0.999):
        exact = values[int(share * len(values))]
        assert abs(times.quantile(share, 105.0) / exact - 1) < 0.03


def test_values_fade_after_ten_seconds_and_nothing_is_zero() -> None:
    times = RecentTimes()
    assert times.quantile(0.5, 7.0) == 0.0
    times.add(7.5, 0.2)
    times.add(12.5, 2.0)
    assert times.quantile(0.0, 12.6) < 0.21
    assert times.quantile(0.0, 18.0) > 1.9
    assert times.quantile(0.99, 30.0) == 0.0


def test_extremes_stay_in_bounds() -> None:
    times = RecentTimes()
    times.add(1.0, 0.0)
    assert 0 < times.quantile(0.5, 1.0) <= 1e-5
    times.add(1.0, 1e9, 100)
    assert 3000 < times.quantile(0.9, 1.0) < 4000
