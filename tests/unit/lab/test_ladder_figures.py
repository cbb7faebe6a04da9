"""What figures a ladder makes of its cells."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from statistics import fmean

import pytest
from octavo_lab.ladder.cells import Sample, settled
from octavo_lab.ladder.config import FULL
from octavo_lab.ladder.figures import Figures, figures_of, latency
from octavo_lab.ladder.report import compare, differs, ratio_by_repeat
from octavo_lab.load.records import Outcome

from tests.unit.lab.ladder_samples import cell, drawn, request


def e2e(*latencies: float, unanswered: int = 0):  # type: ignore[no-untyped-def]
    requests = [request(number, 0.0, took) for number, took in enumerate(latencies)]
    requests += [request(1000 + number, 0.0, 1.0, Outcome.TIMEOUT) for number in range(unanswered)]
    return latency(requests, lambda one: one.e2e_s)


def test_percentile_counts_the_unanswered_as_slower_than_all() -> None:
    answered = [float(number) for number in range(1, 101)]
    assert e2e(*answered).p50.interval.value == pytest.approx(50.5)
    assert e2e(*answered, unanswered=60).p50.interval.value == pytest.approx(80.5)


def test_percentile_among_the_unanswered_is_told_as_a_bound() -> None:
    half = e2e(*[1.0] * 50, *[2.0] * 50, unanswered=120)
    assert half.p50.interval is None
    assert half.p50.over_s == 2.0


def test_percentile_whose_interval_reaches_the_unanswered_has_no_upper_bound() -> None:
    near = e2e(*[float(number) for number in range(100)], unanswered=95)
    assert near.p50.interval is not None
    assert near.p50.interval.high is None


def test_p99_wants_500_requests() -> None:
    assert e2e(*[1.0] * 499).p99.interval is None
    assert e2e(*[1.0] * 500).p99.interval is not None


def test_figures_pool_repeats_and_leave_the_warm_up_out() -> None:
    results = [drawn(cell(repeat=repeat), 0.5) for repeat in range(2)]
    figures = figures_of(results, FULL)
    assert figures.requests == sum(len(one.run.measured) for one in results)
    assert figures.requests < sum(len(one.run.requests) for one in results)
    # Two tokens for each request that ends within the windows.
    assert figures.tokens_per_s.value == pytest.approx(20.0, rel=0.05)
    assert list(figures.tokens_per_s_by_repeat) == [0, 1]
    assert figures.tokens_per_s.low < fmean(figures.tokens_per_s_by_repeat.values())
    assert figures.kv_written.value == pytest.approx(0.5)
    assert figures.cost_per_1k_tokens == pytest.approx(1000 / 3600 / figures.tokens_per_s.value)
    assert sum(part.count for part in figures.queue_by_bucket.values()) == figures.requests


def test_figures_of_a_cell_without_answers_promise_nothing() -> None:
    figures = figures_of([drawn(cell(), 0.5, unanswered=10_000)], FULL)
    assert figures.outcomes == {"abandoned": figures.requests}
    assert figures.e2e.p50.interval is None
    assert figures.goodput_per_s.value == 0.0
    assert figures.cost_per_1k_tokens is None


def test_figures_of_a_single_repeat_have_no_interval_for_rates() -> None:
    figures = figures_of([drawn(replace(cell(), window_s=60.0), 0.5)], FULL)
    rates = (figures.tokens_per_s, figures.requests_per_s, figures.goodput_per_s, figures.kv_written)
    assert [(one.low, one.high) for one in rates] == [(None, None)] * 4


def test_ratio_is_that_of_the_repeats_that_both_have() -> None:
    ratio = ratio_by_repeat({0: 2.0, 1: 8.0, 3: 9.0}, {0: 1.0, 1: 2.0, 2: 1.0})
    assert ratio is not None
    assert ratio.value == pytest.approx(8**0.5)
    assert ratio.low * ratio.high == pytest.approx(8.0)
    assert ratio_by_repeat({0: 2.0}, {0: 1.0}).low is None
    assert ratio_by_repeat({0: 1.0, 1: 1.0}, {0: 0.0, 1: 1.0}) is None
    assert ratio_by_repeat({0: 1.0}, {1: 1.0}) is None


def test_interval_of_a_ratio_covers_it_however_much_the_time_within_a_repeat_is_alike() -> None:
    rng, inside = random.Random(3), 0

    def rate(machine: float, mean: float) -> float:
        """Eight slices of a window that hardly differ from each other."""
        own = rng.gauss(0.0, 0.1)
        return fmean(mean * math.exp(machine + own + rng.gauss(0.0, 0.01)) for _ in range(8))

    for _ in range(400):
        machine = [rng.gauss(0.0, 0.3) for _ in range(3)]
        over, under = ({n: rate(drift, mean) for n, drift in enumerate(machine)} for mean in (3.0, 2.0))
        ratio = ratio_by_repeat(over, under)
        inside += ratio.low <= 1.5 <= ratio.high
    assert 0.92 <= inside / 400 <= 0.98


def test_ratio_differs_from_one_only_if_its_interval_says_so() -> None:
    assert differs(ratio_by_repeat({0: 2.0, 1: 2.1, 2: 2.0}, {0: 1.0, 1: 1.0, 2: 1.0}))
    assert not differs(ratio_by_repeat({0: 2.0, 1: 0.8, 2: 1.5}, {0: 1.0, 1: 1.0, 2: 1.0}))
    assert not differs(ratio_by_repeat({0: 2.0}, {0: 1.0}))


def test_comparison_is_made_at_the_control_rung_and_at_the_highest() -> None:
    figures: dict[tuple[str, str], Figures] = {}
    for arm, mean_s, written in (("static", 2.0, 0.4), ("continuous-chunked", 0.5, 0.95)):
        for rung, rate in (("middle", 10.0), ("overload", 30.0)):
            of = replace(cell(arm, rung, rate=rate), window_s=60.0)
            figures[arm, rung] = figures_of([drawn(of, mean_s, written=written)], FULL)
    found = compare(figures, {"middle": 10.0, "overload": 30.0}, "middle")
    assert found.p50_ratio is not None
    assert found.p50_ratio.value == pytest.approx(0.25, rel=0.2)
    assert found.p99_ratio is not None
    assert found.p99_ratio.low < found.p99_ratio.value < found.p99_ratio.high
    assert (found.kv_use_static, found.kv_use_paged) == (pytest.approx(0.4), pytest.approx(0.95))
    assert found.saturated_rung == "overload"


def test_comparison_without_the_control_says_nothing() -> None:
    figures = {("continuous-chunked", "middle"): figures_of([drawn(cell("continuous-chunked"), 0.5)], FULL)}
    found = compare(figures, {"middle": 10.0}, "middle")
    assert (found.p50_ratio, found.throughput_ratio, found.kv_use_static) == (None, None, None)


def sample(at: float, steps: int, running: int, written: float, in_step: float) -> Sample:
    return Sample(at, steps, running, 0, written, written, 0.0, 0.0, 0.0, 0, None, in_step, in_step)


def test_samples_count_what_a_step_holds_for_as_long_as_it_runs() -> None:
    # A batch is admitted, its long first step shows the empty pool until it has ended; the last step of
    # half of it shows what they held until its end.
    raw = [
        sample(0.00, 5, 0, 0.0, 0.9),
        sample(0.25, 5, 8, 0.0, 0.9),
        sample(0.50, 5, 8, 0.0, 0.9),
        sample(0.75, 6, 8, 0.4, 0.4),
        sample(1.00, 9, 4, 0.3, 0.6),
        sample(1.25, 10, 0, 0.0, 0.3),
    ]
    assert [one.written for one in settled(raw)] == [0.0, 0.4, 0.4, 0.6, 0.3, 0.0]
    assert not math.isnan(settled(raw)[0].external)
