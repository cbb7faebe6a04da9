"""How much of the host's memory this process may still take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
from octavo.service.control_groups import MEMBERSHIP, ROOT, groups
from octavo.service.memory import number_in


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


def available_bytes(root: Path = ROOT, membership: Path = MEMBERSHIP) -> int:
    """Return what the machine has available, or what a container's limit leaves where that is less.

    Args:
        root: where the control groups are mounted.
        membership: names the groups of this process.
    """
    left = (
        _left_by(folder, version)
        for version in _VERSIONS
        for folder in groups(version.controller, root, membership)
    )
    return min([psutil.virtual_memory().available, *(one for one in left if one is not None)])


def _left_by(folder: Path, version: _Version) -> int | None:
    limit, usage = number_in(folder / version.limit), number_in(folder / version.usage)
    if limit is None or usage is None:
        return None
    try:
        stat = dict(line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines())
        reclaimable = int(stat.get(version.reclaimable, 0))
    except (OSError, ValueError):
        return None
    return max(0, limit - max(0, usage - reclaimable))
