"""Keeps the processes of a stack running: one that dies is started again, and said so."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from octavo.stack import StackError

MAX_DEATHS: Final = 5
WITHIN_S: Final = 60.0
"""A process that dies `MAX_DEATHS` times within so many seconds is not started again."""
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
    """Starts processes again that have died, each after a pause that doubles with its recent deaths."""

    def __init__(self, children: Sequence[Watched], say: Callable[[str], None]) -> None:
        self._children = children
        self._say = say
        self._deaths: dict[str, deque[float]] = {child.name: deque() for child in children}
        self._due: dict[str, float] = {}
        """When a dead one is to be started, by name."""

    def poll(self, now: float) -> None:
        """Look after every process; call it a few times per second.

        Args:
            now: monotonic seconds.

        Raises:
            StackError: one has died too often; the message ends with the last lines of its log.
        """
        for child in self._children:
            if child.alive:
                continue
            due = self._due.get(child.name)
            if due is None:
                self._bury(child, now)
            elif now >= due:
                del self._due[child.name]
                child.start()

    def _bury(self, child: Watched, now: float) -> None:
        """Take note of a death, and say when the process is started again."""
        deaths = self._deaths[child.name]
        deaths.append(now)
        while deaths[0] < now - WITHIN_S:
            deaths.popleft()
        if len(deaths) >= MAX_DEATHS:
            problem = f"{child.account()}; it died {len(deaths)} times within a minute and stays down"
            raise StackError(problem, log=child.last_lines())
        delay_s = min(_MAX_DELAY_S, _FIRST_DELAY_S * 2 ** (len(deaths) - 1))
        self._due[child.name] = now + delay_s
        self._say(f"{child.account()}; starting it again in {delay_s:g} s")
