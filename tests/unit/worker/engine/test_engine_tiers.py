"""Host tier, swapping and pins, as an engine uses them."""

from __future__ import annotations

from octavo.protocol.steps import StallReason

from tests.unit.worker.driver import Driver, request
from worker_svc.errors import StepFailed

PROMPT = list(range(1, 17))
OTHER = list(range(20, 48))


def evicted_to_host(num_host_blocks: int = 8, promote_blocks_per_step: int = 64) -> Driver:
    """A driver whose host tier holds blocks of PROMPT, pushed out by a larger sequence."""
    driver = Driver(
        num_blocks=9,
        max_model_len=36,
        num_host_blocks=num_host_blocks,
        promote_blocks_per_step=promote_blocks_per_step,
    )
    driver.finish(request([*PROMPT, 48], 1))
    driver.finish(request(OTHER, 5))
    assert driver.host_keys >= set(driver.keys(PROMPT)[1:])
    return driver


def test_evicted_blocks_are_demoted_and_come_back_on_a_hit() -> None:
    driver = evicted_to_host()
    one = request([*PROMPT, 49], 3)
    report = driver.step(one)
    assert report.admitted[0].cached_tokens + report.admitted[0].host_cached_tokens == 16
    assert report.admitted[0].host_cached_tokens >= 12
    assert report.stalled == ((3, StallReason.PROMOTING),)
    before = driver.runner.computed_tokens
    report = driver.step()
    assert report.prefilled == ((3, 1),)
    assert driver.runner.computed_tokens - before == 1
    driver.finish(one)
    assert one.output == driver.expected(one)


def test_sequence_waits_for_its_blocks_and_the_batch_does_not() -> None:
    driver = evicted_to_host()
    driver.runner.copy_polls = 3
    runs = request([40, 41], 12)
    driver.step(runs)
    waits = request([*PROMPT, 49], 3)
    for _ in range(2):
        report = driver.step(*([waits] if waits.handle is None else []))
        assert report.stalled == ((4, StallReason.PROMOTING),)
        assert list(report.token_handles) == [3]
    assert driver.step().prefilled == ((4, 1),)


def test_promotions_per_step_are_bounded() -> None:
    driver = evicted_to_host(promote_blocks_per_step=1)
    one = request([*PROMPT, 49], 1)
    steps = 0
    while one.finished is None:
        before = driver.runner.blocks_in
        driver.step(*([one] if one.handle is None else []))
        assert driver.runner.blocks_in - before <= 1
        steps += 1
    assert steps > 3


def test_sequences_that_want_the_same_blocks_share_one_copy() -> None:
    driver = evicted_to_host()
    driver.runner.copy_polls = 2
    one, two = request([*PROMPT, 49], 2), request([*PROMPT, 47], 2)
    report = driver.step(one, two)
    assert report.admitted[1].host_cached_tokens == report.admitted[0].host_cached_tokens
    driver.finish(one, two)
    assert driver.runner.blocks_in <= 4
    assert [one.output, two.output] == [driver.expected(one), driver.expected(two)]


def test_sequence_cancelled_while_its_blocks_come_leaks_none() -> None:
    driver = evicted_to_host()
    driver.runner.copy_polls = 3
    driver.step(request([*PROMPT, 49], 2))
    driver.cancel(3)
    driver.step()
    driver.let_copies_land()
    pool = driver.engine.pool_report()
    assert pool.free + pool.evictable == 9
    assert pool.unused_slots == 0


def test_copy_to_the_device_that_fails_is_made_up_for_by_computing() -> None:
    driver = evicted_to_host()
    driver.runner.copy_failures.append(None)
    driver.runner.copy_failures.append(StepFailed("copy"))
    one, two = request([*PROMPT, 49], 3), request([*PROMPT, 47], 3)
    driver.step(one, two)
    driver.finish(one, two)
    assert driver.runner.failed_copies_in > 0
    assert [one.output, two.output] == [driver.expected(one), driver.expected(two)]


def test_copy_that_fails_leaves_its_block_to_the_only_one_who_still_waits() -> None:
    driver = Driver(
        num_blocks=13, max_model_len=36, num_host_blocks=8, promote_blocks_per_step=1, pin_budget_blocks=4
    )
    driver.finish(request([*PROMPT, 48], 1))
    for shift in range(2):
        driver.finish(request([token + shift for token in OTHER], 5))
    assert driver.host_keys >= set(driver.keys(PROMPT))
    driver.engine.pin("system", driver.keys(PROMPT))
    driver.runner.copy_failures.extend([None, StepFailed("copy")])
    gone, stays = request([*PROMPT, 49], 2), request([*PROMPT, 47], 2)
    report = driver.step(gone, stays)
    assert driver.runner.failed_copies_in == 1
    driver.cancel(*[entry.handle for entry in report.admitted[:1]])
    # What came is pinned and what is left of the pool is taken: there is nothing to compute into.
    fills = request(range(1, 29)[::-1], 4)
    reports = [driver.step(fills), *[driver.step() for _ in range(3)]]
    assert reports[0].pool.free + reports[0].pool.evictable == 0
    assert [reason for _, reason in reports[-1].stalled] == [StallReason.NO_BLOCK]
    driver.finish(fills, stays)
    assert [fills.output, stays.output] == [driver.expected(fills), driver.expected(stays)]


