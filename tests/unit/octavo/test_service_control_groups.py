"""How much processor time control groups leave."""

from __future__ import annotations

from pathlib import Path

import pytest
from octavo.service.control_groups import cpu_quota


def quota(root: Path, membership: str) -> float | None:
    path = root / "membership"
    path.write_text(membership)
    return cpu_quota(root, path)


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", None), ("150000 100000", 1.5), ("garbage", None), ("", None)]
)
def test_quota_of_the_second_version(tmp_path: Path, text: str, cores: float | None) -> None:
    (tmp_path / "cpu.max").write_text(text)

    assert quota(tmp_path, "0::/docker/0123\n") == cores


def test_quota_minds_the_groups_around(tmp_path: Path) -> None:
    inner = tmp_path / "slice" / "scope"
    inner.mkdir(parents=True)
    (inner / "cpu.max").write_text("400000 100000")
    (tmp_path / "slice" / "cpu.max").write_text("200000 100000")

    assert quota(tmp_path, "0::/slice/scope\n") == 2


@pytest.mark.parametrize(("text", "cores"), [("-1", None), ("50000", 0.5)])
def test_quota_of_the_first_version(tmp_path: Path, text: str, cores: float | None) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(text)
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")

    assert quota(tmp_path, "5:cpu,cpuacct:/\n") == cores


def test_quota_without_control_groups_is_none(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path, tmp_path / "none") is None
