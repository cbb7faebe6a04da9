"""Settings: three sources in order, unknown keys refused, faults named."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from octavo.protocol.steps import Priority
from octavo.service.settings import SettingsError

from scheduler_svc.config import SchedulerSettings
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.overload import OverloadConfig
from scheduler_svc.core.policies import POLICIES


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
    found = (settings.planning.window, settings.queue.policy, settings.planning.max_num_seqs)
    assert found == (3, "fair", 6)
    assert settings.fleet.workers == ("a:1", "dns:b:2")


def test_text_values_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_SCHEDULER_WORKERS", "a:1,b:2")
    settings = SchedulerSettings.load({"metrics_port": "none", "queue_timeout_standard_s": "none"})
    assert settings.fleet.workers == ("a:1", "b:2")
    assert settings.server.metrics_port is None
    assert settings.queue.queue_timeout_standard_s is None


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
    ("flag", "value"),
    [
        ("lookahead", 0),
        ("lookahead_age_s", 0.5),
        ("aging_stride", 2),
        ("starvation_age_s", 5.0),
        ("max_preemptions", 0),
    ],
)
def test_order_of_the_queue_is_set_from_every_source(
    flag: str, value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert getattr(SchedulerSettings.load({flag: str(value)}).core_config(), flag) == value
    file = tmp_path / "octavo.toml"
    file.write_text(f"[scheduler]\n{flag} = {value}\n")
    assert getattr(SchedulerSettings.load({"config_file": file}).core_config(), flag) == value
    monkeypatch.setenv(f"OCTAVO_SCHEDULER_{flag.upper()}", str(value))
    assert getattr(SchedulerSettings.load({}).core_config(), flag) == value


def test_each_lower_class_has_its_own_age() -> None:
    config = SchedulerSettings.load({"aging_standard_s": "3", "aging_batch_s": "7"}).core_config()
    assert (config.aging_s[Priority.STANDARD], config.aging_s[Priority.BATCH]) == (3.0, 7.0)


def test_every_plain_setting_of_the_core_is_one_of_the_scheduler() -> None:
    made_of_several = {"static", "overload", "aging_s", "tenant_weights"}
    names = {field.name for field in fields(CoreConfig)} - made_of_several
    assert names <= SchedulerSettings.section_of().keys()


def test_settings_that_are_not_given_are_those_of_the_core() -> None:
    config = SchedulerSettings.load({"overload_control": False, "max_waiting_tokens": "none"}).core_config()
    assert config == CoreConfig()


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        ({"level_blocks": "0.9,0.95,none,none"}, "blocks", (0.9, 0.95, None, None)),
        ({"level_exit_ratio": "0.5"}, "exit_ratio", 0.5),
        ({"level_rise_s": "0"}, "rise_s", 0.0),
        ({"breaker_open_s": "2"}, "open_s", 2.0),
        ({"breaker_max_open_s": "60"}, "max_open_s", 60.0),
        ({"breaker_probes": "5"}, "num_probes", 5),
    ],
)
def test_overload_control_is_set_by_flags(flags: dict[str, str], field: str, value: object) -> None:
    overload = SchedulerSettings.load(flags).core_config().overload
    assert getattr(overload, field) == value


def test_overload_control_that_is_not_set_is_that_of_the_core() -> None:
    assert SchedulerSettings.load({}).core_config().overload == OverloadConfig()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"windwo": 1}, "windwo: no such setting"),
        ({"window": 0}, "window"),
        ({"listen": "somewhere"}, "listen must be host:port"),
        ({"workers": ""}, "workers must name at least one"),
        ({"workers": "a:1,b"}, "workers must be host:port, got 'b'"),
        ({"workers": "dns:b:99999"}, "workers must be host:port"),
        ({"policy": "lifo"}, f"policy: must be one of {', '.join(POLICIES)}, got 'lifo'"),
        ({"lookahead": -1}, "lookahead"),
        ({"lookahead_age_s": -1}, "lookahead_age_s"),
        ({"aging_standard_s": -1}, "aging_standard_s"),
        ({"aging_batch_s": -1}, "aging_batch_s"),
        ({"aging_stride": 1}, "aging_stride"),
        ({"starvation_age_s": 0}, "starvation_age_s"),
        ({"max_preemptions": -1}, "max_preemptions"),
        ({"level_blocks": "0.9,0.8,none,none"}, "level_blocks: must be positive and ascending"),
        ({"level_exit_ratio": 1.0}, "level_exit_ratio"),
        ({"level_rise_s": -1}, "level_rise_s"),
        ({"breaker_open_s": 0}, "breaker_open_s"),
        ({"breaker_open_s": 60}, "breaker_max_open_s .30. < breaker_open_s .60."),
        ({"breaker_probes": 0}, "breaker_probes"),
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
