"""`octavo batch` against real processes: more requests than the queue holds, and an interruption."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from octavo.stack import Stack

NUM_REQUESTS = 700
"""More than the queue bound of 500: a batch is paced, never refused."""


def _write_requests(path: Path) -> None:
    with path.open("w") as file:
        for index in range(NUM_REQUESTS):
            body = {
                "prompt": f"count to {index} " * (1 + index % 3),
                "max_tokens": 4 + index % 5,
                "seed": index,
            }
            file.write(json.dumps({"id": f"q{index}", **body}) + "\n")
        file.write(json.dumps({"id": "bad", "prompt": "x", "temperature": -1}) + "\n")
        file.write(json.dumps({"id": "unknown", "prompt": "x", "temprature": 1}) + "\n")


def _command(stack: Stack, folder: Path) -> list[str]:
    files = [str(folder / "in.jsonl"), str(folder / "out.jsonl")]
    return [sys.executable, "-m", "octavo.cli.main", "batch", *files, "--endpoint", stack.endpoint]


def test_batch_interrupted_goes_on_and_does_each_line_once(sim_stack: Stack, tmp_path: Path) -> None:
    _write_requests(tmp_path / "in.jsonl")
    out = tmp_path / "out.jsonl"
    first = subprocess.Popen(_command(sim_stack, tmp_path), stderr=subprocess.PIPE, text=True)
    assert first.stderr is not None
    for line in first.stderr:
        if "tokens per second" in line:
            break
    first.send_signal(signal.SIGINT)
    _, said = first.communicate(timeout=60)
    assert first.returncode == 130, said
    assert "goes on with the rest" in said
    done_first = out.read_bytes().count(b"\n")
    assert done_first < NUM_REQUESTS

    second = subprocess.run(
        _command(sim_stack, tmp_path), capture_output=True, text=True, timeout=120, check=False
    )
    assert second.returncode == 1, second.stderr
    assert "2 failed" in second.stderr
    outcomes = [json.loads(line) for line in out.read_text().splitlines()]
    results = [one["id"] for one in outcomes if "error" not in one]
    assert sorted(results) == sorted(f"q{index}" for index in range(NUM_REQUESTS))
    errors = {one["id"]: one["error"] for one in outcomes if "error" in one}
    assert "temperature" in errors["bad"]["message"]
    assert "temprature" in errors["unknown"]["message"]
