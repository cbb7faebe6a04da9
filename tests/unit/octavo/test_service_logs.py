"""Logs never hold what a client sent, and to log never fails and never waits."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import resource
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from octavo.service import logs


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, config = root.handlers[:], root.level, structlog.get_config()
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.configure(**config)
    logging.captureWarnings(capture=False)


def fail_with(prompt: str) -> None:
    try:
        raise ValueError(len(prompt))
    except ValueError:
        structlog.get_logger().exception("request_failed", request_id="r")


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_trace_of_a_failure_shows_no_local_variables(
    log_format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure(log_format, "info")
    fail_with("a secret prompt")
    logs.flush()
    written = capsys.readouterr().err
    assert "ValueError" in written
    assert "secret" not in written


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("auto", "info")
    structlog.get_logger().info("request", outcome="STOP")
    structlog.get_logger().debug("not shown")
    logging.getLogger("a library").warning("something")
    logs.flush()
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["event"] for line in lines] == ["request", "something"]
    assert lines[0]["outcome"] == "STOP"


def test_warnings_of_libraries_are_lines_like_others(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("json", "info")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(capture=False)
        logging.captureWarnings(capture=True)
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    logs.flush()
    assert "DeprecationWarning: old" in json.loads(capsys.readouterr().err)["event"]


def test_lines_that_cannot_be_written_are_counted_and_told_of_once_one_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = logs.dropped()
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr("sys.stderr", full)
        logs.configure("json", "info")
        for number in range(3):
            structlog.get_logger().info("lost", number=number)
            logs.flush()
        assert logs.dropped() == before + 3
        path = tmp_path / "log"
        with path.open("w") as file:
            monkeypatch.setattr("sys.stderr", file)
            logs.configure("json", "info")
            structlog.get_logger().info("seen")
            structlog.get_logger().info("seen too")
            logs.flush()
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(line["event"] for line in lines) == ["log_lines_dropped", "seen", "seen too"]
    (told,) = [line for line in lines if line["event"] == "log_lines_dropped"]
    assert (told["level"], told["lines"]) == ("warning", 3)


def test_line_of_which_a_part_was_written_does_not_spoil_the_next(tmp_path: Path) -> None:
    path, limits = tmp_path / "log", resource.getrlimit(resource.RLIMIT_FSIZE)
    with path.open("w") as file:
        writer = logs.LineWriter(file)
        writer.put("whole")
        writer.flush(10)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
            writer.put("torn off")
            writer.flush(10)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        writer.put("next")
        writer.flush(10)
    assert path.read_text() == "whole\ntorn\nnext\n"
    assert writer.dropped == 1


def test_line_for_a_closed_stream_is_dropped() -> None:
    reader, end = os.pipe()
    file = os.fdopen(end, "w")
    writer = logs.LineWriter(file)
    os.close(reader)
    writer.put("nobody is there")
    writer.flush(10)
    file.close()
    writer.put("nor is this")
    writer.flush(10)
    assert writer.dropped == 2


def test_pipe_that_nobody_reads_holds_up_nobody_and_is_written_in_order_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logs, "_MAX_QUEUED_CHARS", 1000)
    reader, end = os.pipe()
    fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, 4096)
    with os.fdopen(end, "w") as file:
        writer = logs.LineWriter(file)
        for number in range(200):
            writer.put(f"{number:0100}")
        assert writer.dropped > 100
        writer.flush(0.01)
        with os.fdopen(reader) as lines:
            read = [int(lines.readline()) for _ in range(200 - writer.dropped)]
        assert read[:9] == list(range(9))
        assert read == sorted(read)


def test_forked_process_writes_its_own_lines_and_not_those_of_its_parent(tmp_path: Path) -> None:
    script = """
import os, sys, structlog
from octavo.service import logs
logs.configure("json", "info")
structlog.get_logger().info("parent")
child = os.fork()
if not child:
    structlog.get_logger().info("child")
    logs.flush()
    os._exit(0)
os.waitpid(child, 0)
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=60)
    assert sorted(json.loads(line)["event"] for line in done.stderr.splitlines()) == ["child", "parent"]
