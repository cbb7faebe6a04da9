"""No decision goes by the wall clock, which may jump: who reads it is named here, and why that may be."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.unit.test_house import paths

WALL: dict[str, frozenset[str]] = {
    "time": frozenset({"time", "time_ns", "localtime", "gmtime", "ctime"}),
    "datetime": frozenset({"now", "utcnow", "today"}),
    "date": frozenset({"today"}),
}
MAY = {
    "octavo.checks.machine": "says how far the clock of this machine is off",
    "octavo.gateway.app": "`created` in answers",
    "octavo.gateway.dialects.responses_writer": "`completed_at` in answers",
    "octavo.service.authority": "from when on a certificate holds",
    "octavo.service.followed": "the age of a file; a wrong guess reads it again, or a second later",
    "scheduler_svc.admission.tokens": "tokens say in wall clock time until when they hold",
    "scheduler_svc.observe.usage": "when usage was counted, for people",
    # One that goes back costs the time in which the worker finds the former stream dead.
    "scheduler_svc.fleet.worker_link": "the first epoch, to be above those of an earlier process",
    "scheduler_svc.planlog.writer": "when a file was begun, for people",
    "scheduler_svc.text.chat": "chat templates may show the date",
}


def wall_clock_reads(path: Path) -> set[str]:
    """Calls like time.time(), datetime.datetime.now(), and imports of such names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            owner = (
                node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            )
            if node.attr in WALL.get(owner, ()):
                found.add(f"{owner}.{node.attr}")
        elif isinstance(node, ast.ImportFrom) and node.module in WALL:
            found.update(f"from {node.module}" for alias in node.names if alias.name in WALL[node.module])
    return found


def test_only_what_people_read_goes_by_the_wall_clock() -> None:
    modules = {name: path for name, path in paths().items() if not name.startswith("octavo_lab")}
    reads = {name for name, path in modules.items() if wall_clock_reads(path)}
    assert reads == set(MAY)
