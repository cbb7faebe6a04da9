"""Two schedulers with the same workers: which of them workers prefer, and where the other one is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

_STANDBY_FOR_S: Final = 2.5
"""A worker says each second who stands by; after this long without a word there is nobody."""


class Preference(Protocol):
    """What decides between schedulers: a setting here, who holds a Lease in Kubernetes."""

    def rank(self) -> int:
        """Return the rank of this scheduler now; 0 is preferred. When it changes, links attach anew."""


@dataclass(frozen=True, slots=True)
class FixedPreference:
    """A rank that was set."""

    value: int

    def rank(self) -> int:
        """Return it."""
        return self.value


@dataclass(frozen=True, slots=True)
class Peer:
    """Another scheduler."""

    scheduler_id: str
    endpoint: str
    """Where clients reach it; empty when that is not known."""


class Pair:
    """What this scheduler tells workers of itself, and what they tell of the one that stands by for it."""

    def __init__(self, preference: Preference, clock: Callable[[], float] = time.monotonic) -> None:
        self.preference = preference
        self.endpoint = ""
        """Where clients reach this scheduler; empty when that is not known."""
        self._clock = clock
        self._standby: tuple[float, Peer] | None = None

    def heard(self, peer: Peer) -> None:
        """A worker says that a scheduler would take it at once."""
        self._standby = self._clock(), peer

    def standby(self, within_s: float = _STANDBY_FOR_S) -> Peer | None:
        """Return the scheduler that would take the workers now, if one was heard of that lately."""
        if self._standby is None or self._clock() > self._standby[0] + within_s:
            return None
        return self._standby[1]
