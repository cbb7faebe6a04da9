"""Tunes the static arms and finds what each arm can serve: docs/ladder.md, "Tuning and capacities".

The capacity of an arm is its throughput when there is always somebody waiting, less `MARGIN`: an open loop
at the full rate of a server has a queue without bound, however good the server is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Final

from octavo_lab.command import BenchError
from octavo_lab.ladder.arms import ARMS, CONTROL, Arm, StaticSettings
from octavo_lab.ladder.cells import LoadDriver
from octavo_lab.ladder.config import LadderConfig
from octavo_lab.ladder.stacks import ArmStacks
from octavo_lab.load.records import Outcome, RequestMeasurement, RunRecord

MARGIN: Final = 0.1
TIE: Final = 0.03
"""Batch sizes that are within this share of the best are as good as it; the smallest is taken."""
TUNING_LOAD: Final = 0.7
"""Share of the control's capacity at which its timeouts are compared."""
BATCHES: Final = 3
"""Whole batches that a static arm serves in a probe, at least."""
MIN_PROBE_REQUESTS: Final = 24
TUNING_REQUESTS: Final = (12, 60)
"""Requests with which a timeout is tried, at least and at most."""
TUNING_SHARE: Final = 0.012
"""Share of the budget that trying one timeout takes, within these bounds."""
TUNED_SIZES: Final = 2
BURST: Final = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One measurement of the search."""

    arm: str
    kind: str
    """`saturated`, or `timeout` for an open loop that compares timeouts."""
    requests: int
    concurrency: int | None = None
    batch_size: int | None = None
    timeout_s: float | None = None
    requests_per_s: float
    tokens_per_s: float
    mean_e2e_s: float


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What the search has found."""

    static: dict[str, StaticSettings]
    """Settings of the static arms."""
    capacities: dict[str, float]
    """Requests per second, by arm."""
    probes: tuple[Probe, ...]

    @property
    def longest_batch_s(self) -> float:
        """How long a full batch takes, of the static arm in which that is longest."""
        return max((one.batch_size / self.capacities[name] for name, one in self.static.items()), default=0.0)


