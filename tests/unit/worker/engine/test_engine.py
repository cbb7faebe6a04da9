from __future__ import annotations

from typing import Any

import pytest
from octavo.protocol.steps import (
    FinishReason,
    Plan,
    Priority,
    RefuseReason,
    StallReason,
    StepStatus,
    TokenLogprobs,
)
from octavo.sampling import StructuredOutput

from tests.unit.worker.driver import ALL, Driver, Request, request
from tests.unit.worker.shadow_runner import EOS
from worker_svc.engine.engine import EngineConfig
from worker_svc.engine.faults import Fault, FaultKind, Faults
from worker_svc.errors import InvalidSettings
from worker_svc.runner.base import StepBatch, StepResult

PROMPT = list(range(1, 11))


def free_of(driver: Driver) -> int:
    pool = driver.engine.pool_report()
    return pool.free + pool.evictable


def test_prefill_that_completes_samples_the_first_token_in_the_same_step() -> None:
    driver, one = Driver(), request(PROMPT)
    report = driver.step(one)
    assert report.prefilled == ((1, 10),)
    assert (list(report.token_handles), list(report.first_positions)) == ([1], [10])
    assert one.output == driver.expected(one)[:1]


def test_prefill_in_chunks_gives_a_token_only_with_the_last() -> None:
    driver, one = Driver(), request(PROMPT)
    assert driver.step(one, prefill=[(1, 4)]).token_ids == []
    assert driver.step(prefill=[(1, 5)]).prefilled == ((1, 5),)
    assert driver.step(prefill=[]).prefilled == ()
    assert driver.step(prefill=[(1, 5)]).prefilled == ((1, 1),)
    assert len(one.output) == 1


def test_sequences_decode_in_every_step_unless_skipped() -> None:
    driver, one, two = Driver(), request(PROMPT), request(PROMPT[:3])
    driver.step(one, two)
    assert list(driver.step(skip=[1]).token_handles) == [2]
    assert list(driver.step().token_handles) == [1, 2]


def test_outputs_do_not_depend_on_who_shares_the_batch() -> None:
    driver = Driver(max_num_seqs=8)
    requests = [request(PROMPT[:length], 12, seed=length) for length in range(1, 9)]
    driver.finish(*requests)
    assert [one.output for one in requests] == [driver.expected(one) for one in requests]
    assert free_of(driver) == driver.config.num_blocks


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        ({}, FinishReason.LENGTH),
        ({"ignore_eos": False}, FinishReason.STOP),
        ({"ignore_eos": False, "min_tokens": 60}, FinishReason.LENGTH),
        ({"stop_token_ids": tuple(range(1, 50))}, FinishReason.STOP),
    ],
)
def test_sequence_ends_where_its_sampling_says(sampling: dict[str, Any], reason: FinishReason) -> None:
    driver, one = Driver(max_model_len=256), request(PROMPT, 60, seed=3, **sampling)
    driver.finish(one)
    assert one.output == driver.expected(one)
    assert one.finished is not None
    assert one.finished.reason is reason
    if reason is FinishReason.STOP:
        assert one.finished.stop_token_id == one.output[-1]


def test_stop_token_counts_only_after_min_tokens() -> None:
    driver = Driver()
    one = request(PROMPT, 20, stop_token_ids=tuple(range(50)), min_tokens=5)
    driver.finish(one)
    assert len(one.output) == 6


def test_context_ends_a_sequence() -> None:
    driver, one = Driver(max_model_len=14), request(PROMPT, 100)
    driver.finish(one)
    assert len(one.tokens) == 14
    assert one.finished is not None
    assert one.finished.reason is FinishReason.LENGTH


def test_resumed_sequence_goes_on_exactly_where_it_was() -> None:
    whole, driver = Driver(), Driver()
    one, two = request(PROMPT, 20), request(PROMPT, 20)
    whole.finish(one)
    two.output.extend(one.output[:7])
    driver.finish(two)
    assert two.output == one.output


def test_admission_without_room_is_refused_and_takes_nothing() -> None:
    driver = Driver(num_blocks=4, max_model_len=16)
    driver.step(request(PROMPT))
    report = driver.step(request(PROMPT[1:]))
    assert [(entry.handle, entry.reason) for entry in report.refused] == [(2, RefuseReason.NO_BLOCKS)]
    assert list(report.token_handles) == [1]
    assert report.pool.active == 3


def test_admission_needs_room_for_one_token_more_than_it_has() -> None:
    driver = Driver(num_blocks=3, max_model_len=12)
    report = driver.step(request(PROMPT[:8]))
    assert report.pool.active == 3


def test_admission_beyond_max_num_seqs_is_refused() -> None:
    driver = Driver(max_num_seqs=2)
    report = driver.step(*(request(PROMPT) for _ in range(3)))
    assert [entry.reason for entry in report.refused] == [RefuseReason.MAX_NUM_SEQS]


