"""The degradation ladder: pressure in, a level out. Stated inputs and thresholds, hysteresis, dwell.

`docs/overload.md` tells what each level does and how to tune it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from octavo.protocol.steps import Priority

_WINDOW_S = 5.0
_MIN_PROMISES = 10.0
"""Predictions that must have come to an end lately before their failures say anything."""


class Level(enum.IntEnum):
    """How far the service has stepped back; each level does what those below it do, and more."""

    NORMAL = 0
    TRIM = 1
    SHED_BATCH = 2
    SHED_STANDARD = 3
    OPEN = 4


Thresholds = tuple[float | None, float | None, float | None, float | None]
"""Value of an input at which levels 1 to 4 are entered; None where it does not lead."""


def _timeouts() -> dict[Priority, float | None]:
    return {Priority.INTERACTIVE: 1.5, Priority.STANDARD: 30.0, Priority.BATCH: None}


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadConfig:
    """When levels change, and what they do. Durations are seconds."""

    backlog: Thresholds = (0.5, 0.7, 0.85, 0.95)
    """Backlog of the classes that the level still serves, as a share of the queue's bounds."""
    wait: Thresholds = (0.5, 0.75, 0.9, None)
    """Predicted wait of a newcomer over the queue timeout of its class."""
    blocks: Thresholds = (0.97, None, None, None)
    """Share of all blocks that running sequences hold, while others wait."""
    misses: Thresholds = (0.1, 0.25, 0.5, 0.8)
    """Share of the accepted requests that missed a deadline before their first token."""
    stall_s: float = 10.0
    """The breaker opens when every worker is busy, and its report overdue, for this long."""
    exit_ratio: float = 0.7
    """A level is left when every input is below this share of the threshold that it was entered at."""
    interval_s: float = 0.1
    """Time between two looks at the inputs."""
    rise_s: float = 0.2
    """Least time in a level before the next higher one."""
    dwell_s: float = 1.5
    """Least time in a level, and least time of calm, before the next lower one."""
    queue_timeout_s: Mapping[Priority, float | None] = field(default_factory=_timeouts)
    """What predicted waits are compared with, by class."""
    shed_prompt_tokens: int = 1024
    """Prompts longer than this are refused from level 2 on where the request allows it."""
    trim_prompt_tokens: tuple[int, int] = (2048, 256)
    """Cap on the prompts that may be trimmed: when trimming begins, and at full backlog."""
    trim_max_tokens: tuple[int, int] = (512, 64)
    """Cap on the max_tokens of the same requests."""
    open_s: float = 1.0
    """How long the breaker stays open before it lets probes in; doubled each time that one fails."""
    max_open_s: float = 30.0
    num_probes: int = 3
    """Requests let in while the breaker is half open; when so many had a first token it closes."""

    def __post_init__(self) -> None:
        for name in ("backlog", "wait", "blocks", "misses"):
            given = [value for value in getattr(self, name) if value is not None]
            if given != sorted(given) or any(value <= 0 for value in given):
                raise ValueError(f"{name} must be positive and ascending, got {getattr(self, name)}")
        if not 0 < self.exit_ratio < 1:
            raise ValueError(f"exit_ratio must be between 0 and 1, got {self.exit_ratio}")


