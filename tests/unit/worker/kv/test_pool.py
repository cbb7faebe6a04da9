from __future__ import annotations

import pytest

from worker_svc.kv.errors import DoubleFree, ForeignBlock, IntegrityError, OutOfBlocks, UseAfterFree
from worker_svc.kv.pool import BlockPool


def key(index: int) -> bytes:
    return index.to_bytes(16, "little")


def cached(pool: BlockPool, count: int, first_key: int = 0) -> list[int]:
    """Fill blocks, publish them as one chain and let them go."""
    blocks, _ = pool.allocate(count)
    for index, block in enumerate(blocks):
        pool.publish(block, key(first_key + index))
    pool.release(blocks)
    return blocks


def test_allocate_more_than_there_is_raises_and_takes_nothing() -> None:
    pool = BlockPool(4)
    pool.allocate(1)
    with pytest.raises(OutOfBlocks) as error:
        pool.allocate(4)
    assert (error.value.wanted, error.value.available) == (4, 3)
    assert (pool.num_free, pool.num_active) == (3, 1)
    pool.check_integrity()


def test_blocks_start_at_the_first_id_and_are_given_once() -> None:
    pool = BlockPool(4, first_block=1)
    blocks, _ = pool.allocate(4)
    assert sorted(blocks) == [1, 2, 3, 4]


def test_release_twice_raises_double_free_and_changes_nothing() -> None:
    pool = BlockPool(4)
    blocks, _ = pool.allocate(2)
    pool.release(blocks[:1])
    with pytest.raises(DoubleFree):
        pool.release(blocks)
    assert pool.num_active == 1
    pool.check_integrity()


@pytest.mark.parametrize("foreign", [-1, 0, 5, 1000])
def test_foreign_block_raises_and_changes_nothing(foreign: int) -> None:
    pool = BlockPool(4, first_block=1)
    blocks, _ = pool.allocate(2)
    for use in (pool.release, pool.acquire):
        with pytest.raises(ForeignBlock):
            use([*blocks, foreign])
    with pytest.raises(ForeignBlock):
        pool.publish(foreign, key(0))
    assert [pool.ref_count(block) for block in blocks] == [1, 1]
    pool.check_integrity()


def test_acquire_of_a_free_block_raises_and_changes_nothing() -> None:
    pool = BlockPool(4)
    held, _ = pool.allocate(1)
    with pytest.raises(UseAfterFree):
        pool.acquire([*held, 3])
    assert pool.ref_count(held[0]) == 1
    with pytest.raises(UseAfterFree):
        pool.publish(3, key(0))
    pool.check_integrity()


def test_shared_block_stays_until_the_last_owner_lets_go() -> None:
    pool = BlockPool(2)
    blocks, _ = pool.allocate(1)
    pool.acquire(blocks)
    pool.release(blocks)
    assert pool.num_active == 1
    pool.release(blocks)
    assert pool.num_free == 2


def test_released_block_with_a_key_is_found_again() -> None:
    pool = BlockPool(4)
    blocks = cached(pool, 3)
    assert (pool.num_free, pool.num_evictable) == (1, 3)
    assert pool.match([key(0), key(1), key(9), key(2)]) == blocks[:2]
    pool.acquire(blocks[:2])
    assert (pool.num_evictable, pool.num_active) == (1, 2)


def test_duplicate_key_stays_private() -> None:
    pool = BlockPool(2)
    first, _ = pool.allocate(1)
    second, _ = pool.allocate(1)
    assert pool.publish(first[0], key(0))
    assert not pool.publish(second[0], key(0))
    assert not pool.publish(first[0], key(1))
    pool.release(second)
    assert pool.num_free == 1
    assert pool.match([key(0)]) == first


def test_eviction_takes_the_tail_of_a_chain_before_its_head() -> None:
    pool = BlockPool(4)
    blocks = cached(pool, 4)
    _, evicted = pool.allocate(3)
    assert evicted == [(blocks[3], key(3)), (blocks[2], key(2)), (blocks[1], key(1))]
    assert pool.match([key(0), key(1)]) == blocks[:1]


def test_eviction_takes_the_least_recently_used_chain_first() -> None:
    pool = BlockPool(4)
    old = cached(pool, 2)
    cached(pool, 2, first_key=10)
    pool.acquire(old)
    pool.release(old)
    _, evicted = pool.allocate(2)
    assert [evicted_key for _, evicted_key in evicted] == [key(11), key(10)]


def test_free_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool(4)
    cached(pool, 2)
    _, evicted = pool.allocate(2)
    assert evicted == []


def test_block_in_use_is_never_evicted() -> None:
    pool = BlockPool(3)
    blocks = cached(pool, 2)
    pool.acquire(blocks[:1])
    with pytest.raises(OutOfBlocks):
        pool.allocate(3)
    pool.allocate(2)
    assert pool.match([key(0)]) == blocks[:1]


def test_largest_free_run_follows_fragmentation() -> None:
    pool = BlockPool(8)
    blocks, _ = pool.allocate(8)
    assert pool.largest_free_run == 0
    pool.release([block for block in blocks if block % 2])
    assert (pool.num_free, pool.largest_free_run) == (4, 1)
    pool.release([blocks[0], blocks[2]])
    assert pool.largest_free_run == 4


def test_check_integrity_names_the_broken_invariant() -> None:
    pool = BlockPool(4)
    blocks, _ = pool.allocate(1)
    pool._ref_counts[blocks[0]] = 0
    with pytest.raises(IntegrityError) as error:
        pool.check_integrity()
    assert error.value.invariant == "free + evictable + active == total"
