"""When requests come: seeded processes, the times of a trace, or a closed loop.

A process is a frozen record that can be told in one line and yields the same times for the same seed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from octavo_lab.command import BenchError
from octavo_lab.sim import arrivals as processes


class Arrivals(Protocol):
    """An open loop: times that do not depend on what the target does."""

    @property
    def rate_per_s(self) -> float:
        """Requests per second, on average over a long time."""

    def times(self, seed: int) -> Iterator[float]:
        """Yield the times in order, in seconds from the start; without end unless the process has one."""


@dataclass(frozen=True, slots=True)
class Gamma:
    """Independent gaps, gamma distributed: `cv` is their coefficient of variation (1: Poisson, 0: even)."""

    rate_per_s: float
    cv: float

    def __post_init__(self) -> None:
        _positive(rate=self.rate_per_s, variation=self.cv)

    def __str__(self) -> str:
        return f"gamma, {self.rate_per_s:g} per second, coefficient of variation {self.cv:g}"

    def times(self, seed: int) -> Iterator[float]:
        """Yield the times; see `Arrivals`."""
        return processes.gamma(self.rate_per_s, self.cv, random.Random(seed))


@dataclass(frozen=True, slots=True)
class Poisson(Gamma):
    """Independent arrivals: exponential gaps."""

    cv: float = field(default=1.0, init=False, repr=False)

    def __str__(self) -> str:
        return f"Poisson, {self.rate_per_s:g} per second"


@dataclass(frozen=True, slots=True)
class Even:
    """One request each 1 / rate seconds."""

    rate_per_s: float

    def __post_init__(self) -> None:
        _positive(rate=self.rate_per_s)

    def __str__(self) -> str:
        return f"even, {self.rate_per_s:g} per second"

    def times(self, seed: int) -> Iterator[float]:
        """Yield the times; see `Arrivals`."""
        del seed
        return (number / self.rate_per_s for number in itertools.count(1))


@dataclass(frozen=True, slots=True)
class Bursty:
    """A Markov-modulated Poisson process of two states.

    In a burst requests come `ratio` times as fast as between bursts. Bursts last `burst_s` seconds on
    average and the calm between them `calm_s`, both exponentially distributed. `rate_per_s` is the
    average over both. `ratio` infinite means that nothing comes between bursts (on and off).
    """

    rate_per_s: float
    ratio: float = 10.0
    burst_s: float = 2.0
    calm_s: float = 8.0

    def __post_init__(self) -> None:
        _positive(rate=self.rate_per_s, burst=self.burst_s, calm=self.calm_s)
        if not self.ratio >= 1:
            raise BenchError(f"bursts are not slower than what is between, got a ratio of {self.ratio}")

    def __str__(self) -> str:
        return (
            f"bursty, {self.rate_per_s:g} per second on average, {self.ratio:g} times as fast in bursts of "
            f"{self.burst_s:g} s with {self.calm_s:g} s between (means, exponential)"
        )

    @property
    def rates_per_s(self) -> tuple[float, float]:
        """Rates in a burst, and between bursts."""
        share = self.burst_s / (self.burst_s + self.calm_s)
        burst = self.rate_per_s / (share + (1 - share) / self.ratio)
        return burst, burst / self.ratio

    def times(self, seed: int) -> Iterator[float]:
        """Yield the times; see `Arrivals`. The first state is drawn as often as it is on the whole."""
        rng = random.Random(seed)

        def states() -> Iterator[tuple[float, float]]:
            in_burst = rng.random() < self.burst_s / (self.burst_s + self.calm_s)
            while True:
                length_s = rng.expovariate(1 / (self.burst_s if in_burst else self.calm_s))
                yield length_s, self.rates_per_s[not in_burst]
                in_burst = not in_burst

        return _poisson_by_parts(states(), rng)


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of time with a constant rate, which may be 0."""

    duration_s: float
    rate_per_s: float


@dataclass(frozen=True, slots=True)
class Phases:
    """Poisson arrivals whose rate changes at set times, such as overload and recovery. They have an end."""

    phases: tuple[Phase, ...]

    def __post_init__(self) -> None:
        for phase in self.phases:
            _positive(phase=phase.duration_s)
            if not phase.rate_per_s >= 0:
                raise BenchError(f"a rate must not be negative, got {phase.rate_per_s}")

    def __str__(self) -> str:
        return "Poisson, " + ", then ".join(
            f"{phase.rate_per_s:g} per second for {phase.duration_s:g} s" for phase in self.phases
        )

    @property
    def duration_s(self) -> float:
        """Length of all phases."""
        return sum(phase.duration_s for phase in self.phases)

    @property
    def rate_per_s(self) -> float:
        """Average over all phases."""
        return sum(phase.rate_per_s * phase.duration_s for phase in self.phases) / self.duration_s

    def times(self, seed: int) -> Iterator[float]:
        """Yield the times; see `Arrivals`."""
        parts = ((phase.duration_s, phase.rate_per_s) for phase in self.phases)
        return _poisson_by_parts(parts, random.Random(seed))


@dataclass(frozen=True, slots=True)
class Replay:
    """The times of a trace, moved so that the first is 0. They have an end."""

    at_s: tuple[float, ...]
    what: str = "times of a trace"

    def __post_init__(self) -> None:
        if len(self.at_s) < 2 or not self.at_s[-1] > self.at_s[0]:
            raise BenchError("a trace to replay has at least two requests at different times")

    def __str__(self) -> str:
        return f"{self.what}, {self.rate_per_s:g} per second on average"

    @property
    def rate_per_s(self) -> float:
        """Average from the first to the last."""
        return (len(self.at_s) - 1) / (self.at_s[-1] - self.at_s[0])

    def at_rate(self, rate_per_s: float) -> Replay:
        """Return the same times compressed or stretched to an average rate."""
        _positive(rate=rate_per_s)
        factor = self.rate_per_s / rate_per_s
        return Replay(tuple(at * factor for at in self.at_s), f"{self.what}, {1 / factor:g} times as fast")

    def times(self, seed: int) -> Iterator[float]:
        """Yield the times; the seed changes nothing."""
        del seed
        return (at - self.at_s[0] for at in self.at_s)


@dataclass(frozen=True, slots=True)
class Closed:
    """A closed loop: so many requests are under way at any time; each that ends makes room for the next.

    It measures throughput. It does not measure latency under load: a target that is slow is asked less.
    """

    concurrency: int

    def __post_init__(self) -> None:
        _positive(concurrency=self.concurrency)

    def __str__(self) -> str:
        return f"closed loop, {self.concurrency} under way at a time"


Process = Arrivals | Closed


def _poisson_by_parts(parts: Iterable[tuple[float, float]], rng: random.Random) -> Iterator[float]:
    """Yield the times of Poisson processes that follow each other, each given by its length and rate."""
    ends = 0.0
    for length_s, rate_per_s in parts:
        # What is left of an exponential gap is exponential again: each part may begin anew.
        at, ends = ends, ends + length_s
        while rate_per_s > 0 and (at := at + rng.expovariate(rate_per_s)) < ends:
            yield at


def _positive(**values: float) -> None:
    for what, value in values.items():
        if not value > 0:
            raise BenchError(f"the {what} must be positive, got {value:g}")
