"""Every measurable promise of Octavo, measured when asked: `python -m octavo_lab.scorecard`.

A measure is a function in a module of `octavo_lab.scorecard.measures`. The first paragraph of its docstring
says what is measured; what follows says how.

    @entry("e2e.idle_cpu", "% of a core", at_most(1))
    async def idle_cpu() -> Measurement:
        '''CPU of the busiest process of a stack that has nothing to do'''
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any, Final, TypeVar

MEASURES: Final = "octavo_lab.scorecard.measures"


@dataclass(frozen=True, slots=True)
class Measurement:
    """A value, and the facts behind it."""

    value: float
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Bound:
    """What was promised of a value: to be at least the limit, or else at most."""

    limit: float
    at_least: bool

    def met(self, value: float) -> bool:
        """Return whether the value keeps it."""
        return value >= self.limit if self.at_least else value <= self.limit

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:g}"


def at_most(limit: float) -> Bound:
    """Return the target of a value that must not exceed `limit`."""
    return Bound(limit, at_least=False)


def at_least(limit: float) -> Bound:
    """Return the target of a value that must reach `limit`."""
    return Bound(limit, at_least=True)


Outcome = float | Measurement
Measure = Callable[[], Outcome | Coroutine[Any, Any, Outcome]]
_M = TypeVar("_M", bound=Measure)


@dataclass(frozen=True, slots=True)
class Entry:
    """One promise. `long`: takes more than 60 seconds, and runs only when asked for."""

    name: str
    measures: str
    unit: str
    target: Bound | None
    long: bool
    measure: Measure


entries: Final[dict[str, Entry]] = {}
"""Those of the modules that were imported, by name."""


def entry(
    name: str, unit: str, target: Bound | None = None, *, long: bool = False, measures: str = ""
) -> Callable[[_M], _M]:
    """Register a function that measures; `measures` takes the place of its docstring's first paragraph."""

    def register(measure: _M) -> _M:
        if name in entries:
            raise ValueError(f"two entries are called {name}")
        what = measures or (inspect.getdoc(measure) or "").split("\n\n")[0]
        entries[name] = Entry(name, " ".join(what.split()), unit, target, long, measure)
        return measure

    return register


def load(pattern: str = "*") -> list[Entry]:
    """Return the entries whose name matches a shell-style pattern, by name."""
    for module in pkgutil.iter_modules(import_module(MEASURES).__path__, f"{MEASURES}."):
        import_module(module.name)
    return [entries[name] for name in sorted(entries) if fnmatchcase(name, pattern)]
