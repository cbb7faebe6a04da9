"""What can be measured, and what was promised of it."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any, Final, Literal, TypeVar

MEASURES: Final = "octavo_lab.scorecard.measures"


@dataclass(frozen=True, slots=True)
class Measured:
    """A value, and the facts behind it."""

    value: float
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Target:
    """A bound that the value must keep."""

    kind: Literal["at_most", "at_least"]
    bound: float

    def met(self, value: float) -> bool:
        """Return whether the value keeps it; a value that is no number does not."""
        return value <= self.bound if self.kind == "at_most" else value >= self.bound

    def __str__(self) -> str:
        return f"{'≤' if self.kind == 'at_most' else '≥'} {self.bound:g}"


def at_most(bound: float) -> Target:
    """Return the target of a value that must not exceed `bound`."""
    return Target("at_most", bound)


def at_least(bound: float) -> Target:
    """Return the target of a value that must reach `bound`."""
    return Target("at_least", bound)


Outcome = float | Measured
Measure = Callable[[], Outcome | Coroutine[Any, Any, Outcome]]
_M = TypeVar("_M", bound=Measure)


@dataclass(frozen=True, slots=True)
class Entry:
    """One promise. `long`: takes more than 60 seconds, and runs only when asked for."""

    name: str
    measures: str
    unit: str
    target: Target | None
    long: bool
    measure: Measure


_entries: Final[dict[str, Entry]] = {}


def entry(
    name: str, measures: str, unit: str, target: Target | None = None, *, long: bool = False
) -> Callable[[_M], _M]:
    """Register a function that measures; it returns the value, or a `Measured`."""

    def register(measure: _M) -> _M:
        if name in _entries and _entries[name].measure.__qualname__ != measure.__qualname__:
            raise ValueError(f"two entries are called {name}")
        _entries[name] = Entry(name, measures, unit, target, long, measure)
        return measure

    return register


def load(pattern: str = "*") -> list[Entry]:
    """Return the entries whose name matches a shell-style pattern, by name."""
    for module in pkgutil.iter_modules(import_module(MEASURES).__path__, f"{MEASURES}."):
        import_module(module.name)
    return sorted(
        (one for one in _entries.values() if fnmatchcase(one.name, pattern)), key=lambda one: one.name
    )
