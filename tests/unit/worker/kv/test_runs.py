from __future__ import annotations

import random

import pytest

from worker_svc.kv.contiguous import ContiguousMemory
from worker_svc.kv.errors import DoubleFree, IntegrityError, OutOfBlocks
from worker_svc.kv.memory import Match
from worker_svc.kv.pool import FreeRuns


def test_runs_are_joined_with_both_neighbours() -> None:
    runs = FreeRuns(0, 9)
    assert [runs.take_run(3) for _ in range(3)] == [0, 3, 6]
    runs.give_run(0, 3)
    runs.give_run(6, 9)
    assert (runs.longest, runs.num_free) == (3, 6)
    runs.give_run(3, 6)
    assert runs.longest == 9


def test_first_fit_takes_the_lowest_run_that_is_long_enough() -> None:
    runs = FreeRuns(0, 12)
    runs.take_run(12)
    for start, end in ((8, 12), (0, 2), (4, 7)):
        runs.give_run(start, end)
    assert runs.take_run(3) == 4
    assert runs.take_run(3) == 8
    assert runs.take_run(3) is None
    assert runs.num_free == 3


def test_random_use_keeps_runs_maximal_and_the_longest_known() -> None:
    rng = random.Random(5)
    runs = FreeRuns(3, 64)
    held: list[int] = []
    for _ in range(3000):
        if held and (rng.random() < 0.5 or not runs.num_free):
            rng.shuffle(held)
            count = rng.randint(1, len(held))
            runs.give(held[:count])
            del held[:count]
        else:
            held.extend(runs.take(rng.randint(1, runs.num_free)))
        assert len(set(held)) == len(held) == 64 - runs.num_free
        runs.check_integrity()


def test_contiguous_reservation_without_a_run_takes_nothing() -> None:
    memory = ContiguousMemory(8, 4)
    tables = [memory.admit(Match(), 3, 16).block_table for _ in range(2)]
    with pytest.raises(OutOfBlocks):
        memory.admit(Match(), 3, 4)
    memory.release(tables[0])
    assert tables[0] == []
    assert memory.report(0).largest_free_run == 4
    memory.check_integrity(dict.fromkeys(tables[1], 1))


def test_contiguous_release_of_what_is_not_a_reserved_run_raises() -> None:
    memory = ContiguousMemory(8, 4)
    table = memory.admit(Match(), 3, 16).block_table
    copy = list(table)
    memory.release(table)
    for blocks in (copy, [], [5, 6]):
        with pytest.raises(DoubleFree):
            memory.release(blocks)


def test_contiguous_audit_names_blocks_that_nobody_holds() -> None:
    memory = ContiguousMemory(8, 4)
    memory.admit(Match(), 3, 16)
    with pytest.raises(IntegrityError, match="each reserved block is held once"):
        memory.check_integrity({})
