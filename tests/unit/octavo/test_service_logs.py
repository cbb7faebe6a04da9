"""Logs never hold what a client sent, not even when something goes wrong while it is in hand."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

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
    written = capsys.readouterr().err
    assert "ValueError" in written
    assert "secret" not in written


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("auto", "info")
    structlog.get_logger().info("request", outcome="STOP")
    structlog.get_logger().debug("not shown")
    logging.getLogger("a library").warning("something")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["event"] for line in lines] == ["request", "something"]
    assert lines[0]["outcome"] == "STOP"
