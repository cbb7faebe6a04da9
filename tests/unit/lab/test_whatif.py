"""`octavo whatif` says what a tenant, or a policy, has cost a request."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from octavo.sampling import SamplingParams
from octavo.steptimes import StepTimes
from octavo_lab import whatif
from octavo_lab.sim import SimCell, SimWorkerConfig

from scheduler_svc.core import CoreConfig, NewRequest
from scheduler_svc.planlog import PlanLogWriter, RecordingCore


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Sixty requests of a flood, and then one of somebody else."""
    path = tmp_path / "plan.log"
    core = RecordingCore(CoreConfig(), PlanLogWriter(path))
    cell = SimCell(core, [SimWorkerConfig(worker_id="w0", step_times=StepTimes.builtin(), max_num_seqs=4)])
    for index in range(61):
        flood = index < 60
        spec = NewRequest(
            request_id=f"flood-{index}#{index}" if flood else "slow#60",
            model="sim",
            prompt_token_ids=tuple(range(index * 100, index * 100 + 40)),
            sampling=SamplingParams(n=1, seed=index, max_tokens=60 if flood else 20, ignore_eos=True),
            tenant="flood" if flood else "mine",
        )
        cell.submit_at(1.0 if flood else 1.1, spec)
    cell.loop.run(until=60.0)
    core.close()
    return path


def ask(log: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str]:
    parser = argparse.ArgumentParser()
    whatif.configure(parser, "whatif")
    code = whatif.run(parser.parse_args(["slow", "--plan-log", str(log), *flags]))
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.mark.parametrize("flags", [("--without-tenant", "flood"), ("--policy", "fair")])
def test_request_behind_a_flood_would_have_begun_at_once(
    log: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, str]
) -> None:
    code, said = ask(log, capsys, *flags, "--json")
    times = json.loads(said)

    assert code == 0
    assert times["simulated"]["queue_s"] == pytest.approx(times["then"]["queue_s"], rel=0.1)
    assert times["changed"]["queue_s"] < 0.1 * times["then"]["queue_s"]
    assert times["sooner_s"] == times["simulated"]["queue_s"] - times["changed"]["queue_s"]


def test_what_if_says_it_in_a_sentence(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = ask(log, capsys, "--without-tenant", "flood")

    assert code == 0
    assert "without flood it would have begun" in said.splitlines()[-1]
    assert said.splitlines()[-1].endswith("sooner")


def test_what_if_without_the_tenant_itself_is_an_error(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = ask(log, capsys, "--without-tenant", "mine")

    assert code == 2
    assert "is of a tenant that is to be left out" in said
