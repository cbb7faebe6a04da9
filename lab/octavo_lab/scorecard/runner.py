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
from pathlib import Path
from typing import Any, Final

from octavo_lab.scorecard import Entry, Measurement, load

TIMEOUT_S: Final = 300.0
LONG_TIMEOUT_S: Final = 3600.0
Record = dict[str, Any]
"""What came of an entry, as it stands in scorecard.json."""


def record(entry: Entry, value: float | None = None, reason: str = "", **more: Any) -> Record:
    """Return the record of a value held against its target, or of the reason why there is none."""
    if value is not None and math.isnan(value):
        value, reason = None, "the value is not a number"
    verdict = "error" if value is None else "measured"
    if value is not None and entry.target is not None:
        verdict = "ok" if entry.target.met(value) else "short"
    target = None if entry.target is None else str(entry.target)
    told = {"name": entry.name, "measures": entry.measures, "value": value, "unit": entry.unit}
    found: Record = {"target": target, "verdict": verdict, "seconds": 0.0, "reason": reason, "details": {}}
    return {**told, **found, **more}


def run(entry: Entry) -> Record:
    """Measure in a child process and judge what comes back."""
    started, timeout_s = time.monotonic(), LONG_TIMEOUT_S if entry.long else TIMEOUT_S
    with tempfile.TemporaryDirectory(prefix="octavo-scorecard-") as folder:
        answer, log = Path(folder) / "answer.json", Path(folder) / "log"
        command = [sys.executable, "-m", "octavo._child", str(os.getpid()), __name__, entry.name, str(answer)]
        with log.open("wb") as sink:
            process = subprocess.Popen(  # noqa: S603 # our own module
                command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, process_group=0
            )
        try:
            code = process.wait(timeout_s)
            said = ["it said nothing", *log.read_text(errors="replace").strip().splitlines()]
            reason = f"exit code {code}: {said[-1].strip()}"
        except subprocess.TimeoutExpired:
            reason = f"not done within {timeout_s:g} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        found = json.loads(answer.read_text()) if answer.exists() else {"reason": reason}
    return record(entry, **found, seconds=round(time.monotonic() - started, 1))


def measure(name: str) -> Record:
    """Measure in this process; an exception becomes an answer too."""
    (entry,) = load(name)
    try:
        returned = entry.measure()
        outcome = asyncio.run(returned) if isinstance(returned, Coroutine) else returned
    except Exception as error:  # noqa: BLE001 # whatever it is, the other entries go on
        return {"reason": f"{type(error).__name__}: {error}"}
    measured = outcome if isinstance(outcome, Measurement) else Measurement(outcome)
    return {"value": float(measured.value), "details": dict(measured.details)}


if __name__ == "__main__":
    # The child: the entry named by the first argument goes into the file named by the second.
    Path(sys.argv[2]).write_text(json.dumps(measure(sys.argv[1])))
