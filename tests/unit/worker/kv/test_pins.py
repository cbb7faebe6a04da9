from __future__ import annotations

from worker_svc.kv.pins import Pins
from worker_svc.kv.pool import BlockPool


def key(index: int) -> bytes:
    return index.to_bytes(16, "little")


def test_chain_that_is_no_longer_pinned_is_evicted_tail_first() -> None:
    pool = BlockPool(8)
    pins = Pins(pool, budget_blocks=8)
    keys = [key(index) for index in range(8)]
    blocks, _ = pool.allocate(8)
    for one, block in zip(keys, blocks, strict=True):
        pool.publish(block, one)
    pins.set("system", keys)
    pool.release(blocks)

    assert pins.set("system", keys[:2]) == keys[2:]
    assert [evicted for _, evicted in pool.evict(4)] == keys[:-5:-1]
    assert pool.match(keys) == blocks[:4]
    assert pins.held_of(keys) == 2
    pins.check_integrity()
    pool.check_integrity()
