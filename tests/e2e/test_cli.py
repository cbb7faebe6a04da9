"""Commands against real services."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from octavo.cli.demo import ANSWER, QUESTION
from octavo.cli.main import main
from octavo.stack import Stack, StackConfig

Capture = pytest.CaptureFixture[str]


def test_health_serving_exits_0_for_scheduler_and_worker(sim_stack: Stack, capsys: Capture) -> None:
    assert main(["health", sim_stack.endpoint]) == 0
    assert main(["health", sim_stack.workers[0].address]) == 0

    assert capsys.readouterr().out == "serving\nserving\n"


def test_health_nobody_there_exits_3(capsys: Capture) -> None:
    assert main(["health", "127.0.0.1:1", "--timeout", "1"]) == 3

    assert capsys.readouterr().err == "octavo: error: 127.0.0.1:1 cannot be reached\n"


def test_generate_seeded_prints_the_same_text_twice(sim_stack: Stack, capsys: Capture) -> None:
    command = ["generate", "hello", "--max-tokens", "20", "--seed", "5", "--endpoint", sim_stack.endpoint]
    assert main(command) == 0
    first = capsys.readouterr().out
    assert main(command) == 0

    assert capsys.readouterr().out == first
    assert len(first) > 1


def test_embed_prints_a_vector_of_length_1_for_each_text(sim_stack: Stack, capsys: Capture) -> None:
    assert main(["embed", "one", "two", "--pooling", "mean", "--endpoint", sim_stack.endpoint]) == 0

    vectors = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(vectors) == 2
    assert vectors[0] != vectors[1]
    assert [math.hypot(*vector) for vector in vectors] == pytest.approx([1.0, 1.0], abs=1e-6)


def test_status_json_accounts_for_every_request(sim_stack: Stack, capsys: Capture) -> None:
    main(["generate", "hello", "--max-tokens", "2", "--endpoint", sim_stack.endpoint])
    capsys.readouterr()
    assert main(["status", "--json", "--endpoint", sim_stack.endpoint]) == 0

    status = json.loads(capsys.readouterr().out)
    assert status["arrivals"] == sum(status["outcomes"].values()) + status["live_requests"]
    assert status["workers"][0]["state"] == "ready"


def test_status_shows_the_worker_as_a_table(sim_stack: Stack, capsys: Capture) -> None:
    assert main(["status", "--endpoint", sim_stack.endpoint]) == 0

    shown = capsys.readouterr().out
    assert sim_stack.workers[0].address in shown
    assert "level 0 (normal)" in shown


def test_generate_interrupted_exits_130_and_prints_nothing_more(sim_stack: Stack) -> None:
    command = ["generate", "hello", "--max-tokens", "5000", "--endpoint", sim_stack.endpoint]
    with subprocess.Popen(
        [sys.executable, "-m", "octavo.cli.main", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)

        assert process.wait(30) == 130
        assert process.stderr.read() == b""


@pytest.mark.model
def test_chat_of_one_message_prints_the_answer_of_the_demo_model(tmp_path: Path, capsys: Capture) -> None:
    with Stack(StackConfig(folder=tmp_path)) as stack:
        stack.wait_ready()
        question = ["--message", QUESTION, "--temperature", "0", "--max-tokens", "24"]
        assert main(["chat", *question, "--endpoint", stack.endpoint]) == 0

    assert ANSWER in capsys.readouterr().out
