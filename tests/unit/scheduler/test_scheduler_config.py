"""Settings: three sources in order, unknown keys refused, faults named."""

from __future__ import annotations

from pathlib import Path

import pytest
from octavo.service.settings import SettingsError

from scheduler_svc.config import SchedulerSettings


def test_flags_win_over_the_environment_and_that_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "octavo.toml"
    path.write_text(
        '[scheduler]\nwindow = 3\npolicy = "edf"\nworkers = ["a:1", "dns:b:2"]\n[worker]\nx = 1\n'
    )
    monkeypatch.setenv("OCTAVO_SCHEDULER_CONFIG_FILE", str(path))
    monkeypatch.setenv("OCTAVO_SCHEDULER_POLICY", "fair")
    monkeypatch.setenv("OCTAVO_SCHEDULER_MAX_NUM_SEQS", "5")
    settings = SchedulerSettings.load({"max_num_seqs": "6"})
    assert (settings.window, settings.policy, settings.max_num_seqs) == (3, "fair", 6)
    assert settings.workers == ("a:1", "dns:b:2")


def test_text_values_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_SCHEDULER_WORKERS", "a:1,b:2")
    settings = SchedulerSettings.load({"metrics_port": "none", "queue_timeout_standard_s": "none"})
    assert settings.workers == ("a:1", "b:2")
    assert settings.metrics_port is None
    assert settings.queue_timeout_standard_s is None


def test_core_gets_the_static_arm_only_when_asked() -> None:
    assert SchedulerSettings.load({}).core_config().static is None
    static = SchedulerSettings.load({"batching": "static", "static_buckets": "64,256"}).core_config().static
    assert static is not None
    assert static.bucket_bounds == (64, 256)
    assert static.hold_finished
    free = SchedulerSettings.load({"batching": "static", "static_hold_finished": False}).core_config().static
    assert free is not None
    assert not free.hold_finished


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"windwo": 1}, "windwo: no such setting"),
        ({"window": 0}, "window"),
        ({"listen": "somewhere"}, "listen must be host:port"),
        ({"workers": ""}, "workers must name at least one"),
        ({"workers": "a:1,b"}, "workers must be host:port, got 'b'"),
        ({"workers": "dns:b:99999"}, "workers must be host:port"),
        ({"policy": "lifo"}, "policy"),
        ({"config_file": "/nowhere/octavo.toml"}, "/nowhere/octavo.toml: No such file"),
    ],
)
def test_wrong_setting_is_named(flags: dict[str, object], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        SchedulerSettings.load(flags)


def test_unknown_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_SCHEDULER_WINDWO", "1")
    with pytest.raises(SettingsError, match="OCTAVO_SCHEDULER_WINDWO"):
        SchedulerSettings.load({})


def test_every_setting_says_what_it_is() -> None:
    assert all(field.description for field in SchedulerSettings.model_fields.values())
