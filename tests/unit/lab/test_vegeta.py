"""Targets for vegeta are in its format, and ask for what they were told to."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from octavo.cli.main import main
from octavo.gateway.schemas import ChatRequest, CompletionRequest


def targets(capsys: pytest.CaptureFixture[str], *flags: str) -> list[tuple[Any, Any]]:
    assert main(["bench", "vegeta-targets", "--model", "demo", *flags]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [(line, json.loads(base64.b64decode(line["body"]))) for line in lines]


def test_targets_are_requests_that_the_gateway_takes(capsys: pytest.CaptureFixture[str]) -> None:
    found = targets(capsys, "--count", "3", "--words", "5", "--header", "x-octavo-priority: batch")

    assert len(found) == 3
    for target, body in found:
        assert target["method"] == "POST"
        assert target["url"] == "http://127.0.0.1:8000/v1/completions"
        assert target["header"] == {"Content-Type": ["application/json"], "x-octavo-priority": ["batch"]}
        request = CompletionRequest.model_validate(body)
        assert len(str(request.prompt).split()) == 5
    assert found[0][1] != found[1][1]
    assert found == targets(capsys, "--count", "3", "--words", "5", "--header", "x-octavo-priority: batch")


def test_targets_take_prompts_from_a_file_in_turn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text("one\ntwo\n")
    found = targets(
        capsys, "--count", "3", "--prompts", str(path), "--chat", "--stream", "--url", "http://h:1/"
    )

    requests = [ChatRequest.model_validate(body) for _, body in found]
    assert [request.messages[0].text for request in requests] == ["one", "two", "one"]
    assert all(request.stream for request in requests)
    assert found[0][0]["url"] == "http://h:1/v1/chat/completions"


def test_targets_without_a_prompt_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text("\n")
    assert main(["bench", "vegeta-targets", "--model", "m", "--prompts", str(path)]) == 2
    assert "no prompt" in capsys.readouterr().err
