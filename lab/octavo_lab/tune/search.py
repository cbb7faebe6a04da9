"""Finds the settings with which most requests per second are served within a latency target.

A trial offers a rate to one setting. It has *kept* the target when no more requests missed it than the
percentile allows and answers came about as fast as requests; it may stop as soon as the former is out of
reach. The search keeps the best rate found so far, and asks of every other setting first whether it keeps a
little more than that: most do not, and are done with after a part of one trial.

From the middle of the space it goes to whichever neighbour (one step in one or in both dimensions) is better,
until none is; steps are wide at first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

BETTER: Final = 1.03
"""A setting must keep this much more than the best so far to replace it."""
GROWTH: Final = 1.25
"""Rates are raised by this factor until one is not kept."""
MOST_RATES: Final = 32
"""Rates above a kept one that are tried: raised each time, a thousandfold and more."""
HALVINGS: Final = 2
"""Times that the interval between a rate that was kept and one that was not is halved."""
LOWEST_SHARE: Final = 1 / 64
"""Rates are lowered from the first guess until one is kept, down to this share of it."""


@dataclass(frozen=True, slots=True, order=True)
class Settings:
    """What is tuned; names are those of the flags, here and of `vllm serve`."""

    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float | None = None
    """None: the worker's default."""

    @property
    def named(self) -> dict[str, Any]:
        """What is set, by the names in a file for `--config-file`."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def flags(self) -> list[str]:
        """The same as flags."""
        return [f"--{name.replace('_', '-')}={value}" for name, value in self.named.items()]

    def __str__(self) -> str:
        memory = "" if self.gpu_memory_utilization is None else f", memory {self.gpu_memory_utilization:g}"
        return f"{self.max_num_seqs} sequences, {self.max_num_batched_tokens} tokens{memory}"


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of offering a rate to a setting. Percentiles are None when it was stopped early."""

    settings: Settings
    rate_per_s: float
    kept: bool
    requests: int
    """That ended, or missed the target, before the trial was over."""
    stopped_early: bool
    ttft_s: float | None = None
    """The percentile of the target."""
    tpot_s: float | None = None
    tokens_per_s: float | None = None
    memory_short: bool = False
    """Requests were preempted, or waited for memory."""


Evaluator = Callable[[Settings, float], Trial]
"""Runs one trial: offers a rate (requests per second) to settings."""


@dataclass(slots=True)
class Space:
    """What may be chosen, each in order."""

    max_num_seqs: Sequence[int]
    max_num_batched_tokens: Sequence[int]

    def at(self, place: tuple[int, int]) -> Settings | None:
        """Return the settings at a place; None where there are none: a step has a token for each sequence."""
        seqs, tokens = place
        if not (0 <= seqs < len(self.max_num_seqs) and 0 <= tokens < len(self.max_num_batched_tokens)):
            return None
        settings = Settings(self.max_num_seqs[seqs], self.max_num_batched_tokens[tokens])
        return settings if settings.max_num_batched_tokens >= settings.max_num_seqs else None

    def middle(self) -> tuple[int, int]:
        """Return the place to begin at."""
        tokens = len(self.max_num_batched_tokens) // 2
        seqs = len(self.max_num_seqs) // 2
        while seqs and self.at((seqs, tokens)) is None:
            seqs -= 1
        return seqs, tokens


@dataclass(slots=True)
class TuningResult:
    """The outcome of a search."""

    best: Trial | None = None
    """The highest rate that was kept; None when none was."""
    trials: list[Trial] = field(default_factory=list)

    def frontier(self) -> list[Trial]:
        """Return the kept trials that no other beats in rate, TTFT and TPOT at once; highest rate first."""
        kept = [trial for trial in self.trials if trial.kept]
        front = [one for one in kept if not any(_beats(other, one) for other in kept)]
        return sorted(front, key=lambda trial: -trial.rate_per_s)


def _beats(one: Trial, other: Trial) -> bool:
    mine = (-one.rate_per_s, one.ttft_s or 0.0, one.tpot_s or 0.0)
    theirs = (-other.rate_per_s, other.ttft_s or 0.0, other.tpot_s or 0.0)
    return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))


@dataclass(slots=True)
class SettingsSearch:
    """Searches a space."""

    space: Space
    evaluate: Evaluator
    first_rate: float
    """A guess; it need not be kept."""
    on_trial: Callable[[Trial], None] = lambda trial: None
    may_go_on: Callable[[], bool] = lambda: True
    """Asked before each trial; when it says no, the best so far is the answer."""
    found: TuningResult = field(default_factory=TuningResult)
    """So far."""
    _seen: set[Settings] = field(default_factory=set)

    def run(self) -> TuningResult:
        """Search from the middle outwards."""
        place = self.space.middle()
        self._better_at(place)
        for width in dict.fromkeys((max(1, len(self.space.max_num_seqs) // 4), 1)):
            while (better := self._best_neighbour(place, width)) is not None:
                place = better
        return self.found

    def lowest_memory(self, utilizations: Sequence[float]) -> None:
        """See how little memory the best setting can do with; the least that keeps its rate is the best."""
        for utilization in sorted(utilizations, reverse=True):
            best = self.found.best
            if best is None or not self._keeps(
                replace(best.settings, gpu_memory_utilization=utilization), best.rate_per_s
            ):
                return

    def _best_neighbour(self, place: tuple[int, int], width: int) -> tuple[int, int] | None:
        """Go round a place; return where the best is now, None when it has stayed."""
        steps = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, -1), (1, -1), (-1, 1))
        around = [(place[0] + width * seqs, place[1] + width * tokens) for seqs, tokens in steps]
        better = [there for there in around if self._better_at(there)]
        return better[-1] if better else None

    def _better_at(self, place: tuple[int, int]) -> bool:
        settings = self.space.at(place)
        if settings is None or settings in self._seen:
            return False
        self._seen.add(settings)
        return self._challenge(settings)

    def _challenge(self, settings: Settings) -> bool:
        """See whether a setting keeps more than the best, and how much more; without a best, anything."""
        best = self.found.best
        rate = self.first_rate if best is None else BETTER * best.rate_per_s
        lowest = rate * LOWEST_SHARE if best is None else rate
        failed: float | None = None
        while rate >= lowest:
            if self._keeps(settings, rate):
                self._raise(settings, rate, failed)
                return True
            failed, rate = rate, rate / 2
        return False

    def _raise(self, settings: Settings, kept: float, failed: float | None) -> None:
        """Raise a rate that was kept until one is not, then close in."""
        halvings = 0
        for _ in range(MOST_RATES):
            if failed is None:
                rate = kept * GROWTH
            elif halvings < HALVINGS and failed >= BETTER * kept:
                rate = (kept * failed) ** 0.5
                halvings += 1
            else:
                return
            if self._keeps(settings, rate):
                kept = rate
            else:
                failed = rate

    def _keeps(self, settings: Settings, rate: float) -> bool:
        """Try a rate, unless time is up; one that is kept is the best if none before was higher."""
        if not self.may_go_on():
            return False
        trial, best = self.evaluate(settings, rate), self.found.best
        self.found.trials.append(trial)
        self.on_trial(trial)
        if trial.kept and (best is None or rate >= best.rate_per_s):
            self.found.best = trial
        return trial.kept
