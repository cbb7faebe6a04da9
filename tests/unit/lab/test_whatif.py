"""`octavo bench whatif` says what a tenant, or a policy, has cost a request."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from octavo.sampling import SamplingParams
from octavo.steptimes import StepTimes
from octavo_lab import whatif
from octavo_lab.command import BenchError
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


def ask(log: Path, *flags: str) -> str:
    parser = argparse.ArgumentParser()
    whatif.configure(parser)
    return whatif.run(parser.parse_args(["slow", "--plan-log", str(log), *flags]))


@pytest.mark.parametrize("flags", [("--without-tenant", "flood"), ("--policy", "fair")])
def test_request_behind_a_flood_would_have_begun_at_once(log: Path, flags: tuple[str, str]) -> None:
    times = json.loads(ask(log, *flags, "--json"))

    assert times["simulated"]["queue_s"] == pytest.approx(times["then"]["queue_s"], rel=0.1)
    assert times["changed"]["queue_s"] < 0.1 * times["then"]["queue_s"]
    assert times["sooner_s"] == times["simulated"]["queue_s"] - times["changed"]["queue_s"]


def test_what_if_says_it_in_a_sentence(log: Path) -> None:
    said = ask(log, "--without-tenant", "flood").splitlines()[-1]

    assert said.startswith("without flood it would have begun")
    assert said.endswith("sooner")


@pytest.mark.parametrize(
    ("flags", "problem"),
    [(("--without-tenant", "mine"), "to be left out"), (("--plan-log", "nowhere.log"), "nowhere.log")],
)
def test_what_if_that_cannot_be_told_says_why(log: Path, flags: tuple[str, str], problem: str) -> None:
    with pytest.raises(BenchError, match=problem):
        ask(log, *flags)
