"""Tunes the static arms and finds what each arm can serve: docs/ladder.md, "Tuning and capacities"."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Final

from octavo_lab.command import BenchError
from octavo_lab.ladder.cells import ArmStacks, LoadDriver
from octavo_lab.ladder.config import ARMS, CONTROL, Arm, LadderConfig, StaticSettings
from octavo_lab.load.records import Outcome, RunRecord

MARGIN: Final = 0.1
"""What a capacity is below the throughput: at its full rate an open loop queues without bound anywhere."""
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


@dataclass(slots=True)
class CapacitySearch:
    """Runs the search. What it finds is the caller's to keep."""

    _config: LadderConfig
    _stacks: ArmStacks
    _driver: LoadDriver
    _on_step: Callable[[str], None]
    _probes: list[Probe] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        """Probes that it takes, about; for the progress."""
        config = self._config
        static = sum(ARMS[name].static for name in config.arms)
        return static * len(config.batch_sizes) + len(config.timeouts_s) + len(config.arms) - static

    def run(self) -> SearchResult:
        """Measure; return what was found."""
        config, capacities, sizes = self._config, dict[str, float](), dict[str, int]()
        timeout_s = StaticSettings().timeout_s
        for arm in (ARMS[name] for name in config.arms):
            self._driver.warm(self._stacks.use(arm, StaticSettings(batch_size=config.batch_sizes[0])))
            if not arm.static:
                capacities[arm.name] = (1 - MARGIN) * self._burst(arm)
                continue
            rates = self._batch_sizes(arm)
            capacities[arm.name] = (1 - MARGIN) * max(rates.values())
            ties = sorted(size for size, rate in rates.items() if rate >= (1 - TIE) * max(rates.values()))
            sizes[arm.name] = ties[0]
            if arm.name == CONTROL:
                tried = sorted(ties, key=rates.__getitem__)[-TUNED_SIZES:]
                sizes[arm.name], timeout_s = self._timeout(arm, tried, capacities[arm.name])
        static = {name: StaticSettings(batch_size=size, timeout_s=timeout_s) for name, size in sizes.items()}
        return SearchResult(static, capacities, tuple(self._probes))

    def _batch_sizes(self, arm: Arm) -> dict[int, float]:
        """Return the throughput of a saturated static arm by batch size.

        All sizes get the same requests, of each length enough for whole batches: none is to win by its own.
        """
        config, found = self._config, {}
        largest = max(config.batch_sizes)
        count = max(BATCHES * largest, MIN_PROBE_REQUESTS)
        count += largest * (len(config.bucket_bounds) + 1) // 2 if arm.buckets else 0
        for batch_size in config.batch_sizes:
            self._on_step(f"{arm.title}: batches of {batch_size}")
            settings = StaticSettings(batch_size=batch_size, timeout_s=min(config.timeouts_s))
            run = self._driver.saturate(self._stacks.use(arm, settings), count, count, config.seed)
            probe = self._note(arm, run, kind="saturated", concurrency=count, batch_size=batch_size)
            found[batch_size] = probe.requests_per_s
        return found

    def _timeout(self, arm: Arm, sizes: Sequence[int], capacity: float) -> tuple[int, float]:
        """Return the pair of batch size and timeout with the lowest latency at a moderate load."""
        config, rate = self._config, TUNING_LOAD * capacity
        least, most = TUNING_REQUESTS
        count = min(most, max(least, round(rate * TUNING_SHARE * config.budget_s)))
        latencies = {}
        for batch_size, timeout_s in itertools.product(sizes, config.timeouts_s):
            self._on_step(f"{arm.title}: batches of {batch_size}, timeout {timeout_s:g} s")
            stack = self._stacks.use(arm, StaticSettings(batch_size=batch_size, timeout_s=timeout_s))
            run = self._driver.offer(stack, config.process(rate), count, config.seed + 1)
            probe = self._note(arm, run, kind="timeout", batch_size=batch_size, timeout_s=timeout_s)
            latencies[batch_size, timeout_s] = probe.mean_e2e_s
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
        whole = arm.static or what["kind"] != "saturated"
        ends = sorted(answered, key=lambda one: one.ended_s)
        first, last = (0, len(ends)) if whole else (len(ends) // 4, len(ends) - int(0.4 * len(ends)))
        took_s = ends[last - 1].ended_s - (ends[first - 1].ended_s if first else 0.0)
        probe = Probe(
            arm=arm.name,
            requests=len(run.requests),
            requests_per_s=(last - first) / took_s,
            tokens_per_s=sum(one.output_tokens for one in ends[first:last]) / took_s,
            mean_e2e_s=fmean(one.e2e_s for one in answered),
            **what,
        )
        self._probes.append(probe)
        return probe
