"""KV memory on its own: integrity, cost of its operations, utilization. No model is involved."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

from octavo_lab.fragmentation import PoolTraffic, simulate
from octavo_lab.scorecard import Measurement, at_least, at_most, entry
from octavo_lab.scorecard.kv_workload import MemoryWorkload
from worker_svc.kv.errors import KvError
from worker_svc.kv.paged import PagedMemory
from worker_svc.kv.pool import BlockPool

NUM_OPERATIONS: Final = 1_000_000
AUDIT_EVERY: Final = 100
OPERATIONS_PER_POOL: Final = 20_000
CHAIN_BLOCKS: Final = 512
BLOCK_SIZE: Final = 16
ROUNDS: Final = 300
_T = TypeVar("_T")


@entry("kv.audit_failures", "count", at_most(0))
def audit_failures() -> Measurement:
    """a million seeded random operations on pool, prefix index, tiers and pins, audited every hundred:
    audits or operations that found the books or a block's contents wrong

    A memory that failed is thrown away, as is each after its share of operations.
    """
    failures: list[str] = []
    met = Counter[str]()
    for first in range(0, NUM_OPERATIONS, OPERATIONS_PER_POOL):
        rng = random.Random(first)
        workload = MemoryWorkload(4, rng.randint(12, 96), rng.randint(0, 48), 4, rng.randint(0, 1))
        try:
            for operation in range(OPERATIONS_PER_POOL):
                workload.random_operation(rng)
                if operation % AUDIT_EVERY == 0:
                    workload.check()
            workload.drain()
        except KvError as error:
            failures.append(f"seed {first}: {error}")
        met += workload.outcomes
    details = {"operations": NUM_OPERATIONS, "failures": failures[:5], "what happened": met}
    return Measurement(len(failures), details)


@entry("kv.us_per_block", "µs", at_most(1.0))
def us_per_block() -> Measurement:
    """processor time of the dearest pool operation per block, median: match, acquire, release, allocate,
    publish, allocation by eviction, and a scattered free

    On chains of 512 blocks. Processor time, so that it is the operation that is measured and not who else
    uses the machine.
    """
    keys = [os.urandom(16) for _ in range(CHAIN_BLOCKS)]
    pool, small = BlockPool(4 * CHAIN_BLOCKS), BlockPool(CHAIN_BLOCKS)
    times: dict[str, list[float]] = {}

    def timed(what: str, operation: Callable[..., _T], *arguments: object) -> _T:
        started = time.thread_time()
        result = operation(*arguments)
        times.setdefault(what, []).append((time.thread_time() - started) * 1e6 / CHAIN_BLOCKS)
        return result

    def publish(pool: BlockPool, held: list[int]) -> None:
        for block, key in zip(held, keys, strict=True):
            pool.publish(block, key)

    def free_in_halves(held: list[int]) -> None:
        # The first half makes a hole per block, the second joins two holes with each.
        pool.release(held[::2])
        pool.release(held[1::2])

    blocks, _ = pool.allocate(CHAIN_BLOCKS)
    publish(pool, blocks)
    pool.release(blocks)
    for _ in range(ROUNDS):
        timed("match", pool.match, keys)
        timed("acquire cached blocks", pool.acquire, blocks)
        timed("share blocks in use", pool.acquire, blocks)
        timed("release shared blocks", pool.release, blocks)
        timed("release to the cache", pool.release, blocks)
        held, _evicted = timed("allocate", pool.allocate, CHAIN_BLOCKS)
        timed("free", pool.release, held)
        held, _evicted = pool.allocate(CHAIN_BLOCKS)
        timed("free scattered", free_in_halves, held)
        held, _evicted = timed("allocate by eviction", small.allocate, CHAIN_BLOCKS)
        timed("publish", publish, small, held)
        small.release(held)
    medians = {what: statistics.median(values) for what, values in times.items()}
    return Measurement(max(medians.values()), {what: round(value, 3) for what, value in medians.items()})


@entry("kv.match_512_us", "µs", at_most(200))
def match_512_us() -> float:
    """processor time to admit a sequence whose 512 blocks are all cached, median

    Match and admission through the memory that the engine uses; processor time, as above.
    """
    memory = PagedMemory(BlockPool(4 * CHAIN_BLOCKS), BLOCK_SIZE, 0, 0)
    keys = [os.urandom(16) for _ in range(CHAIN_BLOCKS)]
    num_tokens = CHAIN_BLOCKS * BLOCK_SIZE + 1
    table = memory.admit(memory.match(keys, num_tokens), num_tokens, num_tokens).block_table
    for block, key in zip(table, keys, strict=False):
        memory.publish(block, key)
    memory.release(table)
    times: list[float] = []
    for _ in range(ROUNDS):
        # As they come off the wire: objects that nobody has hashed yet.
        wire_keys = [bytes(bytearray(key)) for key in keys]
        started = time.thread_time()
        placement = memory.admit(memory.match(wire_keys, num_tokens), num_tokens, num_tokens)
        times.append((time.thread_time() - started) * 1e6)
        assert placement.cached_tokens == CHAIN_BLOCKS * BLOCK_SIZE
        memory.release(placement.block_table)
    return statistics.median(times)


def _utilization(*, paged: bool) -> Measurement:
    usage = simulate(PoolTraffic(), block_size=BLOCK_SIZE, paged=paged)
    details = {
        "mean sequences": round(usage.mean_sequences, 1),
        "external fragmentation": round(usage.external_fragmentation, 3),
        "pool in use": round(usage.occupancy, 3),
    }
    return Measurement(usage.utilization, details)


# The traffic of `octavo bench fragmentation`.
_PAGED: Final = "written over allocated token slots, lengths of 50 to 8000 tokens, blocks of 16, paged"
_CONTIGUOUS: Final = "the same with a contiguous reservation of prompt + max_tokens per sequence"
entry("kv.utilization_paged16", "share", at_least(0.97), measures=_PAGED)(partial(_utilization, paged=True))
entry("kv.utilization_contiguous", "share", measures=_CONTIGUOUS)(partial(_utilization, paged=False))
