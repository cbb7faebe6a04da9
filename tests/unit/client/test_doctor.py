"""`octavo doctor`: what was found becomes lines, JSON and an exit code."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Any

import pytest
from octavo.checks import finding
from octavo.checks.finding import Check, Finding
from octavo.cli import doctor
from octavo.cli.main import main

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the command find what is given, and nothing of this machine."""
    monkeypatch.setenv("COLUMNS", "80")

    def find(*findings: Finding, rooms: dict[str, list[Finding]] | None = None) -> None:
        rooms = rooms or {}
        points = [EntryPoint(name, f"{name}_svc.checks", doctor.ENTRY_POINTS) for name in rooms]
        monkeypatch.setattr(doctor.machine, "CHECKS", (Check("thing", lambda: findings),))
        monkeypatch.setattr(doctor.network, "checks", lambda host, ports: ())
        monkeypatch.setattr(doctor, "entry_points", lambda group: points * 2)
        monkeypatch.setattr(doctor, "findings_of", lambda name, module: rooms[name])

    return find


def test_all_fine_exits_0_and_says_what_to_run(look: Any, capsys: Capture) -> None:
    look(finding.fine("as it should be"), rooms={"worker": [Finding(finding.Mark.FINE, "too", "", "gpu")]})

    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "✓  thing      as it should be",
        "✓  gpu        too",
        "",
        "A demo stack would run here: octavo up",
    ]


def test_warnings_exit_0_and_failures_1_with_what_to_do(look: Any, capsys: Capture) -> None:
    look(finding.warning("a bit off", "turn it"))
    assert main(["doctor"]) == 0
    assert "!  thing      a bit off\n              -> turn it\n" in capsys.readouterr().out

    look(finding.fine("one"), finding.failed("broken", "mend it"))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "✓  thing      one\n✗             broken\n              -> mend it\n" in out
    assert out.endswith("A demo stack would not run here: thing.\n")


def test_lines_fit_the_terminal(look: Any, capsys: Capture) -> None:
    look(finding.failed("many words " * 30, "do this and that " * 20))
    main(["doctor"])

    assert all(len(line) <= 80 for line in capsys.readouterr().out.splitlines())


def test_json_has_the_verdict_and_all_findings(look: Any, capsys: Capture) -> None:
    look(finding.failed("broken", "mend it"), rooms={"worker": [Finding(finding.Mark.FINE, "ok", "", "gpu")]})

    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "would_run": False,
        "findings": [
            {"mark": "failed", "found": "broken", "advice": "mend it", "check": "thing"},
            {"mark": "fine", "found": "ok", "advice": "", "check": "gpu"},
        ],
    }


def test_marks_are_letters_where_the_terminal_lacks_them(look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    look(finding.fine("good"), finding.failed("é", "mend it"))
    main(["doctor"])

    assert raw.getvalue().splitlines()[:2] == [b"ok thing      good", b"x             \\xe9"]


def test_room_that_no_process_can_be_started_for_is_a_line(
    look: Any, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str, module: str) -> Iterator[Finding]:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    look(rooms={"worker": []})
    monkeypatch.setattr(doctor, "findings_of", refuse)

    assert main(["doctor"]) == 1
    assert "✗  worker" in capsys.readouterr().out


@pytest.mark.parametrize("port", ["65536", "-1", "web"])
def test_port_that_is_none_is_wrong_usage(port: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", f"--gateway-port={port}"])

    assert caught.value.code == 2
    assert "from 0 to 65535" in capsys.readouterr().err
