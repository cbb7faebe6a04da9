"""The state of a pool as a message and back."""

from __future__ import annotations

from octavo.protocol.steps import PoolReport, TierCopies
from octavo.v1 import worker_pb2


def pool_to_proto(pool: PoolReport) -> worker_pb2.PoolReport:
    """Convert the state of a pool."""
    return worker_pb2.PoolReport(
        free=pool.free,
        evictable=pool.evictable,
        active=pool.active,
        pinned=pool.pinned,
        host_free=pool.host_free,
        largest_free_run=pool.largest_free_run,
        unused_slots=pool.unused_slots,
        step_active=pool.step_active,
        step_unused_slots=pool.step_unused_slots,
        hit_tokens=pool.hit_tokens,
        miss_tokens=pool.miss_tokens,
        host_hit_tokens=pool.host_hit_tokens,
        copies=_copies_to_proto(pool.copies) if pool.copies is not None else None,
    )


def pool_from_proto(message: worker_pb2.PoolReport) -> PoolReport:
    """Convert the state of a pool."""
    return PoolReport(
        free=message.free,
        evictable=message.evictable,
        active=message.active,
        pinned=message.pinned,
        host_free=message.host_free,
        largest_free_run=message.largest_free_run,
        unused_slots=message.unused_slots,
        step_active=message.step_active,
        step_unused_slots=message.step_unused_slots,
        hit_tokens=message.hit_tokens,
        miss_tokens=message.miss_tokens,
        host_hit_tokens=message.host_hit_tokens,
        copies=_copies_from_proto(message.copies) if message.HasField("copies") else None,
    )


def _copies_to_proto(copies: TierCopies) -> worker_pb2.TierCopies:
    return worker_pb2.TierCopies(
        out_blocks=copies.out_blocks,
        in_blocks=copies.in_blocks,
        skipped_blocks=copies.skipped_blocks,
        out_us_per_block=copies.out_us_per_block,
        in_us_per_block=copies.in_us_per_block,
    )


def _copies_from_proto(message: worker_pb2.TierCopies) -> TierCopies:
    return TierCopies(
        out_blocks=message.out_blocks,
        in_blocks=message.in_blocks,
        skipped_blocks=message.skipped_blocks,
        out_us_per_block=message.out_us_per_block,
        in_us_per_block=message.in_us_per_block,
    )
