"""The latency target of the tuner, and when a trial has missed it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from octavo.bench.load.statistics import needed


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTarget:
    """Bounds that a share of the requests must keep. None: no bound."""

    percentile: float = 99.0
    ttft_s: float | None = None
    tpot_s: float | None = None

    @property
    def quantile(self) -> float:
        """The percentile as a share."""
        return self.percentile / 100

    @property
    def least_requests(self) -> int:
        """Requests without which the percentile means nothing."""
        return needed(self.quantile)

    def allowed_misses(self, requests: int) -> int:
        """Return how many of so many requests may miss the target."""
        return math.floor((1 - self.quantile) * requests + 1e-9)

    def missed(self, ttft_s: float | None, tpot_s: float | None) -> bool:
        """Return whether an answer is outside the bounds; without a first token it is."""
        if ttft_s is None:
            return True
        late = self.ttft_s is not None and ttft_s > self.ttft_s
        slow = self.tpot_s is not None and tpot_s is not None and tpot_s > self.tpot_s
        return late or slow

    def __str__(self) -> str:
        bounds = (("TTFT", self.ttft_s), ("TPOT", self.tpot_s))
        told = [f"P{self.percentile:g} {name} {bound * 1000:g} ms" for name, bound in bounds if bound]
        return ", ".join(told) or "none: throughput alone"
