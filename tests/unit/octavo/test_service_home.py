"""A user without a home, as containers have them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

NOBODY = 48_713
"""A uid that is in no passwd."""
# The interpreter may lie where only root can read: everything is loaded before it becomes another user.
SCRIPT = f"""
import os, pwd, tempfile
from octavo.service.home import ensure_home
os.setgroups([]), os.setgid({NOBODY}), os.setuid({NOBODY})
print(ensure_home())
print(os.environ.get("HOME"))
"""


def ensured(folder: Path, **env: str) -> tuple[str, Path]:
    """Return what is told, and the home that is set."""
    keep = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    told = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**keep, "TMPDIR": str(folder), **env},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    message, home = told.stdout.splitlines()
    return message, Path(home)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder for the temporary files of anybody."""
    if os.getuid() != 0:
        pytest.skip("only root may become another user")
    shared = Path(tempfile.mkdtemp())
    shared.chmod(0o1777)
    yield shared
    shutil.rmtree(shared)


@pytest.mark.parametrize("home", [{}, {"HOME": "/"}, {"HOME": "/does/not/exist"}])
def test_any_uid_without_a_home_gets_a_private_folder_and_is_told(folder: Path, home: dict[str, str]) -> None:
    for _ in range(2):  # The second process finds what the first has kept there.
        message, chosen = ensured(folder, **home)

        assert chosen == folder / f"octavo-{NOBODY}"
        assert f"caches and logs go to {chosen}" in message
        assert (chosen.stat().st_uid, chosen.stat().st_mode & 0o777) == (NOBODY, 0o700)


def test_folder_that_another_user_has_made_is_not_trusted(folder: Path) -> None:
    (folder / f"octavo-{NOBODY}").mkdir(mode=0o777)

    _, chosen = ensured(folder)

    assert chosen.name.startswith(f"octavo-{NOBODY}-")
    assert chosen.stat().st_uid == NOBODY


def test_home_that_can_be_written_to_is_used_without_a_word(folder: Path) -> None:
    assert ensured(folder, HOME=str(folder)) == ("None", folder)