@pytest.mark.parametrize(
    ("one", "detail"),
    [
        (request(range(1, 41)), "40 tokens in a context of 32"),
        (request([]), "0 tokens in a context of 32"),
        (
            request(PROMPT, structured=StructuredOutput(json_object=True)),
            "structured output: this worker has no library of grammars",
        ),
    ],
)
def test_admission_that_cannot_be_served_is_refused_with_the_reason(one: Request, detail: str) -> None:
    report = Driver(max_model_len=32).step(one)
    assert [(entry.reason, entry.detail) for entry in report.refused] == [(RefuseReason.UNSUPPORTED, detail)]


def test_handle_used_again_is_refused_and_leaves_the_first_alone() -> None:
    driver = Driver()
    (admit,) = driver.admit(request(PROMPT))
    driver.engine.run_step(Plan(1, admit=(admit,), prefill=((1, ALL),)), lambda: 0.0)
    report = driver.engine.run_step(Plan(2, admit=(admit,)), lambda: 0.0)
    assert report.refused[0].detail == "handle 1 is not above 1, which was used"
    assert list(report.token_handles) == [1]


def test_scarce_blocks_go_to_the_higher_class_then_to_the_older_sequence() -> None:
    driver = Driver(num_blocks=7, max_model_len=16)
    batch = request(PROMPT[:3], priority=Priority.BATCH)
    first, second = request(PROMPT[2:5]), request(PROMPT[4:7])
    driver.step(batch, first, second)
    driver.step()
    urgent = request(PROMPT[:7], priority=Priority.INTERACTIVE)
    report = driver.step(urgent)
    assert [entry.handle for entry in report.admitted] == [4]
    assert report.stalled == ((1, StallReason.NO_BLOCK),)
    assert list(report.token_handles) == [2, 3, 4]


def test_stalled_sequence_goes_on_when_a_block_comes_free() -> None:
    driver = Driver(num_blocks=5, max_model_len=16)
    one, two = request(PROMPT[:3], 8), request(PROMPT[5:8], 8)
    driver.step(one, two)
    for _ in range(5):
        driver.step()
    assert driver.step().stalled == ((2, StallReason.NO_BLOCK),)
    assert driver.step().finished[0].handle == 1
    driver.finish(two)
    assert two.output == driver.expected(two)


def test_prompt_computed_before_is_shared_up_to_its_last_whole_block() -> None:
    driver = Driver()
    driver.step(request(PROMPT), request(PROMPT[:8]))
    report = driver.step(request(PROMPT, seed=1), request(PROMPT[:8], seed=1), request(PROMPT[:5], seed=1))
    assert [entry.cached_tokens for entry in report.admitted] == [8, 4, 4]
    assert (report.pool.hit_tokens, report.pool.miss_tokens) == (16, 10 + 8 + 2 + 4 + 1)
    assert driver.engine.memory.report(0).active == 3 + 3 + 1 + 2 + 1


def test_two_tenants_share_nothing_and_one_tenant_does() -> None:
    driver = Driver()
    mine, theirs = request(PROMPT), request(PROMPT)
    driver.step(mine)
    report = driver.run(driver.plan(driver.admit(theirs, salt=b"another")))
    assert report.admitted[0].cached_tokens == 0
    assert driver.step(request(PROMPT)).admitted[0].cached_tokens == 8


def test_generated_block_is_published_once_its_last_token_is_computed() -> None:
    driver, one = Driver(), request(PROMPT[:6], 8)
    driver.step(one)
    driver.step()
    assert len(one.tokens) == 8
    assert driver.step().key_events.stored == tuple(driver.keys(one.tokens)[1:])


def test_seal_that_comes_late_publishes_the_block() -> None:
    driver, one = Driver(), request(PROMPT[:6], 12)
    driver.step(one)
    for _ in range(4):
        assert driver.step(seal=()).key_events.stored == ()
    assert driver.step().key_events.stored == tuple(driver.keys(one.tokens)[1:2])


def test_seals_of_gone_sequences_are_dropped() -> None:
    driver = Driver()
    driver.finish(request(PROMPT, 1))
    report = driver.step(seal=[(1, 0, b"k" * 16), (77, 0, b"l" * 16)])
    assert (report.status, report.key_events.stored) == (StepStatus.OK, ())


def test_same_prompt_computed_twice_at_once_is_published_once() -> None:
    driver = Driver()
    report = driver.step(request(PROMPT[:8]), request(PROMPT[:8]))
    assert len(report.key_events.stored) == 2
    driver.run(driver.plan(release=[1, 2]))
    pool = driver.engine.pool_report()
    assert (pool.evictable, pool.free) == (2, 62)


def test_released_sequence_resumes_from_the_cache() -> None:
    driver, one = Driver(), request(PROMPT, 12)
    for _ in range(8):
        driver.step(*([one] if one.handle is None else []))
    report = driver.run(driver.plan(release=[1]))
    assert report.released == (1,)
    report = driver.step(one)
    assert report.admitted[0].cached_tokens == 16
    driver.finish(one)
    assert one.output == driver.expected(one)


