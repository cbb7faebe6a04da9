from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from worker_svc.runner.host_memory import available_bytes

GIB = 2**30


def group(folder: Path, limit: int | str, usage: int, reclaimable: int = 0, version: int = 2) -> None:
    """Write the files of a control group."""
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {reclaimable}\n")


@pytest.fixture
def host_gib(monkeypatch: pytest.MonkeyPatch) -> int:
    memory = psutil.virtual_memory()._replace(available=100 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    return 100


def available(root: Path, membership: str) -> float:
    path = root.parent / "membership"
    path.write_text(membership)
    return available_bytes(root, path) / GIB


def test_available_bytes_without_control_groups_are_the_machines(tmp_path: Path, host_gib: int) -> None:
    assert available_bytes(tmp_path / "none", tmp_path / "none" / "either") == host_gib * GIB
    assert available(tmp_path / "none", "0::/\n") == host_gib


def test_available_bytes_are_what_the_containers_limit_leaves(tmp_path: Path, host_gib: int) -> None:
    root = tmp_path / "groups"
    group(root, 8 * GIB, 5 * GIB, reclaimable=2 * GIB)

    assert available(root, "0::/\n") == 5
    # The path as the host knows it, which does not exist in here.
    assert available(root, "0::/docker/0123\n") == 5


def test_available_bytes_mind_the_limits_around_the_own_group(tmp_path: Path, host_gib: int) -> None:
    root = tmp_path / "groups"
    group(root / "slice", 6 * GIB, 2 * GIB)
    group(root / "slice" / "scope", "max", GIB)

    assert available(root, "0::/slice/scope\n") == 4


def test_available_bytes_with_the_first_version_of_control_groups(tmp_path: Path, host_gib: int) -> None:
    root = tmp_path / "groups"
    group(root / "memory" / "job", 3 * GIB, 2 * GIB, reclaimable=GIB // 2, version=1)
    group(root / "memory", 2**63 - 4096, 60 * GIB, version=1)

    assert available(root, "5:cpu,cpuacct:/\n4:memory:/job\n0::/\n") == 1.5


def test_available_bytes_beyond_a_limit_are_none(tmp_path: Path, host_gib: int) -> None:
    root = tmp_path / "groups"
    group(root, GIB, 2 * GIB)

    assert available(root, "0::/\n") == 0


def test_available_bytes_of_a_host_that_is_fuller_than_the_limit_are_the_hosts(
    tmp_path: Path, host_gib: int
) -> None:
    root = tmp_path / "groups"
    group(root, 400 * GIB, GIB)

    assert available(root, "0::/\n") == host_gib
