"""What became of cached keys between two reports."""

from __future__ import annotations

import enum
from collections.abc import Callable

from octavo.protocol.steps import KeyEvents


class Tier(enum.Enum):
    """Where the contents of a key are. A key that is on the device counts as there only."""

    NOWHERE = 0
    DEVICE = 1
    HOST = 2


class KeyLedger:
    """Nets the moves of each key, so that whoever applies the events holds exactly the keys of each tier."""

    def __init__(self, tier_of: Callable[[bytes], Tier]) -> None:
        self._tier_of = tier_of
        self._before: dict[bytes, Tier] = {}

    def moving(self, key: bytes, before: Tier) -> None:
        """Note that a key leaves `before`, where it is or has just been."""
        self._before.setdefault(key, before)

    def take(self) -> KeyEvents:
        """Return the net events since the last call."""
        if not self._before:
            return KeyEvents()
        stored: list[bytes] = []
        demoted: list[bytes] = []
        promoted: list[bytes] = []
        evicted: list[bytes] = []
        for key, before in self._before.items():
            now = self._tier_of(key)
            if now is before:
                continue
            if now is Tier.NOWHERE:
                evicted.append(key)
            elif now is Tier.HOST:
                demoted.append(key)
            elif before is Tier.HOST:
                promoted.append(key)
            else:
                stored.append(key)
        self._before.clear()
        return KeyEvents(tuple(stored), tuple(demoted), tuple(promoted), tuple(evicted))
