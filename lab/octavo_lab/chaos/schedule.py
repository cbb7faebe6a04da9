"""What goes wrong and when: a pure function of the seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

KINDS: Final[dict[str, tuple[str, float, float]]] = {
    "kill-worker": ("worker", 0, 0),
    "kill-scheduler": ("scheduler", 0, 0),
    "kill-gateway": ("gateway", 0, 0),
    "stop-worker": ("worker", 0.3, 1.5),
    "stop-worker-long": ("worker", 1, 3),
    "stop-scheduler": ("scheduler", 0.3, 1.5),
    "stop-scheduler-long": ("scheduler", 5, 8),
    "stop-gateway": ("gateway", 0.3, 3),
    "drain-worker": ("worker", 0, 0),
    "drain-scheduler": ("scheduler", 0, 0),
    "drain-gateway": ("gateway", 0, 0),
    "cut": ("link", 1, 10),
    "cut-there": ("link", 1, 10),
    "cut-back": ("link", 1, 10),
    "flood": ("scheduler", 2, 2),
    "deaf": ("scheduler", 3, 6),
    "half-open": ("port", 3, 8),
    "pings": ("scheduler", 1, 2),
    "slow-step": ("fault", 0.2, 1),
    "hang": ("fault", 3, 3),
    "step-error": ("fault", 0, 0),
    "step-oom": ("fault", 0, 0),
    "allocation": ("fault", 0, 0),
    "stream-drop": ("fault", 0, 0),
    "lost-report": ("fault", 0, 0),
    "eviction-race": ("fault", 0, 0),
}
"""By name: what it strikes, and for how many seconds, at least and at most. Faults are set on a worker."""
PAST_WATCHDOG: Final = ("stop-worker-long", "hang")
"""Kinds that last so much longer than a worker may owe a report."""
TAKES_AWAY: Final = (*(kind for kind in KINDS if kind.startswith(("kill-", "drain-"))), *PAST_WATCHDOG)
"""Kinds after which a process starts anew."""


@dataclass(frozen=True, slots=True)
class Action:
    """One thing done to the stack, `at_s` seconds after traffic has begun."""

    at_s: float
    kind: str
    target: int
    """Which of those that it may strike, modulo their number."""
    seconds: float
    """How long it lasts, where it does."""


def schedule(
    seed: int, kinds: Sequence[str], seconds: float, every_s: float, watchdog_s: float = 3.0
) -> list[Action]:
    """Return the actions of a run: one each `every_s`, give or take a fifth, every kind as often."""
    rng = random.Random(seed)
    actions: list[Action] = []
    deck: list[str] = []
    number = 1
    while (at_s := every_s * (number + rng.uniform(-0.2, 0.2))) < seconds:
        if not deck:
            deck = rng.sample(sorted(kinds), len(kinds))
        kind = deck.pop()
        _, least, most = KINDS[kind]
        lasts_s = rng.uniform(least, most) + (watchdog_s if kind in PAST_WATCHDOG else 0.0)
        actions.append(Action(round(at_s, 2), kind, rng.randrange(1 << 16), round(lasts_s, 2)))
        number += 1
    return actions
