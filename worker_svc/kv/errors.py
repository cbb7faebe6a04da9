"""Errors of KV memory management, each with a stable reason."""

from __future__ import annotations


class KvError(Exception):
    """Root of the errors of KV memory."""

    reason = "KV"


class OutOfBlocks(KvError):
    """Fewer blocks can be had than were asked for; nothing was taken."""

    reason = "OUT_OF_BLOCKS"

    def __init__(self, wanted: int, available: int) -> None:
        super().__init__(f"{wanted} blocks wanted, {available} free or evictable")
        self.wanted = wanted
        self.available = available


class ForeignBlock(KvError):
    """A block id that the pool does not manage."""

    reason = "FOREIGN_BLOCK"


class DoubleFree(KvError):
    """A block was freed more often than it was taken."""

    reason = "DOUBLE_FREE"


class UseAfterFree(KvError):
    """A block that nobody holds was used."""

    reason = "USE_AFTER_FREE"


class IntegrityError(KvError):
    """The books do not balance; `invariant` names what is broken."""

    reason = "INTEGRITY"

    def __init__(self, invariant: str, detail: str) -> None:
        super().__init__(f"{invariant}: {detail}")
        self.invariant = invariant


def require(invariant: str, holds: bool, detail: object = "") -> None:
    """Raise IntegrityError unless `holds`."""
    if not holds:
        raise IntegrityError(invariant, str(detail))
