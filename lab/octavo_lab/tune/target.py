"""The latency target of the tuner, and what a trial says of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

import numpy as np

from octavo_lab.load.records import Outcome, RequestMeasurement
from octavo_lab.load.statistics import needed
from octavo_lab.tune.search import Settings, Trial

KEEPS_UP: Final = 0.9
"""Share of the requests that came whose answers there must be, those aside that are being served."""


def keeps_up(arrived_s: Sequence[float], answered: Sequence[tuple[float, float]]) -> bool:
    """Return whether a service answers about as fast as it is asked.

    A trial is a finite burst: however high its rate, all of it is answered at some time, and without a
    bound on the TTFT nobody misses anything by waiting. So what counts are answers until the last request
    came. By Little's law as many requests as come in a mean time of service are under way then, and not
    wanted of it; at most half of all, since a shorter trial is over before the service is full.

    Args:
        arrived_s: when each request came.
        answered: (when it ended, seconds of it that the target grants; see `granted_s`) of each answer.
    """
    if not answered:
        return False
    last_s = max(arrived_s)
    span_s, granted_s = last_s - min(arrived_s), fmean(granted for _, granted in answered)
    under_way = min(0.5, granted_s / span_s) if span_s > 0 else 0.5
    in_time = sum(ended_s <= last_s for ended_s, _ in answered)
    return in_time >= KEEPS_UP * (1 - under_way) * len(arrived_s)


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

    def granted_s(self, e2e_s: float, ttft_s: float | None) -> float:
        """Return the time of an answer without the wait that is beyond the bound of the TTFT."""
        return e2e_s - max(0.0, (ttft_s or 0.0) - (self.ttft_s or 0.0))

    def __str__(self) -> str:
        bounds = (("TTFT", self.ttft_s), ("TPOT", self.tpot_s))
        told = [f"P{self.percentile:g} {name} {bound * 1000:g} ms" for name, bound in bounds if bound]
        return ", ".join(told) or "none: throughput alone"


def trial_of(
    settings: Settings,
    rate_per_s: float,
    target: LatencyTarget,
    requests: Sequence[RequestMeasurement],
    *,
    stopped: bool = False,
) -> Trial:
    """Return what came of a trial; `stopped` before all had ended, because the target was out of reach."""
    done = [one for one in requests if one.outcome is Outcome.OK]
    misses = len(requests) - len(done) + sum(target.missed(one.ttft_s, one.tpot_s) for one in done)
    granted = [(one.ended_s, target.granted_s(one.e2e_s, one.ttft_s)) for one in done]
    in_bounds = not stopped and misses <= target.allowed_misses(len(requests))
    ended_s = max((one.ended_s for one in requests), default=0.0)

    def percentile(values: list[float]) -> float | None:
        return None if stopped or not values else float(np.quantile(values, target.quantile))

    return Trial(
        settings,
        rate_per_s,
        kept=in_bounds and keeps_up([one.offered.planned_s for one in requests], granted),
        requests=len(requests),
        stopped_early=stopped,
        ttft_s=percentile([one.ttft_s for one in done if one.ttft_s is not None]),
        tpot_s=percentile([one.tpot_s for one in done if one.tpot_s is not None]),
        tokens_per_s=None if stopped else sum(one.output_tokens for one in done) / max(ended_s, 1e-9),
        memory_short=any(one.preemptions for one in done),
    )
