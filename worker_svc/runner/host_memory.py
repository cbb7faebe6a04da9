"""How much of the host's memory this process may still take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil


@dataclass(frozen=True, slots=True)
class _Version:
    """Where a version of control groups keeps what concerns memory."""

    controller: str
    """As /proc/self/cgroup names it, and the folder of its hierarchy."""
    limit: str
    usage: str
    reclaimable: str
    """In memory.stat: cached files that are given up before anything is refused."""


_VERSIONS: Final = (
    _Version("", "memory.max", "memory.current", "inactive_file"),
    _Version("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_bytes(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Return what the machine has available, or what a container's limit leaves where that is less.

    Args:
        root: where the control groups are mounted.
        membership: names the groups of this process.
    """
    return min([psutil.virtual_memory().available, *_left(root, membership)])


def _left(root: Path, membership: Path) -> Iterator[int]:
    """Yield what each limit on this process leaves; those of the groups around its own count, too."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    paths = dict(entry for line in lines for entry in _controllers(line))
    for version in _VERSIONS:
        if version.controller not in paths:
            continue
        top = root / version.controller
        # A container may see its own group as the top, under whatever path the host knows it by.
        group = top / paths[version.controller].lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(top) and (left := _left_by(folder, version)) is not None:
                yield left


def _controllers(line: str) -> Iterator[tuple[str, str]]:
    """Yield each controller that a line names, with the path of its group."""
    _, _, rest = line.partition(":")
    names, _, path = rest.partition(":")
    yield from ((name, path) for name in names.split(","))


def _left_by(folder: Path, version: _Version) -> int | None:
    try:
        limit = int((folder / version.limit).read_text())
        usage = int((folder / version.usage).read_text())
        stat = dict(line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines())
        reclaimable = int(stat.get(version.reclaimable, 0))
    except (OSError, ValueError):  # no such group here, or no limit ("max")
        return None
    return max(0, limit - max(0, usage - reclaimable))
