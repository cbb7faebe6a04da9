"""The control arm: one run of blocks per sequence, rows held until their batch is done."""

from __future__ import annotations

import pytest
from octavo.protocol.steps import FinishReason, RefuseReason

from tests.unit.worker.driver import Driver, Request, request
from worker_svc.kv.stats import external_fragmentation, internal_fragmentation

PROMPT = list(range(1, 11))


def test_sequence_reserves_all_it_may_need_in_one_run() -> None:
    driver, one = Driver(paged=False), request(PROMPT, 8)
    report = driver.run(driver.plan(driver.admit(one, reserve=18)))
    assert report.pool.active == 5
    assert internal_fragmentation(report.pool, 4) == pytest.approx(10 / 20)
    driver.finish(one)
    assert one.output == driver.expected(one)
    assert driver.engine.pool_report().free == 64


def test_without_a_reservation_the_limits_of_the_sequence_count() -> None:
    driver = Driver(paged=False, max_model_len=40)
    assert driver.step(request(PROMPT, 8)).pool.active == 5
    assert driver.step(request(PROMPT, 500)).pool.active == 5 + 10


def test_reservation_needs_a_run_and_not_just_blocks() -> None:
    driver = Driver(paged=False, num_blocks=16, max_model_len=16)
    requests = [request(PROMPT, 6) for _ in range(4)]
    driver.run(driver.plan(driver.admit(*requests, reserve=16)))
    driver.run(driver.plan(release=[1, 3]))
    pool = driver.engine.pool_report()
    assert (pool.free, pool.largest_free_run) == (8, 4)
    assert external_fragmentation(pool) == pytest.approx(0.5)
    report = driver.run(driver.plan(driver.admit(request(PROMPT, 6), reserve=20)))
    assert report.refused[0].reason is RefuseReason.NO_CONTIGUOUS_RUN
    report = driver.run(driver.plan(driver.admit(request(PROMPT, 6), reserve=16)))
    assert report.pool.largest_free_run == 4


def test_nothing_is_shared() -> None:
    driver = Driver(paged=False)
    driver.step(request(PROMPT, 6))
    report = driver.step(request(PROMPT, 6))
    assert report.admitted[0].cached_tokens == 0
    assert report.key_events.stored == ()
    assert not driver.engine.pin("system", driver.keys(PROMPT)).accepted


def test_sequence_ends_where_its_reservation_does() -> None:
    driver, one = Driver(paged=False), request(PROMPT, 50)
    driver.run(driver.plan(driver.admit(one, reserve=16)))
    driver.finish(one)
    assert len(one.tokens) == 16
    assert one.finished is not None
    assert one.finished.reason is FinishReason.LENGTH


@pytest.mark.parametrize("paged", [True, False])
def test_held_row_is_computed_until_it_is_released(paged: bool) -> None:
    driver = Driver(paged=paged)
    short, long = request(PROMPT, 2), request(PROMPT[3:], 9)
    driver.run(driver.plan(driver.admit(short, long, reserve=20, hold=True)))
    for _ in range(6):
        report = driver.step()
    assert short.finished is not None
    assert (report.live_count, list(report.token_handles)) == (2, [2])
    assert [handle for handle, _, _ in driver.runner.batches[-1]] == [1, 2]
    while long.finished is None:
        driver.step()
    report = driver.step(release=[1, 2])
    assert report.released == (1, 2)
    assert (report.live_count, report.pool.active) == (0, 0)
    assert [short.output, long.output] == [driver.expected(short), driver.expected(long)]


def test_runs_are_found_first_fit_and_joined_again() -> None:
    driver = Driver(paged=False, num_blocks=16, max_model_len=16)
    requests: list[Request] = [request(PROMPT, 6) for _ in range(4)]
    driver.run(driver.plan(driver.admit(*requests, reserve=16)))
    driver.run(driver.plan(release=[2, 4]))
    driver.run(driver.plan(driver.admit(request(PROMPT[:2], 2), reserve=4)))
    tables = {handle: live.sequence.block_table for handle, live in driver.engine._running.states.items()}
    assert tables[5] == [4]
    driver.run(driver.plan(release=[1, 3, 5]))
    assert driver.engine.pool_report().largest_free_run == 16
