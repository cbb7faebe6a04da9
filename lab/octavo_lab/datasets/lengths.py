"""How many tokens requests bring and ask for: public traces, drawn from a distribution, or fixed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from octavo_lab.command import BenchError
from octavo_lab.traces import TraceRequest, read_trace

FIT_SHARE: Final = 0.99
"""Share of the requests of a trace that scaling makes fit."""
MARGIN_TOKENS: Final = 8
"""Room that is left in the context for tokens that the model adds to a prompt."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Requests without prompts, and what was done to them in words."""

    arrivals: tuple[TraceRequest, ...]
    description: str
    scale: int = 1
    """What the lengths of the trace were divided by."""


def of_trace(name: str, context: int, *, scale: int | None = None, folder: Path | None = None) -> Lengths:
    """Return the requests of a public trace, scaled to a model's context.

    All lengths are divided by one whole number, `scale`, and rounded to at least 1. By default it is the
    least with which FIT_SHARE of the requests fit: prompt, output and a margin. Those that do not fit
    even so are left out. Ratios between lengths, and which prompts share a prefix, stay what they are.

    Raises:
        BenchError: there is no such trace, or nothing of it fits.
    """
    rows = read_trace(name, folder)
    room = context - MARGIN_TOKENS
    totals = sorted(row.prompt_tokens + row.output_tokens for row in rows)
    if scale is None:
        scale = max(1, math.ceil(totals[math.ceil(FIT_SHARE * len(totals)) - 1] / max(1, room)))
    scaled = [
        replace(
            row,
            prompt_tokens=max(1, round(row.prompt_tokens / scale)),
            output_tokens=max(1, round(row.output_tokens / scale)),
        )
        for row in rows
    ]
    kept = tuple(row for row in scaled if row.prompt_tokens + row.output_tokens <= room)
    if not kept:
        raise BenchError(f"nothing of {name} fits a context of {context} tokens at a scale of 1/{scale}")
    how = f"{name}, lengths divided by {scale}, {len(rows) - len(kept)} of {len(rows)} left out"
    return Lengths(kept, how, scale)


def window(arrivals: Sequence[TraceRequest], count: int, seed: int) -> list[TraceRequest]:
    """Return `count` requests in a row from a place drawn by the seed; after the last comes the first."""
    start = random.Random(seed).randrange(len(arrivals))
    return [arrivals[(start + offset) % len(arrivals)] for offset in range(count)]


@dataclass(frozen=True, slots=True)
class Drawn:
    """Lengths drawn from lognormal distributions, or fixed where `cv` is 0."""

    prompt_tokens: float
    """Mean."""
    output_tokens: float
    """Mean."""
    cv: float = 0.0
    """Coefficient of variation of both."""

    def __post_init__(self) -> None:
        if min(self.prompt_tokens, self.output_tokens) < 1 or not 0 <= self.cv <= 20:
            raise BenchError("prompt and output have at least one token each, their variation is 0 to 20")

    def __str__(self) -> str:
        means = f"{self.prompt_tokens:g} tokens in, {self.output_tokens:g} out"
        return f"fixed, {means}" if self.cv == 0 else f"lognormal, {means} on average, variation {self.cv:g}"

    def draw(self, count: int, context: int, seed: int) -> list[TraceRequest]:
        """Return requests that fit a context; what does not is drawn again, which lowers the means a little.

        Raises:
            BenchError: they hardly ever fit.
        """
        rng = random.Random(seed)
        drawn: list[TraceRequest] = []
        for _ in range(100 * count + 100):
            if len(drawn) == count:
                return drawn
            prompt, output = self._length(rng, self.prompt_tokens), self._length(rng, self.output_tokens)
            if prompt + output <= context - MARGIN_TOKENS:
                drawn.append(TraceRequest(0.0, prompt, output))
        raise BenchError(f"{self}: does not fit a context of {context} tokens")

    def _length(self, rng: random.Random, mean: float) -> int:
        if self.cv == 0:
            return round(mean)
        variance = math.log1p(self.cv**2)
        return max(1, round(rng.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))))
