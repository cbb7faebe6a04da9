"""`octavo chaos` in its short form: what is done to a stack costs its clients a pause and nothing else."""

from __future__ import annotations

import pytest
from octavo_lab.chaos.run import ChaosSettings, attack

pytestmark = pytest.mark.slow


def test_a_stack_under_attack_answers_as_if_nothing_had_happened() -> None:
    found = attack(ChaosSettings(seconds=30.0, every_s=1.2, streams=16, seed=1))
    assert found.findings == []
    assert {reply.client for reply in found.answers} >= {"sdk", "raw"}


def test_only_poison_fails() -> None:
    kinds = ("kill-worker", "slow-step", "step-error")
    found = attack(ChaosSettings(seconds=20.0, every_s=4.0, streams=12, kinds=kinds, poison_s=6.0))
    assert found.findings == []
    assert found.settings["poisons"]


def test_everything_is_restarted_under_load_and_nobody_fails() -> None:
    found = attack(ChaosSettings(rolling=True, every_s=1.0, streams=12))
    assert found.findings == []
    assert [one.target for one in found.done] == [
        "worker-0",
        "worker-1",
        "scheduler-0",
        "scheduler-1",
        "gateway-0",
    ]
