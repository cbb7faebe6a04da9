"""The step times of the worker without a model: those of a file, or the builtin ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker_svc.config import WorkerSettings
from worker_svc.errors import InvalidSettings
from worker_svc.start.load import load_runner


def load(profile: Path) -> None:
    settings = WorkerSettings.load({"model": "sim", "runner": "sim", "sim_profile": str(profile)})
    load_runner(settings, lambda what, done: None)


def test_profile_of_the_simulator_is_read(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    names = "base prefill_base per_decode per_context_token per_prefill_token per_prefill_token_squared"
    values = ", ".join(f'"{name}": 1.0' for name in names.split())
    profile.write_text(f'{{"format": "octavo-step-times/1", "coefficients_ms": {{{values}}}}}')
    load(profile)


def test_profile_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text("[]")
    with pytest.raises(InvalidSettings, match=r"sim_profile .*profile\.json: not a file of step times"):
        load(profile)
    with pytest.raises(InvalidSettings, match="No such file"):
        load(tmp_path / "none.json")
