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
from dataclasses import dataclass, field
from typing import Final, Protocol

BETTER: Final = 1.03
"""A setting must keep this much more than the best so far to replace it."""
GROWTH: Final = 1.25
"""Rates are raised by this factor until one is not kept."""
MOST_RAISES: Final = 32
"""Times that the rate of a setting is raised: a thousandfold and more."""
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


class Evaluator(Protocol):
    """Offers rates to settings."""

    def __call__(self, settings: Settings, rate_per_s: float) -> Trial:
        """Run one trial."""


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

    best: Trial | None
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


class SettingsSearch:
    """Searches a space.

    Args:
        space: what may be chosen.
        evaluate: runs a trial.
        first_rate: a guess; it need not be kept.
        on_trial: told of each trial.
        may_go_on: asked before each trial; when it says no, the best so far is the answer.
    """

    def __init__(
        self,
        space: Space,
        evaluate: Evaluator,
        first_rate: float,
        on_trial: Callable[[Trial], None] = lambda trial: None,
        may_go_on: Callable[[], bool] = lambda: True,
    ) -> None:
        self._space = space
        self._evaluate = evaluate
        self._first_rate = first_rate
        self._on_trial = on_trial
        self._may_go_on = may_go_on
        self._found = TuningResult(None)
        self._seen: set[Settings] = set()

    @property
    def found(self) -> TuningResult:
        """What has been found so far."""
        return self._found

    def run(self) -> TuningResult:
        """SettingsSearch from the middle outwards."""
        place = self._space.middle()
        self._begin(place)
        widths = [max(1, len(self._space.max_num_seqs) // 4), 1]
        for width in dict.fromkeys(widths):
            while (better := self._best_neighbour(place, width)) is not None:
                place = better
        return self._found

    def lowest_memory(self, utilizations: Sequence[float]) -> None:
        """See how little memory the best setting can do with; the least that keeps its rate is the best."""
        for utilization in sorted(utilizations, reverse=True):
            best = self._found.best
            if best is None or not self._may_go_on():
                return
            settings = Settings(best.settings.max_num_seqs, best.settings.max_num_batched_tokens, utilization)
            trial = self._try(settings, best.rate_per_s)
            if not trial.kept:
                return
            self._found.best = trial

    def _begin(self, place: tuple[int, int]) -> None:
        settings = self._space.at(place)
        if settings is not None:
            self._seen.add(settings)
            self._climb(settings, self._first_rate)

    def _best_neighbour(self, place: tuple[int, int], width: int) -> tuple[int, int] | None:
        """Go round a place; return where the best is now, None when it has stayed."""
        better = None
        for step in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, -1), (1, -1), (-1, 1)):
            there = place[0] + width * step[0], place[1] + width * step[1]
            settings = self._space.at(there)
            if settings is None or settings in self._seen:
                continue
            self._seen.add(settings)
            if self._challenge(settings):
                better = there
        return better

    def _challenge(self, settings: Settings) -> bool:
        """See whether a setting keeps more than the best, and how much more."""
        best = self._found.best
        rate = self._first_rate if best is None else BETTER * best.rate_per_s
        if not self._may_go_on():
            return False
        if best is None:
            self._climb(settings, rate)
            return self._found.best is not None
        trial = self._try(settings, rate)
        if trial.kept:
            self._found.best = trial
            self._raise(settings, rate)
        return trial.kept

    def _climb(self, settings: Settings, rate: float) -> None:
        """Find the highest rate that a setting keeps, from a guess in either direction."""
        lowest = rate * LOWEST_SHARE
        failed: float | None = None
        while rate >= lowest and self._may_go_on():
            trial = self._try(settings, rate)
            if trial.kept:
                if self._found.best is None or rate > self._found.best.rate_per_s:
                    self._found.best = trial
                self._raise(settings, rate, failed)
                return
            failed = rate
            rate /= 2

    def _raise(self, settings: Settings, kept: float, failed: float | None = None) -> None:
        """Raise a rate that was kept until one is not, then close in."""
        for _ in range(MOST_RAISES):
            if failed is not None or not self._may_go_on():
                break
            rate = kept * GROWTH
            if self._improves(settings, rate):
                kept = rate
            else:
                failed = rate
        for _ in range(HALVINGS):
            if failed is None or failed < BETTER * kept or not self._may_go_on():
                return
            rate = (kept * failed) ** 0.5
            if self._improves(settings, rate):
                kept = rate
            else:
                failed = rate

    def _improves(self, settings: Settings, rate: float) -> bool:
        trial = self._try(settings, rate)
        if trial.kept:
            self._found.best = trial
        return trial.kept

    def _try(self, settings: Settings, rate: float) -> Trial:
        trial = self._evaluate(settings, rate)
        self._found.trials.append(trial)
        self._on_trial(trial)
        return trial
