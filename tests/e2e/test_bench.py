"""The load generator against a real scheduler."""

from __future__ import annotations

from pathlib import Path

import pytest
from octavo.bench.load import files
from octavo.bench.load.records import Outcome
from octavo.cli.main import main
from octavo.client import Client
from octavo.stack import Stack


def test_what_the_generator_records_is_what_the_scheduler_counts(
    sim_stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    with Client(sim_stack.endpoint) as client:
        before = client.status()
        words = ["--rate", "50", "--requests", "60", "--prompt-tokens", "80", "--output-tokens", "8"]
        code = main(["bench", "serve", "--endpoint", sim_stack.endpoint, *words, "--out", str(path)])
        after = client.status()

    assert code == 0
    assert after.arrivals - before.arrivals == 60
    requests = files.read(path).requests
    assert [one.outcome for one in requests] == [Outcome.OK] * 60
    # The prompts were cut to the length that the service itself counts.
    assert [one.prompt_tokens for one in requests] == [one.offered.prompt_tokens for one in requests]
    assert [one.output_tokens for one in requests] == [one.offered.output_tokens for one in requests]
    assert {one.cached_tokens for one in requests} == {0}
    assert all(one.queue_s is not None and one.ttft_s is not None for one in requests)
    assert "60: 60 answered" in capsys.readouterr().out
