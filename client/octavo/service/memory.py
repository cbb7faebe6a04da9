"""How much memory a service has, and the ceiling at which it takes no more work before the system ends it."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from octavo.service.control_groups import MEMBERSHIP, ROOT, groups

DEFAULT_SHARE: Final = 0.8
"""Of what the process may have at most: the rest is for the work that was taken before."""
RETRY_S: Final = 1.0
"""When to try again what was refused for memory."""
_STATM: Final = Path("/proc/self/statm")
_LIMITS: Final = (("", "memory.max"), ("memory", "memory.limit_in_bytes"))
"""Controller and file of each version of control groups."""
# Of glibc's mallopt().
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_ARENA_MAX: Final = -8
_LARGE_BYTES: Final = 1 << 20
# Reading it takes some 10 us, which a request need not pay each time.
_READ_EVERY_S: Final = 0.05


def limit_bytes(root: Path = ROOT, membership: Path = MEMBERSHIP) -> int | None:
    """Return the least limit of the control groups of this process, None without one."""
    limits = (
        number_in(folder / name)
        for controller, name in _LIMITS
        for folder in groups(controller, root, membership)
    )
    return min((limit for limit in limits if limit is not None), default=None)


def number_in(path: Path) -> int | None:
    """Return the number that a file holds; None for no such file and for no limit (`max`)."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def rss_bytes() -> int:
    """Return the resident memory of this process; where only its peak is known, that; 0 where nothing is."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        pass
    if sys.platform == "win32":
        return 0
    import resource  # noqa: PLC0415 - not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def default_ceiling_bytes() -> int:
    """Return `DEFAULT_SHARE` of the container's limit, or of the machine's memory where that is less."""
    if sys.platform == "win32":
        return sys.maxsize
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(DEFAULT_SHARE * min(machine, limit_bytes() or machine))


def return_what_is_freed() -> None:
    """Have the C library give the memory of large messages back to the system; call it before threads start.

    Left to itself, glibc keeps a heap for each thread of gRPC, each as large as the largest message that has
    ever been in it, and after the first such message takes the next ones from the heap, too. That is faster
    for who computes.
    """
    # musl has no such function, and keeps no such heaps.
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_ARENA_MAX, 1)
        mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_TRIM_THRESHOLD, 2 * _LARGE_BYTES)


class MemoryCeiling:
    """Tells when new work has to be refused for want of memory."""

    def __init__(
        self,
        max_rss_bytes: int | None,
        read: Callable[[], int] = rss_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_rss_bytes`: None is `default_ceiling_bytes`."""
        self.max_rss_bytes = default_ceiling_bytes() if max_rss_bytes is None else max_rss_bytes
        self._read = read
        self._clock = clock
        self._full = False
        self._read_at = -_READ_EVERY_S

    def is_reached(self) -> bool:
        """Return whether the process has as much memory as it may; known anew every 50 ms."""
        now = self._clock()
        if now - self._read_at >= _READ_EVERY_S:
            self._read_at = now
            self._full = self._read() >= self.max_rss_bytes
        return self._full
