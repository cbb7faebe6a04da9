"""A room's checks run in a process of their own, whatever they do to it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from octavo.checks.child import findings_of
from octavo.checks.finding import Check, Finding, Mark, fine, run

ROOM = "tests.unit.octavo.checks.rooms"
ROOT = Path(__file__).parents[4]


@pytest.fixture
def _room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(ROOT)


@pytest.mark.usefixtures("_room")
def test_checks_that_crash_hang_or_raise_cost_their_own_line_only() -> None:
    found = list(findings_of("worker", ROOM))

    assert [(one.check, one.mark) for one in found] == [
        ("good", Mark.FINE),
        ("crashing", Mark.FAILED),
        ("leaving", Mark.FAILED),
        ("hanging", Mark.FINE),
        ("hanging", Mark.WARNING),
        ("raising", Mark.FINE),
        ("raising", Mark.WARNING),
        ("exiting", Mark.WARNING),
        ("last", Mark.FINE),
    ]
    assert found[0].found == "all is well"
    assert "SIGILL" in found[1].found
    assert "'octavo[worker]'" in found[1].advice
    assert "exit code 7" in found[2].found
    assert "RuntimeError: a page of words" in found[6].found
    assert all(one.advice for one in found if one.mark is not Mark.FINE)


@pytest.mark.usefixtures("_room")
def test_process_that_says_nothing_is_killed() -> None:
    (found,) = findings_of("worker", ROOM, limit_s=0.0)

    assert (found.mark, found.check) == (Mark.FAILED, "worker")
    assert "killed" in found.found


def test_room_whose_extra_is_missing_names_it() -> None:
    (found,) = findings_of("worker", "nothing_of_this_name.checks")

    assert (found.check, found.mark) == ("worker", Mark.WARNING)
    assert found.advice == "pip install 'octavo[worker]'"


def test_what_came_before_the_limit_is_kept() -> None:
    release = threading.Event()

    def look() -> Iterator[Finding]:
        yield fine("first")
        release.wait()

    found = run(Check("slow", look, limit_s=0.05))
    release.set()

    assert [(one.check, one.mark) for one in found] == [("slow", Mark.FINE), ("slow", Mark.WARNING)]
