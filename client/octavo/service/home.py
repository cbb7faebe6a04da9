"""A home for processes whose user has none, as containers run them: any uid must do."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def ensure_home() -> str | None:
    """Set HOME to a temporary folder where there is no home that can be written to; return what was done.

    It stands in for all that libraries keep in a home, this process's children included. The same user
    gets the same folder again, so that a model that was downloaded there is found.
    """
    try:
        home = Path.home()
    except RuntimeError:  # HOME is not set, and the user is not in passwd.
        home = None
    if home is not None and os.access(home, os.W_OK | os.X_OK):
        return None
    folder = _own_folder(Path(tempfile.gettempdir()) / f"octavo-{os.getuid()}")
    os.environ["HOME"] = str(folder)
    os.environ.setdefault("LOGNAME", f"uid-{os.getuid()}")  # Libraries ask for a name to build paths of.
    missing = "there is no home folder" if home is None else f"nothing can be written to {home}"
    return (
        f"{missing}: caches and logs go to {folder}, unless XDG_CACHE_HOME and XDG_STATE_HOME say otherwise"
    )


def _own_folder(folder: Path) -> Path:
    """Return the folder if it is ours alone, else a new one: what others made is not to be trusted."""
    folder.mkdir(mode=0o700, exist_ok=True)
    state = folder.lstat()
    if folder.is_symlink() or state.st_uid != os.getuid() or state.st_mode & 0o077:
        return Path(tempfile.mkdtemp(prefix=f"octavo-{os.getuid()}-"))
    return folder
