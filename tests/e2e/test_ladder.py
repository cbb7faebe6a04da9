"""The ladder on real processes over the simulated runner: whole, interrupted, and gone on with."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

LADDER = (
    *(sys.executable, "-m", "octavo.cli.main", "bench", "ladder"),
    *("--preset", "quick", "--rungs", "overload", "--repeats", "2", "--budget", "30s"),
    *("--model", "sim", "--runner", "sim"),
    # How far the queue grows within a window depends on the machine.
    "--scheduler-arg=--max-waiting-requests=100000",
)
pytestmark = pytest.mark.slow


def trace(folder: Path) -> Path:
    """Make a trace like the public one, which is not at hand everywhere."""
    folder.mkdir()
    rng = random.Random(1)
    rows = [
        f"2023-11-16 18:{i // 600 % 60:02d}:{i // 10 % 60:02d}.{i % 10}000000,"
        f"{rng.randint(200, 2400)},{rng.randint(40, 400)}\n"
        for i in range(5000)
    ]
    (folder / "azure_llm_2023_conv.csv").write_text(
        "".join(["TIMESTAMP,ContextTokens,GeneratedTokens\n", *rows])
    )
    return folder


def resume(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LADDER[:5], "--resume", str(folder)], capture_output=True, text=True, timeout=240, check=False
    )


def report_of(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return record


def test_ladder_that_is_interrupted_has_a_partial_report_and_goes_on_where_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "ladder"
    with subprocess.Popen(
        [*LADDER, "--traces", str(trace(tmp_path / "traces")), "--out", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            give_up_at = time.monotonic() + 240
            while not list(folder.glob("cells/*.json")):
                assert process.poll() is None, process.stdout.read() if process.stdout else ""
                assert time.monotonic() < give_up_at
                time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate(timeout=60)
        finally:
            process.kill()

    assert process.returncode == 130
    assert f"--resume {folder}" in said
    first = report_of(folder)
    assert first["partial"]
    assert len(first["figures"]) == 1
    assert "Partial" in (folder / "report.md").read_text()
    done = {path.name: path.stat().st_mtime_ns for path in folder.glob("cells/*.json")}

    ended = resume(folder)

    assert ended.returncode == 0, ended.stderr
    whole = report_of(folder)
    assert not whole["partial"]
    assert {one["arm"] for one in whole["figures"]} == {"static", "continuous-chunked"}
    assert len(list(folder.glob("cells/*.json"))) == 4
    # What had been measured was not measured again.
    assert all((folder / "cells" / name).stat().st_mtime_ns == at for name, at in done.items())
    assert len(whole["environments"]) == 2

    # The simulated model is the same for both, so what differs is how it is fed.
    comparison = whole["comparison"]
    assert comparison["throughput_ratio"]["value"] > 1.5
    # How full the pool gets depends on what blocks the head of the queue; the control gets nowhere near.
    assert comparison["kv_use_paged"] > 2 * comparison["kv_use_static"] > 0
    subject = next(one for one in whole["figures"] if one["arm"] == "continuous-chunked")
    # Above capacity a short window's requests may all still wait behind the backlog when the cell ends.
    assert set(subject["outcomes"]) <= {"ok", "abandoned"}
    assert sum(subject["outcomes"].values()) == subject["requests"] > 0
    for cell in folder.glob("cells/*.continuous-chunked.json"):
        everything = json.loads(cell.read_text())["run"]["requests"]
        assert sum(one["outcome"] == "ok" for one in everything) > 100
    page = (folder / "report.html").read_text()
    assert page.count("<svg") >= 3


def test_ladder_in_a_folder_that_has_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    ended = subprocess.run(
        [*LADDER, "--out", str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2
    assert "--resume" in ended.stderr


def test_ladder_that_cannot_start_says_why(tmp_path: Path) -> None:
    ended = subprocess.run(
        [*LADDER, "--worker-arg=--num-blocks=1", "--out", str(tmp_path / "ladder")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 2
    assert "max_model_len" in ended.stderr
