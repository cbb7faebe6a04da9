"""What an overload looked like, second by second, and how long the service took to be itself again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from octavo_lab.load.records import Outcome, RequestMeasurement, RunRecord
from octavo_lab.load.statistics import needed, quantile
from octavo_lab.load.summary import Slo
from octavo_lab.overload.drive import Calibration, Look

WITHIN: Final = 1.2
"""A TTFT is slow that is more than this many times the baseline's quantile."""
QUANTILES: Final = (0.99, 0.9, 0.5)
"""Of the baseline's TTFT: the first that it has enough requests for is what latency is to be back at."""
_STEP_S: Final = 0.5
_LEAST_REQUESTS: Final = 10
"""Without which nothing is said of the latency from some time on."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """A run of three phases: baseline, overload, recovery. Times in seconds since the run began."""

    run: RunRecord
    looks: Sequence[Look]
    calibration: Calibration
    overload_from_s: float
    overload_to_s: float
    baseline_from_s: float

    @property
    def slo(self) -> Slo:
        """What a good answer keeps."""
        return self.calibration.slo

    def between(self, start_s: float, end_s: float) -> list[RequestMeasurement]:
        """Return the requests planned in a stretch of time."""
        return [one for one in self.run.requests if start_s <= one.offered.planned_s < end_s]

    def phase(self, start_s: float, end_s: float) -> dict[str, Any]:
        """Return the figures of a stretch of time."""
        requests, seconds = self.between(start_s, end_s), end_s - start_s
        levels = (look.level for look in self.looks if start_s <= look.at_s < end_s)
        outcomes = Counter(one.reason or one.outcome.value for one in requests)
        return {
            "offered_per_s": len(requests) / seconds,
            "goodput_per_s": sum(map(self.slo.met_by, requests)) / seconds,
            "ttft_p50_s": quantile(_ttfts(requests), 0.5),
            "ttft_p99_s": quantile(_ttfts(requests), 0.99),
            "highest_level": max(levels, default=0),
            "outcomes": dict(outcomes.most_common()),
        }

    @property
    def level_zero_s(self) -> float:
        """Seconds from the end of the overload until the level is 0 for good."""
        above = [look.at_s for look in self.looks if look.level > 0 and look.at_s < self.run.until_s]
        return max(0.0, max(above, default=0.0) - self.overload_to_s)

    @property
    def _baseline(self) -> list[float]:
        return _ttfts(self.between(self.baseline_from_s, self.overload_from_s))

    @property
    def latency_quantile(self) -> float | None:
        """The highest of QUANTILES that the baseline has enough requests for; None: there is none."""
        return next((at for at in QUANTILES if len(self._baseline) >= needed(at)), None)

    @property
    def latency_back_s(self) -> float | None:
        """Seconds from the end of the overload until TTFTs are those of the baseline again.

        The least t from which on, and among the ten requests that come first then, no larger share is slow,
        or not answered, than `latency_quantile` leaves. None: there is none, or too few requests to say.
        """
        at = self.latency_quantile
        if at is None:
            return None
        bound_s = WITHIN * float(np.quantile(self._baseline, at))
        for since_s in np.arange(self.overload_to_s, self.run.until_s, _STEP_S).tolist():
            after = self.between(since_s, self.run.until_s)
            if len(after) < _LEAST_REQUESTS:
                break
            parts = after, after[:_LEAST_REQUESTS]
            quick = [sum(ttft_s <= bound_s for ttft_s in _ttfts(part)) for part in parts]
            if all(at * len(part) <= count + 1e-9 for part, count in zip(parts, quick, strict=True)):
                return float(since_s - self.overload_to_s)
        return None

    @property
    def recovery_s(self) -> float | None:
        """Seconds until both are back; None when it is not known of the latency."""
        latency = self.latency_back_s
        return None if latency is None else max(self.level_zero_s, latency)

    def as_record(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        return {
            "calibration": asdict(self.calibration),
            "slo": str(self.slo),
            "recovery_s": self.recovery_s,
            "level_zero_s": self.level_zero_s,
            "latency_back_s": self.latency_back_s,
            "latency_quantile": self.latency_quantile,
            "baseline": self.phase(self.baseline_from_s, self.overload_from_s),
            "overload": self.phase(self.overload_from_s, self.overload_to_s),
            "recovery": self.phase(self.overload_to_s, self.run.until_s),
            "target": asdict(self.run.target),
            "traffic": asdict(self.run.traffic),
            "looks": [asdict(look) for look in self.looks],
        }


def _ttfts(requests: Sequence[RequestMeasurement]) -> list[float]:
    return [one.ttft_s for one in requests if one.outcome is Outcome.OK and one.ttft_s is not None]
