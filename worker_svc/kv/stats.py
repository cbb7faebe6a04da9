"""Fragmentation, from the figures that a pool reports."""

from __future__ import annotations

from octavo.protocol.steps import PoolReport


def internal_fragmentation(report: PoolReport, block_size: int) -> float:
    """Return the share of token slots in active blocks that hold nothing."""
    slots = report.active * block_size
    return report.unused_slots / slots if slots else 0.0


def external_fragmentation(report: PoolReport) -> float:
    """Return 1 - longest free run / free blocks: what of the free memory one reservation cannot use."""
    return 1.0 - report.largest_free_run / report.free if report.free else 0.0
