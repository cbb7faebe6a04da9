from __future__ import annotations

from worker_svc.kv.host import CopyCost


def measured(copy_us: float, prefill_us_per_token: float) -> CopyCost:
    cost = CopyCost(block_size=16)
    cost.copied_in(10, 10 * copy_us)
    cost.executed(0, 100, 100 * prefill_us_per_token)
    return cost


def test_copying_is_tried_before_anything_is_measured() -> None:
    assert CopyCost(16).worth_copying(4)


def test_copying_is_chosen_while_it_is_cheaper() -> None:
    assert measured(copy_us=100, prefill_us_per_token=10).worth_copying(4)
    assert not measured(copy_us=200, prefill_us_per_token=10).worth_copying(4)


def test_copies_out_count_too() -> None:
    cost = measured(copy_us=100, prefill_us_per_token=10)
    cost.copied_out(1, 100)
    assert not cost.worth_copying(1)


def test_now_and_then_a_copy_probes_whether_it_is_still_dear() -> None:
    cost = measured(copy_us=200, prefill_us_per_token=10)
    copied = 0
    for _ in range(640):
        copied += cost.worth_copying(1)
        cost.decided(1)
    assert copied == 10


def test_asking_what_is_worth_a_copy_decides_nothing() -> None:
    cost = measured(copy_us=200, prefill_us_per_token=10)
    assert not any(cost.worth_copying(1) for _ in range(640))
    assert cost.skipped_blocks == 0


def test_decodes_in_a_step_are_not_charged_to_its_prefill() -> None:
    cost = CopyCost(16)
    cost.executed(8, 0, 500)
    cost.executed(8, 100, 1500)
    assert cost.prefill_us_per_token == 10


def test_averages_follow_what_is_measured() -> None:
    cost = measured(copy_us=200, prefill_us_per_token=10)
    for _ in range(100):
        cost.copied_in(1, 20)
    assert cost.worth_copying(1)
