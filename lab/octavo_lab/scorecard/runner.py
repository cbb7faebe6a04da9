"""Runs measures, each in a process of its own, so that none disturbs or ends another."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from octavo_lab.scorecard.registry import Entry, Measured, load

Verdict = Literal["ok", "short", "measured", "error", "not run"]

TIMEOUT_S: Final = 300.0
LONG_TIMEOUT_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Result:
    """What came of an entry. `reason` says why there is no value."""

    entry: Entry
    verdict: Verdict
    value: float | None = None
    seconds: float = 0.0
    reason: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    def as_record(self) -> dict[str, Any]:
        """Return the result as it stands in scorecard.json."""
        return {
            "name": self.entry.name,
            "measures": self.entry.measures,
            "value": self.value,
            "unit": self.entry.unit,
            "target": None if self.entry.target is None else str(self.entry.target),
            "verdict": self.verdict,
            "seconds": round(self.seconds, 1),
            "reason": self.reason,
            "details": self.details,
        }


def not_run(entry: Entry) -> Result:
    """Return the result of a long entry that nobody asked for."""
    return Result(entry, "not run", reason="takes long; LONG=1 runs it")


def run(entry: Entry) -> Result:
    """Measure in a child process and judge what comes back."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="octavo-scorecard-") as folder:
        answer, log = Path(folder) / "answer.json", Path(folder) / "log"
        command = [sys.executable, "-m", "octavo._child", str(os.getpid()), __name__, entry.name, str(answer)]
        with log.open("wb") as sink:
            process = subprocess.Popen(  # noqa: S603 # our own module
                command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, process_group=0
            )
            timeout_s = LONG_TIMEOUT_S if entry.long else TIMEOUT_S
            try:
                process.wait(timeout_s)
                reason = f"exit code {process.returncode}: {_last_line(log)}"
            except subprocess.TimeoutExpired:
                reason = f"not done within {timeout_s:g} s"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        seconds = time.monotonic() - started
        if not answer.exists():
            return Result(entry, "error", seconds=seconds, reason=reason)
        return judge(entry, json.loads(answer.read_text()), seconds)


def judge(entry: Entry, answer: dict[str, Any], seconds: float) -> Result:
    """Hold what a measure returned against what was promised."""
    if "error" in answer:
        return Result(entry, "error", seconds=seconds, reason=str(answer["error"]))
    value, details = float(answer["value"]), dict(answer["details"])
    if math.isnan(value):
        return Result(entry, "error", None, seconds, "the value is not a number", details)
    verdict: Verdict = "measured"
    if entry.target is not None:
        verdict = "ok" if entry.target.met(value) else "short"
    return Result(entry, verdict, value, seconds, details=details)


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def measure(name: str) -> dict[str, Any]:
    """Measure in this process; an exception becomes an answer too."""
    (entry,) = load(name)
    try:
        returned = entry.measure()
        outcome = asyncio.run(returned) if isinstance(returned, Coroutine) else returned
    except Exception as error:  # noqa: BLE001 # whatever it is, the other entries go on
        return {"error": f"{type(error).__name__}: {error}"}
    measured = outcome if isinstance(outcome, Measured) else Measured(float(outcome))
    return {"value": measured.value, "details": dict(measured.details)}


def main() -> int:
    """Measure the entry named by the first argument into the file named by the second."""
    name, path = sys.argv[1:]
    answer = json.dumps(measure(name))
    Path(path).write_text(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