@dataclass(frozen=True, slots=True)
class Pressure:
    """The inputs at one moment; ratios, 1 at the bound."""

    backlog: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Of the interactive class, with the standard one, and of all: over the queue's bounds."""
    wait: tuple[float, float] = (0.0, 0.0)
    """Predicted wait over the timeout: of the interactive class, and the worst of any that is asked for."""
    blocks: float = 0.0
    misses: float = 0.0
    stalled_s: float = 0.0
    """For how long the reports of all workers are overdue."""

    def toward(self, level: Level) -> dict[str, float]:
        """Return the inputs that lead to a level: those of the classes that it goes on serving."""
        served = {Level.OPEN: 0, Level.SHED_STANDARD: 1}.get(level, 2)
        return {
            "backlog": self.backlog[served],
            "wait": self.wait[0 if level >= Level.SHED_STANDARD else 1],
            "blocks": self.blocks,
            "misses": self.misses,
        }

    def fields(self) -> dict[str, float]:
        """Return everything, for a log line."""
        values = {
            "backlog_interactive": self.backlog[0],
            "backlog_standard": self.backlog[1],
            "backlog": self.backlog[2],
            "wait_interactive": self.wait[0],
            "wait": self.wait[1],
            "blocks": self.blocks,
            "misses": self.misses,
            "stalled_s": self.stalled_s,
        }
        return {name: round(value, 4) for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class Transition:
    """A change of level, or of the breaker's state, and what caused it."""

    former: Level
    level: Level
    cause: str
    """The inputs that reached their thresholds; `calm` when none holds the level; what probes said."""


@dataclass(frozen=True, slots=True)
class Caps:
    """Limits for requests that may be trimmed."""

    prompt_tokens: int
    max_tokens: int


class Misses:
    """Share of the accepted that missed a deadline before their first token, lately."""

    def __init__(self) -> None:
        self._kept = 0.0
        self._missed = 0.0
        self._at = 0.0

    def add(self, now: float, *, missed: bool) -> None:
        """A request with a predicted first token has had it, or has missed its deadline."""
        keep = math.exp((self._at - now) / _WINDOW_S)
        self._kept = self._kept * keep + (not missed)
        self._missed = self._missed * keep + missed
        self._at = now

    def share(self, now: float) -> float:
        """Return the share; 0 while too few have come to an end."""
        keep = math.exp((self._at - now) / _WINDOW_S)
        total = self._kept + self._missed
        return self._missed / total if total * keep >= _MIN_PROMISES else 0.0


class Breaker:
    """Open: nobody gets in. Half open: a few probes do, and what becomes of them decides."""

    def __init__(self, config: OverloadConfig) -> None:
        self._config = config
        self._open_s = config.open_s
        self.open_until = 0.0
        self.half_open = False
        self.probes: set[str] = set()
        """Probes that have neither a first token nor an end."""
        self._passed = 0

    def open(self, now: float, *, again: bool = False) -> None:
        """Open; longer each time that probing failed."""
        self._open_s = min(self._config.max_open_s, 2 * self._open_s) if again else self._config.open_s
        self.open_until = now + self._open_s
        self.half_open = False
        self.probes.clear()
        self._passed = 0

    def admits(self) -> bool:
        """Return whether a probe may be let in."""
        return self.half_open and len(self.probes) + self._passed < self._config.num_probes

    def passed(self, request_id: str) -> None:
        """A probe has its first token."""
        if request_id in self.probes:
            self.probes.discard(request_id)
            self._passed += 1

    def withdrawn(self, request_id: str) -> None:
        """A probe was given up by its client: it says nothing."""
        self.probes.discard(request_id)

    @property
    def satisfied(self) -> bool:
        """Whether enough probes have had their first token."""
        return self._passed >= self._config.num_probes


class Controller:
    """Holds the level of one model. One step up or down at a time."""

    def __init__(self, config: OverloadConfig) -> None:
        self.config = config
        self.level = Level.NORMAL
        self.pressure = Pressure()
        self.breaker = Breaker(config)
        self._since = -math.inf
        self._calm_since: float | None = None

    def observe(self, pressure: Pressure, now: float) -> Transition | None:
        """Take the inputs of the moment; return the change that they lead to, if any."""
        self.pressure = pressure
        if self.level < Level.OPEN:
            cause = self._reached(Level(self.level + 1), 1.0)
            if cause is None and pressure.stalled_s >= self.config.stall_s:
                cause = "stalled"
            if cause is not None:
                self._calm_since = None
                risen = now - self._since >= self.config.rise_s
                return self._move(Level(self.level + 1), cause, now) if risen else None
        if self.level is Level.NORMAL:
            return None
        if self._held():
            self._calm_since = None
            return None
        if self._calm_since is None:
            self._calm_since = now
        if self.level is Level.OPEN:
            return self._while_open(now)
        return self._move(Level(self.level - 1), "calm", now) if self._calm_for_long(now) else None

    def probe_failed(self, request_id: str, now: float) -> Transition | None:
        """A probe missed its deadline or failed: the breaker opens again, for longer."""
        if request_id not in self.breaker.probes:
            return None
        self.breaker.open(now, again=True)
        return Transition(Level.OPEN, Level.OPEN, "probe_failed")

    def caps(self) -> Caps | None:
        """Return the limits for requests that may be trimmed; they fall as the backlog grows."""
        if self.level is Level.NORMAL:
            return None
        config = self.config
        enter = config.backlog[0] or 0.0
        full = max(self.pressure.backlog[2], self.pressure.wait[1])
        share = min(1.0, max(0.0, (full - enter) / (1.0 - enter))) if enter < 1.0 else 1.0
        return Caps(_between(config.trim_prompt_tokens, share), _between(config.trim_max_tokens, share))

    # Inside --------------------------------------------------------------------------------------

    def _reached(self, level: Level, ratio: float) -> str | None:
        """Return the inputs that are at a level's thresholds times `ratio`, by name."""
        config = self.config
        values = self.pressure.toward(level)
        names = []
        for name, thresholds in (
            ("backlog", config.backlog),
            ("wait", config.wait),
            ("blocks", config.blocks),
            ("misses", config.misses),
        ):
            threshold = thresholds[level - 1]
            if threshold is not None and values[name] >= threshold * ratio:
                names.append(name)
        return "+".join(names) or None

    def _held(self) -> bool:
        """Return whether some input still holds the level."""
        if self.pressure.stalled_s >= self.config.stall_s * self.config.exit_ratio:
            return True
        return self._reached(self.level, self.config.exit_ratio) is not None

    def _calm_for_long(self, now: float) -> bool:
        since = max(self._calm_since if self._calm_since is not None else now, self._since)
        return now - since >= self.config.dwell_s

    def _while_open(self, now: float) -> Transition | None:
        breaker = self.breaker
        if not breaker.half_open:
            if now < breaker.open_until:
                return None
            breaker.half_open = True
            self._calm_since = now
            return Transition(Level.OPEN, Level.OPEN, "half_open")
        if breaker.satisfied:
            return self._move(Level.SHED_STANDARD, "probes", now)
        # Nobody comes to be a probe: calm is all there is to go by.
        if not breaker.probes and self._calm_for_long(now):
            return self._move(Level.SHED_STANDARD, "calm", now)
        return None

    def _move(self, level: Level, cause: str, now: float) -> Transition:
        former, self.level = self.level, level
        self._since = now
        self._calm_since = None
        if level is Level.OPEN:
            self.breaker.open(now)
        return Transition(former, level, cause)


def _between(ends: tuple[int, int], share: float) -> int:
    """Return a value between two ends, equal shares apart by equal ratios."""
    start, end = ends
    ratio: float = (end / start) ** share
    return round(start * ratio)
