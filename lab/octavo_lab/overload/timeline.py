"""What an overload looked like, second by second, and how long the service took to be itself again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from octavo_lab.load.records import Outcome, RequestMeasurement, RunRecord
from octavo_lab.load.statistics import needed, quantile
from octavo_lab.load.summary import Slo
from octavo_lab.overload.drive import Calibration, Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEVELS: Final = ("normal", "trim", "shed batch", "shed standard", "open")
WITHIN: Final = 1.2
"""A TTFT is slow that is more than this many times the baseline's quantile."""
QUANTILES: Final = (0.99, 0.9, 0.5)
"""Of the baseline's TTFT: the first that it has enough requests for is what latency is to be back at."""
_BUCKET_S: Final = 2.0
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
        outcomes: dict[str, int] = {}
        for one in requests:
            name = one.reason or one.outcome.value
            outcomes[name] = outcomes.get(name, 0) + 1
        return {
            "offered_per_s": len(requests) / seconds,
            "goodput_per_s": sum(map(self.slo.met_by, requests)) / seconds,
            "ttft_p50_s": quantile(_ttfts(requests), 0.5),
            "ttft_p99_s": quantile(_ttfts(requests), 0.99),
            "highest_level": max(
                (look.level for look in self.looks if start_s <= look.at_s < end_s), default=0
            ),
            "outcomes": dict(sorted(outcomes.items(), key=lambda item: -item[1])),
        }

    @property
    def level_zero_s(self) -> float:
        """Seconds from the end of the overload until the level is 0 for good."""
        above = [look.at_s for look in self.looks if look.level > 0 and look.at_s < self.run.until_s]
        return max(0.0, max(above, default=0.0) - self.overload_to_s)

    @property
    def latency_quantile(self) -> float | None:
        """The highest of QUANTILES that the baseline has enough requests for; None: there is none."""
        baseline = _ttfts(self.between(self.baseline_from_s, self.overload_from_s))
        return next((at for at in QUANTILES if len(baseline) >= needed(at)), None)

    @property
    def latency_back_s(self) -> float | None:
        """Seconds from the end of the overload until TTFTs are those of the baseline again.

        The least t from which on, and among the ten requests that come first then, no larger share is slow,
        or not answered, than `latency_quantile` leaves. None: there is none, or too few requests to say.
        """
        at = self.latency_quantile
        if at is None:
            return None
        baseline = quantile(_ttfts(self.between(self.baseline_from_s, self.overload_from_s)), at)
        assert baseline is not None
        end = self.run.until_s
        for step in range(math.ceil((end - self.overload_to_s) / _STEP_S)):
            after = self.between(self.overload_to_s + step * _STEP_S, end)
            if len(after) < _LEAST_REQUESTS:
                break
            parts = after, after[:_LEAST_REQUESTS]
            if all(_slow(part, WITHIN * baseline) <= (1 - at) * len(part) + 1e-9 for part in parts):
                return step * _STEP_S
        return None

    @property
    def recovery_s(self) -> float | None:
        """Seconds until both are back; None when it is not known of the latency."""
        latency = self.latency_back_s
        return None if latency is None else max(self.level_zero_s, latency)

    def as_record(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        end = self.run.until_s
        return {
            "calibration": asdict(self.calibration),
            "slo": str(self.slo),
            "recovery_s": self.recovery_s,
            "level_zero_s": self.level_zero_s,
            "latency_back_s": self.latency_back_s,
            "latency_quantile": self.latency_quantile,
            "baseline": self.phase(self.baseline_from_s, self.overload_from_s),
            "overload": self.phase(self.overload_from_s, self.overload_to_s),
            "recovery": self.phase(self.overload_to_s, end),
            "target": asdict(self.run.target),
            "traffic": asdict(self.run.traffic),
            "looks": [asdict(look) for look in self.looks],
        }

    def as_text(self) -> str:
        """Return a table of the phases, and how long the way back took."""
        record = self.as_record()
        measured = self.calibration
        ttft_ms, tpot_ms = measured.unloaded_ttft_s * 1000, measured.unloaded_tpot_s * 1000
        capacity = f"capacity {measured.capacity_per_s:.2f} requests/s"
        titles = ("phase", "offered/s", "good/s", "TTFT P50", "TTFT P99", "level")
        lines = [
            f"{capacity}, unloaded TTFT {ttft_ms:.0f} ms and TPOT {tpot_ms:.1f} ms",
            f"good: {self.slo}",
            "",
            "{:<10} {:>9} {:>7} {:>9} {:>9} {:>5}  ended".format(*titles),
        ]
        for name in ("baseline", "overload", "recovery"):
            one = record[name]
            ended = ", ".join(f"{count} {reason}" for reason, count in one["outcomes"].items())
            lines.append(
                f"{name:<10} {one['offered_per_s']:>9.2f} {one['goodput_per_s']:>7.2f} "
                f"{_milliseconds(one['ttft_p50_s']):>9} {_milliseconds(one['ttft_p99_s']):>9} "
                f"{one['highest_level']:>5}  {ended}"
            )
        back = f"level 0 again {self.level_zero_s:.1f} s after the overload"
        lines += ["", f"{back}, {self._latency_told()}"]
        return "\n".join(lines)

    def _latency_told(self) -> str:
        at, back_s = self.latency_quantile, self.latency_back_s
        if at is None:
            return f"TTFT of the baseline unknown: it wants {needed(QUANTILES[-1])} answered requests"
        what = f"TTFT within 20% of the baseline's P{100 * at:g}"
        return f"{what} not before the end" if back_s is None else f"{what} after {back_s:.1f} s"

    def plot(self, path: Path) -> None:
        """Draw the timeline into a file."""
        import matplotlib as mpl  # noqa: PLC0415 # slow to import, and only needed here

        mpl.use("Agg")
        from matplotlib.figure import Figure  # noqa: PLC0415

        figure = Figure(figsize=(10, 8), layout="constrained")
        rates, latency, levels = figure.subplots(3, 1, sharex=True)
        self._draw_rates(rates)
        self._draw_latency(latency)
        at = [look.at_s for look in self.looks]
        levels.step(at, [look.level for look in self.looks], where="post", color="#c03030")
        levels.set_yticks(range(len(LEVELS)), LEVELS)
        levels.set_ylim(-0.3, 4.3)
        levels.set_xlabel("seconds")
        queue = levels.twinx()
        queue.plot(at, [look.waiting for look in self.looks], color="#808080", linewidth=0.8)
        queue.set_ylabel("waiting")
        for panel in (rates, latency, levels):
            panel.axvspan(self.overload_from_s, self.overload_to_s, color="#f0e0d0", zorder=0)
            panel.grid(visible=True, alpha=0.3)
        capacity = self.calibration.capacity_per_s
        rates.set_title(f"Overload and recovery: capacity {capacity:.1f} requests/s, good is {self.slo}")
        figure.savefig(path, dpi=110)

    def _draw_rates(self, panel: Axes) -> None:
        starts = [index * _BUCKET_S for index in range(math.ceil(self.run.until_s / _BUCKET_S))]
        buckets = [self.between(start, start + _BUCKET_S) for start in starts]
        refused = [sum(one.outcome is Outcome.REFUSED for one in bucket) for bucket in buckets]
        for label, counts, colour in (
            ("offered", [len(bucket) for bucket in buckets], "#404040"),
            ("good", [sum(map(self.slo.met_by, bucket)) for bucket in buckets], "#208040"),
            ("refused", refused, "#c03030"),
        ):
            panel.step(starts, np.array(counts) / _BUCKET_S, where="post", label=label, color=colour)
        panel.set_ylabel("requests/s")
        panel.legend(loc="upper right")

    def _draw_latency(self, panel: Axes) -> None:
        answered = [one for one in self.run.requests if one.ttft_s is not None]
        at = [one.offered.planned_s for one in answered]
        panel.scatter(at, [one.ttft_s or 0.0 for one in answered], s=5, color="#3060a0")
        if self.slo.ttft_s is not None:
            panel.axhline(self.slo.ttft_s, color="#404040", linewidth=0.8, linestyle="--")
        panel.set_ylabel("TTFT, s")


def _ttfts(requests: Sequence[RequestMeasurement]) -> list[float]:
    return [one.ttft_s for one in requests if one.outcome is Outcome.OK and one.ttft_s is not None]


def _slow(requests: Sequence[RequestMeasurement], bound_s: float) -> int:
    """Return how many had no first token within a time, or no answer."""
    return len(requests) - sum(ttft_s <= bound_s for ttft_s in _ttfts(requests))


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f} ms"
