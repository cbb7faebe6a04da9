"""The load generator against a real scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from octavo.cli.main import main
from octavo.client import Client
from octavo.stack import Stack, StackConfig
from octavo_lab.load import files
from octavo_lab.load.records import Outcome


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


@pytest.fixture(scope="module")
def gateway_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    config = StackConfig(
        model="sim",
        worker_args=("--runner", "sim"),
        # On a slow machine some of the load would be refused otherwise, or wait for too long.
        scheduler_args=("--no-overload-control", "--queue-timeout-interactive-s=none"),
        gateway_port=0,
        folder=tmp_path_factory.mktemp("gateway-stack"),
    )
    with Stack(config) as stack:
        stack.wait_ready(120)
        yield stack


@pytest.mark.parametrize("target", ["completions", "chat"])
def test_the_same_traffic_goes_through_the_gateway(gateway_stack: Stack, tmp_path: Path, target: str) -> None:
    assert gateway_stack.gateway is not None
    words = ["--rate", "50", "--requests", "20", "--prompt-tokens", "60", "--output-tokens", "6"]
    runs = {}
    for kind, endpoint in (
        ("octavo", gateway_stack.endpoint),
        (target, f"http://{gateway_stack.gateway.address}"),
    ):
        path = tmp_path / f"{kind}.json"
        command = ["bench", "serve", "--target", kind, "--endpoint", endpoint, *words, "--seed", "3"]
        assert main([*command, "--option", "priority=interactive", "--out", str(path)]) == 0
        runs[kind] = files.read(path)

    ours, theirs = runs["octavo"].requests, runs[target].requests
    assert [one.outcome for one in theirs] == [Outcome.OK] * 20
    # The gateway's /tokenize cut the prompts as the scheduler's own call did.
    assert [one.offered for one in theirs] == [one.offered for one in ours]
    assert [one.output_tokens for one in theirs] == [one.output_tokens for one in ours]
    if target == "completions":
        assert [one.prompt_tokens for one in theirs] == [one.prompt_tokens for one in ours]
    assert runs[target].target.kind == f"openai-{target}"
