"""How the prompts of one worker share the tokens of a step.

Higher classes go first, and within a class the prompt that needs the fewest tokens still: a short one
passes a long one at once, which costs the long one little, since short ones are short. So that nobody is
left without anything, the prompt that is here longest has a share of every step, and so has the first of
the queue. And the prompts that take many steps make none of them long: what comes meanwhile waits for the
step that runs, whatever its class.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from octavo.protocol.steps import Priority

from scheduler_svc.core.request import Sequence

_LEAST_SHARE = 8
"""The oldest has one part in so many of each step, whoever is before it."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a prompt could still use: one that runs, or one of the first that wait."""

    sequence: Sequence
    left: int
    """Tokens to compute."""
    chunk: float = math.inf
    """Tokens of it that make a step as long as it may be; without bound where it is short."""


def tokens_before(running: Iterable[tuple[Priority, int]], priority: Priority, left: int) -> int:
    """Return the tokens that prompts which run will have before a newcomer has had its own `left`.

    Args:
        running: class and tokens left of each.
        priority: class of the newcomer.
        left: its tokens.
    """
    before = others = 0
    for other, tokens in running:
        if (other, tokens) < (priority, left):
            before += tokens
        else:
            others += tokens
    return before + min(others, (before + left) // (_LEAST_SHARE - 1))


class Shares:
    """Deals out the tokens of one step: some at once, some promised to those that wait."""

    def __init__(self, budget: int) -> None:
        self._free = budget
        self._long = 1.0
        """Part of a chunk that long prompts may still have."""
        self._promised: dict[Sequence, tuple[Claim, int]] = {}

    def deal(self, running: list[Claim], waiting: list[Claim]) -> dict[Sequence, int]:
        """Serve the claims in their order, the oldest with its least share first.

        Return what those that run have; those that wait have it when they are admitted.
        """
        given: dict[Sequence, int] = {}
        least = max(1, self._free // _LEAST_SHARE)
        oldest = min(running, key=lambda claim: claim.sequence.request.arrival, default=None)
        for claim in (oldest, waiting[0] if waiting else None):
            if claim is not None:
                self._give(given, claim, least)
        self._serve(given, [*running, *waiting])
        self._promised = {c.sequence: (c, given.pop(c.sequence)) for c in waiting if c.sequence in given}
        return given

    def take(self, claim: Claim) -> int:
        """Return the tokens for one that is admitted: what was promised to it, and of what is free."""
        given: dict[Sequence, int] = {}
        self.forgo(claim.sequence)
        self._give(given, claim, self._free)
        return given.get(claim.sequence, 0)

    def forgo(self, sequence: Sequence) -> None:
        """One that waits is not admitted: what was promised to it is for others."""
        if (promise := self._promised.pop(sequence, None)) is not None:
            self._move(*promise)

    def put_back(self, claim: Claim, tokens: int) -> None:
        """One that was to be admitted is not: the tokens are for others."""
        self._move(claim, tokens)

    def rest(self, running: list[Claim]) -> dict[Sequence, int]:
        """Serve those that run with what the waiting have left."""
        given: dict[Sequence, int] = {}
        for sequence in list(self._promised):
            self.forgo(sequence)
        self._serve(given, running)
        return given

    def _serve(self, given: dict[Sequence, int], claims: Iterable[Claim]) -> None:
        for claim in sorted(claims, key=lambda claim: (claim.sequence.request.priority, claim.left)):
            self._give(given, claim, self._free)

    def _give(self, given: dict[Sequence, int], claim: Claim, most: int) -> None:
        before = given.get(claim.sequence, 0)
        tokens = min(claim.left - before, most, self._free)
        if claim.chunk < math.inf:
            tokens = min(tokens, int(self._long * claim.chunk))
        if tokens > 0:
            given[claim.sequence] = before + tokens
            self._move(claim, -tokens)

    def _move(self, claim: Claim, tokens: int) -> None:
        self._free += tokens
        self._long += tokens / claim.chunk
