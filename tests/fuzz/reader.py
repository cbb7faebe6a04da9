"""What is fuzzed: a reader of bytes that come from elsewhere, and how a run of one goes."""

from __future__ import annotations

import random
import signal
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final, Self

import psutil

from tests.fuzz.mutations import harmed

CORPUS: Final = Path(__file__).parent / "corpus"
"""Inputs that have found a fault once, in a folder for each reader."""
_SLOW_S: Final = 10.0
"""Of CPU time: what else the machine does is no fault."""
_GROWTH_BYTES: Final = 512 << 20


class Fault(AssertionError):
    """A reader did what no input may make it do."""


class Reader(ABC):
    """Reads harmed messages, an episode at a time. Use it in a `with` statement."""

    name: str
    stuck_s = 120.0
    """An episode that takes longer hangs."""

    def __init__(self) -> None:
        self.read: list[bytes] = []
        """Messages of the present episode that were harmed."""

    @abstractmethod
    def episode(self, rng: random.Random) -> None:
        """Read some messages; raises what a reader must not raise, or Fault."""

    def finish(self) -> None:  # noqa: B027 - nothing, for most
        """Check what must hold after many episodes: nothing leaked, others are served."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:  # noqa: B027
        """Release what was opened."""


class FileReader(Reader):
    """A reader without a memory: each episode is one input."""

    def __init__(self, name: str, seeds: Sequence[bytes], read: Callable[[bytes], object]) -> None:
        super().__init__()
        self.name = name
        self.seeds = (*seeds, *(path.read_bytes() for path in sorted((CORPUS / name).glob("*"))))
        self.parse = read

    def episode(self, rng: random.Random) -> None:
        data = harmed(rng, rng.choice(self.seeds), self.seeds, message=False)
        self.read.append(data)
        self.parse(data)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run."""

    name: str
    messages: int
    seconds: float
    faults: tuple[Path, ...]
    """Files with the harmed messages and the traceback of each fault."""


def fuzz(
    reader: Reader, seed: int, until: Callable[[int, float], bool], folder: Path, most_faults: int = 5
) -> Outcome:
    """Let a reader read until `until(messages, seconds)`; the same seed does the same."""
    began, messages, number = time.monotonic(), 0, 0
    faults: list[Path] = []
    process = psutil.Process()
    signal.signal(signal.SIGPROF, _too_slow)
    signal.signal(signal.SIGALRM, _stuck)
    resident = process.memory_info().rss
    while not until(messages, time.monotonic() - began) and len(faults) < most_faults:
        rng = random.Random(f"{reader.name} {seed} {number}")
        reader.read.clear()
        try:
            _set_timers(_SLOW_S, reader.stuck_s)
            reader.episode(rng)
            _set_timers(0, 0)
            if number % 500 == 0 and process.memory_info().rss > resident + _GROWTH_BYTES:
                raise Fault(f"the process grew by {(process.memory_info().rss - resident) >> 20} MiB")
        except Exception:  # noqa: BLE001 - whatever it is, it is what was sought
            _set_timers(0, 0)
            faults.append(_kept(reader, folder, f"seed {seed} episode {number}\n{traceback.format_exc()}"))
        messages += len(reader.read)
        number += 1
    try:
        reader.finish()
    except Exception:  # noqa: BLE001
        faults.append(_kept(reader, folder, f"seed {seed} at the end\n{traceback.format_exc()}"))
    return Outcome(reader.name, messages, time.monotonic() - began, tuple(faults))


def _set_timers(slow_s: float, stuck_s: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, slow_s)
    signal.setitimer(signal.ITIMER_REAL, stuck_s)


def _too_slow(*_: object) -> None:
    raise Fault(f"an episode takes more than {_SLOW_S:g} s of CPU time")


def _stuck(*_: object) -> None:
    raise Fault("an episode does not end")


def _kept(reader: Reader, folder: Path, what: str) -> Path:
    """Write the input that found a fault: one file for a file reader, one a message for the others."""
    digest = sha256(b"".join(reader.read)).hexdigest()[:12]
    place = folder / reader.name
    place.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(reader.read):
        (place / f"{digest}-{number}").write_bytes(data)
    report = place / f"{digest}.txt"
    report.write_text(what)
    return report
