"""Keeps the processes of a stack running: one that dies is started again, and said so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, Protocol

SETTLED_S: Final = 10.0
"""A process that has run for so long has come up well: what ends it then is a new trouble."""
SHOWN_EVERY: Final = 5
"""After so many deaths in a row the end of the log is shown."""
_FIRST_DELAY_S: Final = 0.25
_MAX_DELAY_S: Final = 4.0


class Watched(Protocol):
    """What the supervisor needs of a process; `octavo.stack.Child` is one."""

    name: str

    @property
    def alive(self) -> bool:
        """Whether it runs."""

    def start(self) -> None:
        """Start it again."""

    def account(self) -> str:
        """Return how it ended, in a line."""

    def last_lines(self) -> str:
        """Return the end of its log."""


class Supervisor:
    """Starts processes again that have died; the pause doubles while one dies soon after its start.

    It never gives up on one: what killed it may be a request, or whoever took its machine, and pass.
    """

    def __init__(self, children: Sequence[Watched], say: Callable[[str], None]) -> None:
        self._children = children
        self._say = say
        self._deaths = Counter[str]()
        """In a row, none of which came after the process had settled, by name."""
        self._settled_at: dict[str, float] = {}
        self._due: dict[str, float] = {}
        """When a dead one is to be started, by name."""

    def poll(self, now: float) -> None:
        """Look after every process; call it a few times per second.

        Args:
            now: monotonic seconds.
        """
        for child in self._children:
            if child.alive:
                continue
            due = self._due.get(child.name)
            if due is None:
                self._bury(child, now)
            elif now >= due:
                del self._due[child.name]
                self._settled_at[child.name] = now + SETTLED_S
                child.start()

    def _bury(self, child: Watched, now: float) -> None:
        """Take note of a death, and say when the process is started again."""
        if now >= self._settled_at.get(child.name, now):
            self._deaths[child.name] = 0
        self._deaths[child.name] += 1
        deaths = self._deaths[child.name]
        delay_s = min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(deaths - 1, 8))
        self._due[child.name] = now + delay_s
        self._say(f"{child.account()}; starting it again in {delay_s:g} s")
        if deaths % SHOWN_EVERY == 0:
            self._say(f"{child.name} died {deaths} times in a row; the end of its log:\n{child.last_lines()}")
