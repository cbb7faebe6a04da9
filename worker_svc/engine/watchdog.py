"""Notices a step that never ends, and ends the process, so that whoever supervises it starts it anew."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

import structlog
from octavo.service import logs

log = structlog.get_logger(__name__)

_FACTOR: Final = 20.0
"""A step may take so many times as long as the longest of about its size."""
_KNOWN_STEPS: Final = 3
"""Steps of a size that must have run before it counts as known: the first ones may compile."""
_STDERR: Final = 2
_LAST_WORDS_S: Final = 1.0
"""From the change of health to the end of the process."""


@dataclass(slots=True)
class _Size:
    """Steps of about one size."""

    count: int = 0
    longest_s: float = 0.0


@dataclass(slots=True)
class StepWatch:
    """The step that runs now and how long it may take. The engine's thread writes, the watchdog reads.

    `limit_s` is the least time that a step of a known size is given, `first_limit_s` that of others.
    """

    limit_s: float
    first_limit_s: float
    clock: Callable[[], float] = monotonic
    number: int = 0
    """Counts the steps, so that two can be told apart."""
    allowed_s: float | None = None
    """How long the step that runs may take; None between steps."""
    _sizes: dict[tuple[int, int], _Size] = field(default_factory=dict)
    _running: _Size = field(default_factory=_Size)
    _began: float = 0.0

    def begin(self, num_seqs: int, num_prefill_tokens: int) -> None:
        """A step begins. Sizes count as about the same within a factor of two."""
        size = (num_seqs.bit_length(), num_prefill_tokens.bit_length())
        known = self._running = self._sizes.setdefault(size, _Size())
        self.number += 1
        self._began = self.clock()
        enough = known.count >= _KNOWN_STEPS
        self.allowed_s = max(self.limit_s, _FACTOR * known.longest_s) if enough else self.first_limit_s

    def end(self) -> None:
        """The step has ended, well or not."""
        self.allowed_s = None
        known = self._running
        known.count += 1
        known.longest_s = max(known.longest_s, self.clock() - self._began)


class StuckStep:
    """Adds up how long one step has been seen to run.

    What counts is what the watchdog has seen, look by look: while the process was stopped, nobody looked and
    no step was stuck.
    """

    def __init__(self, watch: StepWatch, period_s: float) -> None:
        self._watch = watch
        self._most_s = 2 * period_s
        self._number = 0
        self._looked_at = watch.clock()
        self.seen_s = 0.0

    def look(self) -> bool:
        """Return whether the step that runs has taken too long."""
        watch = self._watch
        now = watch.clock()
        passed_s, self._looked_at = now - self._looked_at, now
        allowed_s, number = watch.allowed_s, watch.number
        if allowed_s is None or number != self._number:
            self._number, self.seen_s = number, 0.0
            return False
        self.seen_s += min(passed_s, self._most_s)
        return self.seen_s > allowed_s


class Watchdog:
    """A thread that looks at the running step.

    A thread of Python cannot run while a call holds the interpreter's lock. So it also winds up a timer of
    `faulthandler`, which needs no lock, again and again: when nothing of Python has run for `first_limit_s`,
    that one writes where every thread stands and ends the process with 1.
    """

    def __init__(
        self, watch: StepWatch, on_stuck: Callable[[], None], exit_process: Callable[[int], object] = os._exit
    ) -> None:
        self._watch = watch
        self._on_stuck = on_stuck
        self._exit = exit_process
        self._period_s = min(1.0, watch.limit_s / 4, watch.first_limit_s / 4)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._wind_up()
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        stuck = StuckStep(self._watch, self._period_s)
        while not self._stop.wait(self._period_s):
            self._wind_up()
            if stuck.look():
                self._end(stuck.seen_s)
                break
        faulthandler.cancel_dump_traceback_later()

    def _wind_up(self) -> None:
        faulthandler.dump_traceback_later(self._watch.first_limit_s, exit=True, file=_STDERR)

    def _end(self, seen_s: float) -> None:
        allowed_s = self._watch.allowed_s
        log.critical("step_stuck", reason="STEP_STUCK", seconds=round(seen_s, 1), allowed_s=allowed_s)
        with contextlib.suppress(Exception):
            self._on_stuck()
        # What follows goes past the log's writer.
        logs.flush(_LAST_WORDS_S)
        with contextlib.suppress(Exception):
            faulthandler.dump_traceback(file=_STDERR, all_threads=True)
        self._stop.wait(_LAST_WORDS_S)
        self._exit(1)
