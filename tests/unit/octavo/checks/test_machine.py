"""What is told of a machine, for surroundings of all kinds."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from octavo.checks import machine
from octavo.checks.finding import Finding, Mark


def only(findings: object) -> Finding:
    (finding,) = findings  # type: ignore[misc]
    assert isinstance(finding, Finding)
    assert bool(finding.advice) == (finding.mark is not Mark.FINE)
    return finding


def test_versions_name_octavo_and_what_it_stands_on() -> None:
    found = only(machine.versions())

    assert found.mark is Mark.FINE
    for name in ("Octavo ", "Python ", "grpcio ", "protobuf "):
        assert name in found.found
    assert "none" not in found.found


def test_versions_that_do_not_fit_together_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "generated.py").write_text("raise RuntimeError('the grpc package\\nis too old')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = only(machine.versions("generated"))

    assert found.mark is Mark.FAILED
    assert "the grpc package is too old" in found.found


@pytest.mark.parametrize(
    ("lacking", "mark", "said"),
    [
        ({}, Mark.FINE, "installed: scheduler, worker, gateway, vllm, bench"),
        ({"vllm": ["vllm"], "bench": ["octavo-lab"]}, Mark.FINE, "not installed: vllm, bench"),
        ({"gateway": ["fastapi"]}, Mark.WARNING, "no HTTP gateway"),
        ({"worker": ["torch", "numpy"]}, Mark.FAILED, "without numpy, torch"),
    ],
)
def test_parts_that_a_demo_stack_needs_must_be_here(
    lacking: dict[str, list[str]], mark: Mark, said: str
) -> None:
    found = only(machine.parts(lambda extra: lacking.get(extra, [])))

    assert found.mark is mark
    assert said in found.found
    if mark is not Mark.FINE:
        assert f"'octavo[{next(iter(lacking))}]'" in found.advice


def test_parts_are_read_from_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["grpcio>=1", "octavo[service]; extra == 'worker'", 'numpy>=1; extra == "worker"']
    wanted += ["surely-not-here>=1; sys_platform != 'win32' and extra == 'service'"]
    monkeypatch.setattr(machine.metadata, "requires", lambda name: wanted)
    found = only(machine.parts())

    assert found.mark is Mark.FAILED
    assert "without surely-not-here" in found.found


@pytest.mark.parametrize(
    ("soft", "mark"),
    [
        (64, Mark.FAILED),
        (1023, Mark.WARNING),
        (1024, Mark.FINE),
        (1_048_576, Mark.FINE),
        (resource.RLIM_INFINITY, Mark.FINE),
    ],
)
def test_descriptors_are_told_by_what_they_allow(soft: int, mark: Mark) -> None:
    assert only(machine.descriptors(soft)).mark is mark


def test_home_that_cannot_hold_logs_fails(tmp_path: Path) -> None:
    (tmp_path / "file").touch()  # Nobody, not even root, can make a folder in it.

    assert only(machine.home(Path("/home/me"), tmp_path / "file" / "state")).mark is Mark.FAILED
    assert only(machine.home(Path("/home/me"), tmp_path / "a" / "b")).mark is Mark.FINE


def test_home_that_stands_in_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine.tempfile, "gettempdir", lambda: str(tmp_path))
    found = only(machine.home(tmp_path / "octavo-1000", tmp_path))

    assert found.mark is Mark.WARNING
    assert "HOME" in found.advice


@pytest.mark.parametrize(
    ("wall", "monotonic", "mark", "said"),
    [
        ((1_000.0, 1_000.2), (5.0, 5.2), Mark.FINE, "1970-01-01 00:16:40 UTC"),
        ((1_000.0, 1_003.2), (5.0, 5.2), Mark.WARNING, "jumped by +3.00 s"),
        ((1_000.0, 999.0), (5.0, 5.2), Mark.WARNING, "jumped by -1.20 s"),
        ((10.0, 10.2), (5.0, 5.2), Mark.WARNING, "before Octavo was installed"),
    ],
)
def test_clock_is_told_by_its_time_and_its_pace(
    wall: tuple[float, ...], monotonic: tuple[float, ...], mark: Mark, said: str
) -> None:
    walls, monotonics = iter(wall), iter(monotonic)
    found = only(
        machine.clock(lambda: next(walls), lambda: next(monotonics), lambda seconds: None, installed_at=500.0)
    )

    assert found.mark is mark
    assert said in found.found


def test_clock_here_is_fine_or_says_why_not() -> None:
    assert only(machine.clock()).found