def test_cancel_applies_at_the_next_step_boundary() -> None:
    driver = Driver()
    driver.step(request(PROMPT), request(PROMPT))
    driver.cancel(1)
    report = driver.step()
    assert report.released == (1,)
    assert list(report.token_handles) == [2]


def test_cancel_that_overtakes_the_admission_is_remembered() -> None:
    driver = Driver()
    plan = driver.plan()
    later = driver.plan(driver.admit(request(PROMPT), request(PROMPT)))
    driver.cancel(1)
    assert driver.run(plan).released == ()
    report = driver.run(later)
    assert report.released == (1,)
    assert list(report.token_handles) == [2]


def test_cancel_of_a_handle_that_is_gone_says_nothing() -> None:
    driver, one = Driver(), request(PROMPT, 1)
    driver.step(one)
    assert one.finished is not None
    driver.cancel(1)
    assert driver.step().released == ()


def test_lost_scheduler_leaves_the_cache_and_no_sequence() -> None:
    driver, one = Driver(), request(PROMPT, 12)
    driver.step(one)
    driver.reattach()
    assert driver.engine.num_live == 0
    # The next scheduler has run no step: it is not told of one.
    assert driver.engine.pool_report().step_active == 0
    assert free_of(driver) == driver.config.num_blocks
    assert driver.step(one).admitted[0].cached_tokens == 8
    driver.finish(one)
    assert one.output == driver.expected(one)


def test_pool_report_counts_slots_that_hold_nothing() -> None:
    driver = Driver()
    pool = driver.step(request(PROMPT)).pool
    assert (pool.active, pool.unused_slots) == (3, 2)
    assert driver.step().pool.unused_slots == 1


def test_pool_report_tells_what_was_in_use_while_the_step_ran() -> None:
    driver, short = Driver(), request(PROMPT, 1)
    pool = driver.step(short, request(PROMPT)).pool
    assert short.finished is not None
    # What the step has finished is free now; as long as it ran, it was not.
    assert (pool.active, pool.unused_slots) == (3, 2)
    assert (pool.step_active, pool.step_unused_slots) == (6, 4)
    pool = driver.step().pool
    assert (pool.step_active, pool.step_unused_slots) == (pool.active, pool.unused_slots)
    assert driver.engine.pool_report() == pool


def test_timing_counts_what_was_computed() -> None:
    driver = Driver()
    driver.step(request(PROMPT))
    timing = driver.step(request(PROMPT[3:])).timing
    assert (timing.num_decodes, timing.num_prefill_tokens, timing.context_tokens) == (1, 7, 11)
    assert timing.execute_us == 80


def test_logprobs_reach_the_report() -> None:
    driver = Driver()
    chosen = TokenLogprobs(5, -0.5, 1)

    def execute(batch: StepBatch) -> StepResult:
        return StepResult({1: 5, 2: 6}, {1: chosen})

    driver.runner.execute = execute  # type: ignore[method-assign]
    report = driver.step(request(PROMPT), request(PROMPT))
    assert report.logprobs == {1: (chosen,)}


def test_config_whose_pool_cannot_hold_one_sequence_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(InvalidSettings, match=r"\(8 blocks - 2 for pins\) x 4 tokens = 24, .* 32"):
        EngineConfig(
            block_size=4,
            num_blocks=8,
            max_num_seqs=1,
            max_model_len=32,
            pin_budget_blocks=2,
        )


def test_eos_of_the_model_stops_unless_ignored() -> None:
    driver = Driver(max_model_len=256)
    stops = request(PROMPT, 200, seed=5, ignore_eos=False)
    goes_on = request(PROMPT, 200, seed=5)
    driver.finish(stops, goes_on)
    assert stops.output[-1] == EOS
    assert goes_on.output[: len(stops.output)] == stops.output


def test_injected_allocation_failures_stall_and_refuse_but_lose_nothing() -> None:
    faults = Faults([Fault(FaultKind.ALLOCATION, probability=0.3)], seed=1)
    driver = Driver(faults=faults)
    requests = [request(PROMPT[:length], 15, seed=length) for length in range(3, 9)]
    driver.finish(*requests)
    assert driver.met >= {"NO_BLOCK", "NO_BLOCKS"}
    assert [one.output for one in requests] == [driver.expected(one) for one in requests]


def test_eviction_between_match_and_use_costs_the_hit_only() -> None:
    faults = Faults()
    driver = Driver(faults=faults)
    driver.finish(request(PROMPT, 1))
    faults.set([Fault(FaultKind.EVICTION_RACE, count=1)])
    one = request(PROMPT, 4)
    report = driver.step(one)
    assert report.admitted[0].cached_tokens == 0
    driver.finish(one)
    assert one.output == driver.expected(one)
