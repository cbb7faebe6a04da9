"""A check looks at one thing and tells what it found, whatever happens to it on the way."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace


class Mark(enum.StrEnum):
    """What a finding means for a demo stack on this machine."""

    FINE = "fine"
    WARNING = "warning"
    """It would run; something is not as it should be, or is not known."""
    FAILED = "failed"
    """It would not run."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was found, and what to do where it is not fine."""

    mark: Mark
    found: str
    advice: str = ""
    check: str = ""
    """Name of the check, filled in by `run`."""


def fine(found: str) -> Finding:
    """Return a finding that asks for nothing."""
    return Finding(Mark.FINE, found)


def warning(found: str, advice: str) -> Finding:
    """Return a finding that a demo stack can live with."""
    return Finding(Mark.WARNING, found, advice)


def failed(found: str, advice: str) -> Finding:
    """Return a finding that keeps a demo stack from running."""
    return Finding(Mark.FAILED, found, advice)


@dataclass(frozen=True, slots=True)
class Check:
    """Something to look at. A room that contributes checks offers a sequence `CHECKS` of them."""

    name: str
    look: Callable[[], Iterable[Finding]]
    limit_s: float = 5.0


def run(check: Check) -> list[Finding]:
    """Return what a check finds. One that fails or hangs finds just that; it is left behind."""
    found: list[Finding] = []

    def look() -> None:
        try:
            for finding in check.look():
                found.append(finding)  # noqa: PERF402 # what came before an error stays
        except (Exception, SystemExit) as error:  # noqa: BLE001 # surroundings break in ways that nobody foresees
            words = " ".join(str(error).split())
            found.append(
                warning(f"could not be looked at: {type(error).__name__}: {words}", "please report this")
            )

    thread = threading.Thread(target=look, name=f"check {check.name}", daemon=True)
    thread.start()
    thread.join(check.limit_s)
    findings = list(found)
    if thread.is_alive():
        late = f"no answer within {check.limit_s:g} s"
        findings.append(warning(late, "run it again: a second look is faster where a disk was the reason"))
    return [replace(finding, check=check.name) for finding in findings]
