"""The control loop as people see it on a terminal, and as a file gets it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from dataclasses import replace

import pytest
from octavo.cli.dashboard import control_loop, sparkline
from octavo.status import HistoryPoint, Rates, Status

from tests.unit.client.fake_scheduler import ThreadedScheduler

RATES = Rates(2.0, 30.0, 80.0, 0.12, 1.5, 0.0, 0.25, 0.0021, 0.011, 0.04, 0.5)
NOW = Status("s", "1", 1000.0, 1, False, (), (), {}, 0, 0, RATES)


def points(*values: float, level: int = 0) -> list[HistoryPoint]:
    """One point each two seconds up to the present, with these requests per second."""
    start = NOW.uptime_s - 2 * len(values)
    return [
        HistoryPoint(start + 2 * index, level, 0, 0, 0, replace(RATES, requests_per_s=value))
        for index, value in enumerate(values)
    ]


def line(text: str, label: str) -> str:
    return next(one for one in text.splitlines() if one.startswith(label))


@pytest.mark.parametrize(
    ("values", "cells", "top", "drawn"),
    [
        ([0, 1, 2, 4, 7], 10, 7, "▁▂▃▅█"),
        ([0, 0, 0, 0, 0, 0, 0, 7, 0, 0], 5, 7, "▁▁▁█▁"),
        ([0.001, 0], 10, 100, "▂▁"),
        ([0, 0], 10, 0, "▁▁"),
        ([3], 10, 4, "▆"),
    ],
)
def test_sparkline_shows_each_peak_and_tells_little_from_nothing(
    values: list[float], cells: int, top: float, drawn: str
) -> None:
    assert sparkline(values, cells, top) == drawn


def test_control_loop_shows_figures_now_their_peak_and_their_course() -> None:
    text = control_loop(NOW, points(1, 2, 4, 8, level=3), width=80)
    assert line(text, "requests/s").split() == ["requests/s", "2", "8", "▂▃▅█▃"]
    assert line(text, "per token P99").split()[3:6] == ["40", "ms", "40"]
    assert line(text, "cost/1000 tokens").split()[2] == "0.0021"
    assert line(text, "level").split() == ["level", "1", "3", "▆▆▆▆▃"]
    assert "last 8 s" in text
    assert max(map(len, text.splitlines())) <= 80


def test_control_loop_leaves_out_what_is_older_and_what_has_no_price() -> None:
    old = [HistoryPoint(10.0, 4, 0, 0, 0, replace(RATES, requests_per_s=999))]
    text = control_loop(replace(NOW, rates=replace(RATES, cost_per_1k_tokens=None)), old, width=80)
    assert "999" not in text
    assert "cost" not in text
    assert line(text, "level").split() == ["level", "1", "1", "▃"]


def test_control_loop_of_a_new_scheduler_is_drawn() -> None:
    empty = Rates(0, 0, 0, 0, 0, 0, 0, None)
    text = control_loop(replace(NOW, uptime_s=0.1, rates=empty, level=0), [], width=40)
    assert line(text, "first token P50").split() == ["first", "token", "P50", "-", "-", "▁"]


def on_terminal(threaded: ThreadedScheduler, *arguments: str, **env: str) -> str:
    """Run a command on a terminal of its own and return all that it wrote."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "octavo.cli.main", *arguments, "--endpoint", threaded.fake.endpoint]
    process = subprocess.Popen(
        command, stdout=theirs, stderr=theirs, env={**os.environ, "COLUMNS": "100", "LINES": "40", **env}
    )
    os.close(theirs)
    written = b""
    try:
        while chunk := os.read(ours, 65536):
            written += chunk
    except OSError:  # So Linux says that the other side is gone.
        pass
    finally:
        os.close(ours)
    assert process.wait(timeout=60) == 0
    return written.decode()


def test_watch_draws_on_the_other_screen_and_leaves_the_terminal_as_it_was(
    threaded: ThreadedScheduler,
) -> None:
    text = on_terminal(threaded, "status", "--watch", "0.1")
    assert text.startswith("\x1b[?1049h\x1b[?7l\x1b[?25l")
    assert text.endswith("\x1b[?25h\x1b[?7h\x1b[?1049l")
    frames = text.split("\x1b[H")[1:]
    assert len(frames) == 3
    for frame in frames:
        assert "█" in frame
        assert "last 2 min" in frame
        assert "fake-1" in frame
        assert len(frame.splitlines()) < 40


def test_terminal_without_block_characters_or_colours_gets_plain_ones(threaded: ThreadedScheduler) -> None:
    text = on_terminal(threaded, "status", NO_COLOR="1", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert text.isascii()
    assert "\x1b" not in text
    assert "@" in line(text, "waiting")
