"""Finds a request among the files of a plan log."""

from __future__ import annotations

from pathlib import Path

from scheduler_svc.planlog.errors import PlanLogError
from scheduler_svc.planlog.reader import PlanLogReader


def files_of(path: Path) -> list[Path]:
    """Return the files of a plan log, oldest first: `FILE.2`, `FILE.1`, `FILE`."""
    found, number = [path], 1
    while (older := path.with_name(f"{path.name}.{number}")).exists():
        found.append(older)
        number += 1
    return found[::-1]


def find_request(path: Path, request_id: str) -> tuple[str, list[Path]]:
    """Return the name of a request in the core, and the files that it may be in, from that in which it came.

    The core knows it by a name of its own, `ID#NUMBER`; of several with the same id the last is meant.

    Raises:
        PlanLogError: it came in none of them.
        OSError: one cannot be read.
    """
    files = files_of(path)
    for index in range(len(files) - 1, -1, -1):
        names = [
            entry.submit.request_id
            for entry in PlanLogReader(files[index])
            if entry.WhichOneof("event") == "submit"
        ]
        fitting = [name for name in names if request_id in (name, name.rpartition("#")[0])]
        if fitting:
            return fitting[-1], files[index:]
    raise PlanLogError(f"no request {request_id!r} in {path}")
