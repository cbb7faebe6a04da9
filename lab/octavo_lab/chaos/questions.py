"""What is asked, and how an answer differs from the undisturbed one."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

_SHARED: Final = (
    "The octavo is a format of book, made by folding each printed sheet three times, so that a sheet gives "
    "eight leaves or sixteen pages. Most books that people read at home have been octavos for centuries. "
)
_TOPICS: Final = (
    "The harbour at night",
    "A recipe for bread",
    "Why rivers bend",
    "The oldest clock",
    "How glass is made",
    "Letters from a lighthouse",
)


@dataclass(frozen=True, slots=True)
class Question:
    """One request; greedy when it has no temperature, else seeded."""

    number: int
    prompt: str
    n: int
    temperature: float
    max_tokens: int

    @property
    def sampling(self) -> dict[str, Any]:
        """Options as all clients name them."""
        return {
            "n": self.n,
            "temperature": self.temperature,
            "seed": 1000 + self.number,
            "max_tokens": self.max_tokens,
        }


@dataclass(slots=True)
class Reply:
    """What a client has got so far, by choice, and when (monotonic seconds)."""

    question: Question
    token_ids: list[list[int]] = field(default_factory=list)
    """Empty where a client sees text only."""
    texts: list[str] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    refused: int = 0
    """Times that it was refused for load, and sent again after the delay that was asked for."""
    broken: int = 0
    """Times that it was sent again because its gateway was gone in the middle of an HTTP stream."""
    started: float = 0.0
    ended: float = 0.0
    error: str = ""
    client: str = ""
    request_id: str = ""

    def clear(self) -> None:
        """Have nothing, as before the first token."""
        self.token_ids = [[] for _ in range(self.question.n)]
        self.texts = [""] * self.question.n
        self.arrivals = []

    def take(self, choice: int, token_ids: Sequence[int], text: str) -> None:
        """Take in what came of one choice."""
        self.token_ids[choice].extend(token_ids)
        self.texts[choice] += text
        self.arrivals.append(time.monotonic())


def questions(seed: int, count: int, max_tokens: int) -> list[Question]:
    """Return questions: greedy and seeded, of one choice and two, with a shared opening and without."""
    rng = random.Random(seed)
    return [
        Question(
            number,
            (_SHARED if number % 4 < 2 else f"{number}. ")
            + _TOPICS[number % len(_TOPICS)]
            + f", part {number}:",
            2 if number % 5 == 4 else 1,
            0.0 if number % 2 else 0.8,
            rng.randint(max_tokens // 3, max_tokens),
        )
        for number in range(count)
    ]


def difference(expected: Reply, got: Reply) -> str | None:
    """Return what is wrong with an answer, or None; tokens where both have them, else text."""
    pairs: list[tuple[Sequence[Any], Sequence[Any], str]] = []
    if any(got.token_ids):
        pairs += [(a, b, "token") for a, b in zip(expected.token_ids, got.token_ids, strict=True)]
    pairs += [(a, b, "character") for a, b in zip(expected.texts, got.texts, strict=True)]
    for choice, (want, have, unit) in enumerate(pairs):
        if list(want) == list(have):
            continue
        at = next(
            (i for i, (a, b) in enumerate(zip(want, have, strict=False)) if a != b), min(len(want), len(have))
        )
        return f"choice {choice % got.question.n}, {unit} {at} of {len(want)}: {_kind(want, have, at)}"
    return None


def _kind(want: Sequence[Any], have: Sequence[Any], at: int) -> str:
    """Tell doubled and missing parts from different ones."""
    rest = have[at : at + 8]
    for shift in range(1, 65):
        if rest and shift <= at and want[at - shift : at - shift + len(rest)] == rest:
            return f"{shift} doubled"
        if rest and want[at + shift : at + shift + len(rest)] == rest:
            return f"{shift} missing"
    if len(have) == at:
        return f"{len(want) - at} missing at the end"
    return (
        f"{have[at]!r} instead of {want[at]!r}" if at < len(want) else f"{len(have) - at} too many at the end"
    )