def test_copy_to_the_host_that_fails_costs_the_cached_contents_only() -> None:
    driver = Driver(num_blocks=9, max_model_len=36, num_host_blocks=8)
    driver.finish(request([*PROMPT, 48], 1))
    driver.runner.copy_failures.extend([StepFailed("copy")] * 9)
    other = request(OTHER, 5)
    driver.finish(other)
    assert not driver.host_keys
    assert other.output == driver.expected(other)


def test_host_tier_keeps_the_most_recent_when_it_is_full() -> None:
    driver = evicted_to_host(num_host_blocks=4)
    driver.finish(request([token + 1 for token in OTHER[:-1]], 5))
    assert driver.engine.pool_report().host_free == 0
    assert len(driver.host_keys) == 4
    assert driver.host_keys < set(driver.keys(OTHER))


def test_preempted_sequence_is_swapped_out_and_resumes_from_the_host() -> None:
    driver = Driver(num_blocks=9, max_model_len=36, num_host_blocks=16)
    one = request(PROMPT, 16)
    for _ in range(8):
        driver.step(*([one] if one.handle is None else []))
    driver.run(driver.plan(release=[1]))
    driver.finish(request(OTHER, 5))
    report = driver.step(one)
    assert report.admitted[0].host_cached_tokens > 0
    assert report.admitted[0].cached_tokens + report.admitted[0].host_cached_tokens == 20
    driver.finish(one)
    assert one.output == driver.expected(one)


def test_copying_is_skipped_when_computing_is_cheaper_by_measurement() -> None:
    driver = evicted_to_host()
    driver.runner.copy_s_per_block = 1.0
    driver.finish(request([*PROMPT, 49], 1))
    driver.finish(request([*OTHER[1:], 1], 5))
    copied = driver.runner.blocks_in
    one = request([*PROMPT, 47], 1)
    report = driver.step(one)
    assert report.admitted[0].host_cached_tokens == 0
    driver.finish(one)
    assert driver.runner.blocks_in == copied
    cost = driver.engine.memory.cost
    assert cost.skipped_blocks > 0
    assert cost.in_us_per_block is not None
    assert cost.in_us_per_block > 1e4


def test_cost_of_swapping_is_reported() -> None:
    driver = evicted_to_host()
    report = driver.step(request([*PROMPT, 49], 3))
    driver.step()
    cost = driver.engine.memory.cost
    assert report.timing.copy_us == driver.runner.blocks_in
    assert (cost.copied_in_blocks, cost.copied_out_blocks) == (
        driver.runner.blocks_in,
        driver.runner.blocks_out,
    )
    assert cost.in_us_per_block is not None
    assert round(cost.in_us_per_block, 6) == 1.0
    assert cost.report().in_blocks == driver.runner.blocks_in


def test_pinned_prefix_stays_on_the_device_whatever_the_load() -> None:
    driver = Driver(num_blocks=13, max_model_len=36, pin_budget_blocks=4)
    driver.finish(request([*PROMPT, 48], 1))
    outcome = driver.engine.pin("system", driver.keys(PROMPT))
    assert (outcome.accepted, outcome.wanted_blocks, outcome.held_blocks) == (True, 4, 4)
    for shift in range(4):
        driver.finish(request([token + shift for token in OTHER[:24]], 9))
    report = driver.step(request([*PROMPT, 49], 1))
    assert report.admitted[0].cached_tokens == 16
    assert report.pool.pinned == 4


def test_prefix_pinned_before_it_is_computed_is_held_once_it_is() -> None:
    driver = Driver(num_blocks=13, max_model_len=36, pin_budget_blocks=4)
    assert driver.engine.pin("system", driver.keys(PROMPT)).held_blocks == 0
    driver.finish(request([*PROMPT, 48], 1))
    assert driver.engine.pool_report().pinned == 4


def test_pin_beyond_the_budget_is_refused_and_the_one_before_stays() -> None:
    driver = Driver(num_blocks=13, max_model_len=36, pin_budget_blocks=3)
    driver.finish(request([*PROMPT, 48], 1))
    assert driver.engine.pin("system", driver.keys(PROMPT[:8])).accepted
    outcome = driver.engine.pin("system", driver.keys(PROMPT))
    assert (outcome.accepted, outcome.wanted_blocks) == (False, 4)
    assert driver.engine.pool_report().pinned == 2


def test_pin_replaces_that_of_its_name_and_shares_blocks_with_others() -> None:
    driver = Driver(num_blocks=13, max_model_len=36, pin_budget_blocks=4)
    driver.finish(request([*PROMPT, 48], 1))
    driver.engine.pin("one", driver.keys(PROMPT))
    driver.engine.pin("two", driver.keys(PROMPT[:8]))
    driver.engine.pin("one", driver.keys(PROMPT[:4]))
    assert driver.engine.pool_report().pinned == 2
    assert driver.engine.unpin("two") == 1
    assert driver.engine.unpin("one") == 1
    assert driver.engine.unpin("one") == 0
    assert driver.engine.pool_report().evictable == 4


def test_pins_end_with_their_scheduler_and_their_blocks_stay_cached() -> None:
    driver = Driver(num_blocks=13, max_model_len=36, pin_budget_blocks=4)
    driver.finish(request([*PROMPT, 48], 1))
    driver.engine.pin("system", driver.keys(PROMPT))
    driver.reattach()
    pool = driver.engine.pool_report()
    assert (pool.pinned, pool.evictable) == (0, 4)
    assert driver.engine.pin("other", driver.keys(OTHER[:16])).accepted
    report = driver.step(request([*PROMPT, 49], 1))
    assert report.admitted[0].cached_tokens == 16