class CapacitySearch:
    """Runs the search. What it finds is the caller's to keep."""

    def __init__(
        self, config: LadderConfig, stacks: ArmStacks, driver: LoadDriver, on_step: Callable[[str], None]
    ) -> None:
        self._config = config
        self._stacks = stacks
        self._driver = driver
        self._on_step = on_step
        self._probes: list[Probe] = []

    @property
    def num_steps(self) -> int:
        """Probes that it takes, about; for the progress."""
        config = self._config
        static = sum(ARMS[name].static for name in config.arms)
        return static * len(config.batch_sizes) + len(config.timeouts_s) + len(config.arms) - static

    def run(self) -> SearchResult:
        """Measure; return what was found."""
        config = self._config
        arms = [ARMS[name] for name in config.arms]
        capacities: dict[str, float] = {}
        static: dict[str, StaticSettings] = {}
        for arm in arms:
            self._driver.warm(self._stacks.use(arm, StaticSettings(batch_size=config.batch_sizes[0])))
            if arm.static:
                sizes = self._batch_sizes(arm)
                capacities[arm.name] = (1 - MARGIN) * max(sizes.values())
                static[arm.name] = StaticSettings(batch_size=min(_ties(sizes)))
                if arm.name == CONTROL:
                    static[arm.name] = self._timeout(arm, sizes, capacities[arm.name])
            else:
                capacities[arm.name] = (1 - MARGIN) * self._burst(arm)
        if CONTROL in static:
            timeout_s = static[CONTROL].timeout_s
            static = {name: replace(one, timeout_s=timeout_s) for name, one in static.items()}
        return SearchResult(static, capacities, tuple(self._probes))

    def _batch_sizes(self, arm: Arm) -> dict[int, float]:
        """Return the throughput of a saturated static arm by batch size."""
        config, found = self._config, {}
        count = _probe_requests(config, arm)
        for batch_size in config.batch_sizes:
            self._on_step(f"{arm.title}: batches of {batch_size}")
            settings = StaticSettings(batch_size=batch_size, timeout_s=min(config.timeouts_s))
            run = self._driver.saturate(self._stacks.use(arm, settings), count, count, config.seed)
            probe = self._note(arm, run, kind="saturated", concurrency=count, batch_size=batch_size)
            found[batch_size] = probe.requests_per_s
        return found

    def _timeout(self, arm: Arm, sizes: dict[int, float], capacity: float) -> StaticSettings:
        """Return the pair of batch size and timeout with the lowest latency at a moderate load."""
        config = self._config
        latencies = {}
        rate = TUNING_LOAD * capacity
        least, most = TUNING_REQUESTS
        count = min(most, max(least, round(rate * TUNING_SHARE * config.budget_s)))
        for batch_size in sorted(_ties(sizes), key=sizes.__getitem__)[-TUNED_SIZES:]:
            for timeout_s in config.timeouts_s:
                self._on_step(f"{arm.title}: batches of {batch_size}, timeout {timeout_s:g} s")
                settings = StaticSettings(batch_size=batch_size, timeout_s=timeout_s)
                stack = self._stacks.use(arm, settings)
                run = self._driver.offer(stack, config.process(rate), count, config.seed + 1)
                probe = self._note(arm, run, kind="timeout", batch_size=batch_size, timeout_s=timeout_s)
                latencies[settings] = probe.mean_e2e_s
        return min(latencies, key=latencies.__getitem__)

    def _burst(self, arm: Arm) -> float:
        """Return the throughput of a continuous arm that has more than enough to do."""
        self._on_step(f"{arm.title}: {BURST} requests at once")
        run = self._driver.saturate(self._stacks.use(arm, StaticSettings()), BURST, BURST, self._config.seed)
        return self._note(arm, run, kind="saturated", concurrency=BURST).requests_per_s

    def _note(self, arm: Arm, run: RunRecord, **what: Any) -> Probe:
        answered = [one for one in run.requests if one.outcome is Outcome.OK]
        if len(answered) < 0.9 * len(run.requests):
            reasons = sorted({one.reason or one.outcome.value for one in run.requests} - {"ok"})
            raise BenchError(
                f"{arm.title}: {len(run.requests) - len(answered)} of {len(run.requests)} requests of the "
                f"search were not answered ({', '.join(reasons)})"
            )
        # A static arm serves whole batches: they count as a whole. Others have a beginning and a tail.
        begin = 0.0 if arm.static or what["kind"] != "saturated" else 0.25
        rate, tokens = _throughput(answered, begin, 0.0 if begin == 0.0 else 0.4)
        probe = Probe(
            arm=arm.name,
            requests=len(run.requests),
            requests_per_s=rate,
            tokens_per_s=tokens,
            mean_e2e_s=fmean(one.e2e_s for one in answered),
            **what,
        )
        self._probes.append(probe)
        return probe


def _probe_requests(config: LadderConfig, arm: Arm) -> int:
    """Return how many requests each batch size of an arm gets: none is to win by the lengths of its own."""
    largest = max(config.batch_sizes)
    count = max(BATCHES * largest, MIN_PROBE_REQUESTS)
    # Enough of each length for whole batches.
    return count + largest * (len(config.bucket_bounds) + 1) // 2 if arm.buckets else count


def _throughput(answered: Sequence[RequestMeasurement], begin: float, tail: float) -> tuple[float, float]:
    """Return answers and their output tokens per second, without a share of them at either end."""
    ends = sorted(answered, key=lambda one: one.ended_s)
    first, last = int(begin * len(ends)), len(ends) - int(tail * len(ends))
    since = ends[first - 1].ended_s if first else 0.0
    took = ends[last - 1].ended_s - since
    return (last - first) / took, sum(one.output_tokens for one in ends[first:last]) / took


def _ties(sizes: dict[int, float]) -> list[int]:
    """Return the batch sizes that are as good as the best."""
    best = max(sizes.values())
    return [size for size, rate in sizes.items() if rate >= (1 - TIE) * best]
