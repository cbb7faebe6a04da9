"""The control groups of this process, which limit what a container may use of a machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path("/sys/fs/cgroup")
"""Where they are mounted."""
MEMBERSHIP: Final = Path("/proc/self/cgroup")
"""Names the groups of this process."""


def groups(controller: str, root: Path = ROOT, membership: Path = MEMBERSHIP) -> Iterator[Path]:
    """Yield the folders of the group that this process is in and of those around it, which limit it, too.

    Args:
        controller: as /proc/self/cgroup names it in version 1; empty for all controllers of version 2.
        root: see `ROOT`.
        membership: see `MEMBERSHIP`.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    paths = dict(entry for line in lines for entry in _controllers(line))
    if controller not in paths:
        return
    top = root / controller
    # A container may see its own group as the top, under whatever path the host knows it by.
    group = top / paths[controller].lstrip("/")
    yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(top))


def cpu_quota(root: Path = ROOT, membership: Path = MEMBERSHIP) -> float | None:
    """Return how many cores' time this process may use, None without a limit."""
    second = (_quota_of(folder / "cpu.max") for folder in groups("", root, membership))
    first = (
        _quota_of(folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us")
        for folder in groups("cpu", root, membership)
    )
    return min((quota for quota in (*second, *first) if quota is not None), default=None)


def _quota_of(*files: Path) -> float | None:
    """Return time over period of files that hold both, None for no limit (`max`, or -1)."""
    try:
        quota, period = " ".join(file.read_text() for file in files).split()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):
        return None


def _controllers(line: str) -> Iterator[tuple[str, str]]:
    """Yield each controller that a line names, with the path of its group."""
    _, _, rest = line.partition(":")
    names, _, path = rest.partition(":")
    yield from ((name, path) for name in names.split(","))
