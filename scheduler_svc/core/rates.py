"""How often something happens, lately."""

from __future__ import annotations

import math

WINDOW_S = 10.0


class Rate:
    """Events per second, weighted towards the last ten seconds (an exponentially decaying count)."""

    def __init__(self) -> None:
        self._count = 0.0
        self._at = 0.0
        self._since: float | None = None

    def add(self, now: float, amount: float = 1.0) -> None:
        """Count something that happened now."""
        if self._since is None:
            self._since = now
        self._count = self._count * math.exp((self._at - now) / WINDOW_S) + amount
        self._at = now

    def per_s(self, now: float) -> float | None:
        """Return the rate, or None before anything has happened.

        In the first seconds the window is as long as the record, so that a young rate is not too low.
        """
        if self._since is None:
            return None
        covered = WINDOW_S * -math.expm1(-max(now - self._since, 0.5) / WINDOW_S)
        return self._count * math.exp((self._at - now) / WINDOW_S) / covered
