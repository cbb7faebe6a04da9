"""What files hold, read again when they change: secrets and certificates are replaced under way."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

import structlog

_log = structlog.get_logger()
_T = TypeVar("_T")

# Two changes within one tick of the file system's clock look like one.
_SETTLED_S: Final = 3.0
_GROUP: Final = 0o040
_WORLD: Final = 0o004


class Followed(Generic[_T]):
    """Reads files when asked for what they hold, if they have changed since.

    What cannot be used, as between the writing of a certificate and that of its key, changes nothing: the
    last good content stays in force, and the log says so.
    """

    def __init__(
        self, paths: Sequence[Path], build: Callable[[tuple[bytes, ...]], _T], *, secret: Path | None = None
    ) -> None:
        """Read for the first time; raises OSError, and what `build` raises.

        Args:
            paths: of the files.
            build: makes of their contents what is asked for; raises OSError or ValueError.
            secret: the one of them of which a warning is logged when others can read it.
        """
        self._paths = tuple(paths)
        self._build = build
        self._signature = signature_of(self._paths)
        self._contents = self._read()
        self._value = build(self._contents)
        self._problem = ""
        if secret is not None:
            warn_if_exposed(secret)

    def get(self) -> _T:
        """Return what the files hold; any thread may ask."""
        try:
            signature = signature_of(self._paths)
            if signature is None or signature != self._signature:
                contents = self._read()
                if contents != self._contents:
                    self._value = self._build(contents)
                    self._contents = contents
                    _log.info("files_changed", files=[str(path) for path in self._paths])
                self._signature, self._problem = signature, ""
        except (OSError, ValueError) as error:
            self._complain(str(error))
        return self._value

    def _read(self) -> tuple[bytes, ...]:
        return tuple(path.read_bytes() for path in self._paths)

    def _complain(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            _log.error(
                "files_broken",
                files=[str(path) for path in self._paths],
                problem=problem,
                in_force="the last content that was right",
            )


def signature_of(paths: Sequence[Path]) -> tuple[tuple[int, ...], ...] | None:
    """Return what changes with files, None when they changed so lately that it may not; raises OSError."""
    found = [path.stat() for path in paths]
    if any(time.time() - status.st_mtime < _SETTLED_S for status in found):
        return None
    return tuple((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns) for status in found)


def warn_if_exposed(path: Path) -> None:
    """Log a warning when others than its owner can read a file that holds a secret.

    What root owns and a group is given, as Kubernetes mounts secrets, is meant for who runs in that group.
    """
    status = path.stat()
    is_given = status.st_uid != os.geteuid() and status.st_gid in {os.getegid(), *os.getgroups()}
    if status.st_mode & (_WORLD if is_given else _WORLD | _GROUP):
        _log.warning("secret_readable_by_others", file=str(path), remedy=f"chmod 600 {path}")
