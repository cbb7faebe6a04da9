"""Runs the checks of a room in a process of its own: what they load may crash, or never return."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from importlib import import_module
from typing import Final

from octavo.checks.finding import Finding, Mark, run, warning

_LIMIT_S: Final = 90.0
"""For a process. Each check has a limit of its own, which native code may ignore."""


def findings_of(room: str, module: str, limit_s: float = _LIMIT_S) -> Iterator[Finding]:
    """Yield what the checks of a room find, as they find it. After a crash the next check goes on.

    Args:
        room: its name, which is also the extra that it needs.
        module: where its `CHECKS` are.
        limit_s: after this time the process is killed.
    """
    num_begun, code = 0, None
    while code != 0:
        check = None
        command = [sys.executable, "-m", "octavo.checks.child", room, module, str(num_begun)]
        with subprocess.Popen(  # noqa: S603 # our own module
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            assert process.stdout is not None
            timer = threading.Timer(limit_s, process.kill)
            timer.start()
            try:
                for line in process.stdout:
                    if not line.endswith("\n"):
                        break
                    record = json.loads(line)
                    if "begun" in record:
                        check, num_begun = record["begun"], num_begun + 1
                    else:
                        yield Finding(**{**record, "mark": Mark(record["mark"])})
                code = process.wait()
            finally:
                timer.cancel()
                process.kill()
        if code != 0:
            yield _crashed(room, check or room, code, limit_s)
        if check is None:
            return


def _crashed(room: str, check: str, code: int, limit_s: float) -> Finding:
    if code == -signal.SIGKILL:
        found = f"the process that looked was killed, for want of memory or after {limit_s:g} s"
        return Finding(Mark.FAILED, found, "see that there is memory, and run it again", check)
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    advice = f"install again what it loads: pip install --force-reinstall 'octavo[{room}]'"
    return Finding(Mark.FAILED, f"the process that looked {how}", advice, check)


def main(room: str, module: str, num_done: int) -> None:
    """Run the checks of a room but for the first ones, and print a line of JSON for all that happens."""
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # What libraries print must not come between.
    try:
        checks = import_module(module).CHECKS
    except ModuleNotFoundError as error:
        missing = warning(f"cannot be looked at without {error.name}", f"pip install 'octavo[{room}]'")
        checks = []
        lines.write(json.dumps({**asdict(missing), "check": room}) + "\n")
    for check in checks[num_done:]:
        lines.write(json.dumps({"begun": check.name}) + "\n")
        lines.writelines(json.dumps(asdict(finding)) + "\n" for finding in run(check))
    lines.flush()
    os._exit(0)  # A check that hangs must not keep the process.


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
