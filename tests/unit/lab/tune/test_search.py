"""The tuner's search, on made-up responses and on the simulated worker."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from octavo_lab.fleet.arms import STANDARD_FLEET
from octavo_lab.tune.search import BETTER, Settings, SettingsSearch, Space, Trial, TuningResult
from octavo_lab.tune.simulated import SimulatedTrials
from octavo_lab.tune.target import LatencyTarget, keeps_up

SPACE = Space((4, 8, 16, 32, 64, 128), (128, 256, 512, 1024, 2048))


class Response:
    """Settings keep rates up to a capacity that is known."""

    def __init__(self, best: Settings, most: float) -> None:
        self._best = best
        self._most = most
        self.trials = 0

    def capacity(self, settings: Settings) -> float:
        far = abs(settings.max_num_seqs.bit_length() - self._best.max_num_seqs.bit_length())
        far += abs(
            settings.max_num_batched_tokens.bit_length() - self._best.max_num_batched_tokens.bit_length()
        )
        memory = 0.0 if (settings.gpu_memory_utilization or 1.0) < 0.5 else 1.0
        return self._most * 0.8**far * memory

    def __call__(self, settings: Settings, rate_per_s: float) -> Trial:
        self.trials += 1
        kept = rate_per_s <= self.capacity(settings)
        return Trial(settings, rate_per_s, kept, 100, not kept, 0.1 * rate_per_s, 0.01)


def try_all(search: SettingsSearch) -> TuningResult:
    """Try every setting of the space with the same care."""
    space = search.space
    for place in itertools.product(range(len(space.max_num_seqs)), range(len(space.max_num_batched_tokens))):
        if (settings := space.at(place)) is not None:
            search._challenge(settings)
    return search.found


@pytest.mark.parametrize("first_rate", [0.5, 10.0, 300.0])
@pytest.mark.parametrize("seqs", [4, 32, 128])
@pytest.mark.parametrize("tokens", [128, 512, 2048])
def test_search_finds_a_peak_wherever_it_is(first_rate: float, seqs: int, tokens: int) -> None:
    response = Response(Settings(seqs, tokens), 10.0)
    found = SettingsSearch(SPACE, response, first_rate).run()
    assert found.best is not None
    assert response.capacity(found.best.settings) >= 0.9 * 10.0
    assert found.best.rate_per_s >= 0.9 * 10.0 / BETTER


def test_search_asks_less_than_a_grid_would() -> None:
    searched, tried = Response(Settings(32, 512), 10.0), Response(Settings(32, 512), 10.0)
    SettingsSearch(SPACE, searched, 2.0).run()
    try_all(SettingsSearch(SPACE, tried, 2.0))
    assert searched.trials < 0.7 * tried.trials


def test_search_says_so_when_nothing_keeps_the_target() -> None:
    found = SettingsSearch(SPACE, Response(Settings(32, 512), 1e-6), 2.0).run()
    assert found.best is None
    assert found.frontier() == []


def test_search_stops_when_time_is_up_with_the_best_so_far() -> None:
    response = Response(Settings(128, 2048), 10.0)
    found = SettingsSearch(SPACE, response, 2.0, may_go_on=lambda: response.trials < 6).run()
    assert response.trials == 6
    assert found.best is not None


def test_search_ends_when_every_rate_is_kept() -> None:
    found = SettingsSearch(SPACE, Response(Settings(32, 512), float("inf")), 2.0).run()
    assert found.best is not None


@pytest.mark.parametrize("equal", [True, False])
def test_rate_that_keeps_a_target_for_tokens_alone_is_one_that_the_worker_can_serve(equal: bool) -> None:
    rng = random.Random(5)
    lengths = [(100, 20) if equal else (rng.randint(20, 400), rng.randint(5, 80)) for _ in range(800)]
    worker = replace(STANDARD_FLEET.worker, num_blocks=2048, max_model_len=512)
    target = LatencyTarget(percentile=90, tpot_s=0.3)
    trials = SimulatedTrials(worker, lengths[:200], target)
    best = SettingsSearch(Space((16,), (256,)), trials, 4.0).run().best
    assert best is not None
    # More requests than the trial had, so that the beginning and the end of them hardly count.
    again = SimulatedTrials(worker, lengths, target)(best.settings, best.rate_per_s)
    assert again.tokens_per_s is not None
    answered_per_s = again.tokens_per_s * len(lengths) / sum(output for _, output in lengths)
    assert best.rate_per_s < 1.1 * answered_per_s


def test_trial_during_which_too_little_is_answered_does_not_keep_up() -> None:
    arrived = [float(number) for number in range(101)]
    prompt = [(at + 3.0, 3.0) for at in arrived]
    assert keeps_up(arrived, prompt)
    assert keeps_up(arrived, prompt[:93])
    assert not keeps_up(arrived, prompt[:80])
    # A service at half of the rate, and one that answers all of a burst at once.
    assert not keeps_up(arrived, [(2 * at + 3.0, 3.0) for at in arrived])
    assert not keeps_up([0.0, 0.1, 0.2, 0.3], [(5.0, 4.9)] * 4)
    assert not keeps_up(arrived, [])


def test_wait_that_the_target_grants_is_no_falling_behind() -> None:
    arrived = [number / 20 for number in range(500)]
    ended = [(at + 7.0, 7.0, 3.0) for at in arrived]
    for bound, keeps in ((3.0, True), (None, False)):
        target = LatencyTarget(ttft_s=bound)
        assert keeps_up(arrived, [(at, target.granted_s(e2e, ttft)) for at, e2e, ttft in ended]) is keeps


def test_search_never_asks_for_fewer_tokens_than_sequences() -> None:
    asked: list[Settings] = []
    space = Space((64, 128, 256), (64, 128))
    SettingsSearch(
        space, Response(Settings(256, 64), 5.0), 1.0, lambda trial: asked.append(trial.settings)
    ).run()
    assert asked
    assert all(one.max_num_batched_tokens >= one.max_num_seqs for one in asked)


def test_least_memory_that_keeps_the_rate_is_recommended() -> None:
    search = SettingsSearch(SPACE, Response(Settings(32, 512), 10.0), 2.0)
    found = search.run()
    search.lowest_memory((0.9, 0.7, 0.5, 0.3))
    assert found.best is not None
    assert found.best.settings.gpu_memory_utilization == 0.5


def test_frontier_holds_what_nothing_beats() -> None:
    found = SettingsSearch(SPACE, Response(Settings(32, 512), 10.0), 1.0).run()
    front = found.frontier()
    assert front[0].rate_per_s == max(trial.rate_per_s for trial in found.trials if trial.kept)
    assert [trial.rate_per_s for trial in front] == sorted((t.rate_per_s for t in front), reverse=True)
    assert all(trial.kept for trial in front)


def test_target_allows_the_share_that_its_percentile_leaves() -> None:
    target = LatencyTarget(percentile=99, ttft_s=1.0, tpot_s=0.1)
    assert (target.allowed_misses(500), target.allowed_misses(99), target.least_requests) == (5, 0, 500)
    assert target.missed(None, None)
    assert target.missed(1.1, 0.05)
    assert target.missed(0.5, 0.2)
    assert not target.missed(0.5, None)


@pytest.mark.slow
@pytest.mark.parametrize(("ttft_s", "tpot_s", "num_blocks"), [(1.0, 0.1, 2048), (2.0, 0.4, 400)])
def test_search_on_the_simulated_worker_is_within_a_tenth_of_the_grid(
    ttft_s: float, tpot_s: float, num_blocks: int
) -> None:
    rng = random.Random(5)
    lengths = [(rng.randint(20, 400), rng.randint(5, 80)) for _ in range(150)]
    worker = replace(STANDARD_FLEET.worker, num_blocks=num_blocks, max_model_len=512)
    target = LatencyTarget(percentile=90, ttft_s=ttft_s, tpot_s=tpot_s)
    space = Space((4, 16, 64), (64, 256, 1024))
    searched = SettingsSearch(space, SimulatedTrials(worker, lengths, target), 4.0).run()
    tried = try_all(SettingsSearch(space, SimulatedTrials(worker, lengths, target), 4.0))
    assert searched.best is not None
    assert tried.best is not None
    assert searched.best.rate_per_s >= 0.9 * tried.best.rate_per_s
