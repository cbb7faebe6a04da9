"""Files that only their owner may read: secrets, and what tells of requests."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

FOLDER_MODE: Final = 0o700
_FILE_MODE: Final = 0o600


def private(path: str, flags: int) -> int:
    """Open a file that, where it is new, nobody else may read; for `open(..., opener=private)`."""
    return os.open(path, flags, _FILE_MODE)


def write_private(path: Path, content: str | bytes) -> None:
    """Replace a file in one go: it is for whom the former was for, or if there was none its owner alone."""
    former = path.stat() if path.exists() else None
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    data = content.encode() if isinstance(content, str) else content
    with open(fresh, "xb", opener=private) as file:
        if former is not None:
            with suppress(PermissionError):
                os.fchown(file.fileno(), former.st_uid, former.st_gid)
                os.fchmod(file.fileno(), former.st_mode & 0o777)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
