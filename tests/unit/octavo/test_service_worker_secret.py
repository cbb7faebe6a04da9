"""Secrets of workers and files that change: what is accepted, what is in force, and what the log says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from octavo.service.followed import Followed
from octavo.service.private import write_private
from octavo.service.worker_secret import WorkerSecret
from structlog.testing import capture_logs

OLD, NEW = "the-old-secret-of-all", "the-new-secret-of-all"


def secret_file(path: Path, *lines: str) -> Path:
    write_private(path, "\n".join(lines))
    return path


def age(path: Path) -> None:
    """Make a file old enough to be believed unchanged."""
    os.utime(path, (1_000_000, 1_000_000))


def test_first_line_is_presented_and_each_is_accepted(tmp_path: Path) -> None:
    secret = WorkerSecret(secret_file(tmp_path / "s", NEW, "", OLD))
    assert secret.metadata() == (("authorization", f"Bearer {NEW}"),)
    assert [secret.accepts(one) for one in (OLD, NEW, "", None, NEW + "x", "ü" * 20)] == [True, True] + [
        False
    ] * 4


@pytest.mark.parametrize("content", ["", "\n\n", "short", "two words of a secret", "ü" * 20])
def test_what_is_no_secret_is_refused_and_not_repeated(content: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="secret") as caught:
        WorkerSecret(secret_file(tmp_path / "s", content))
    assert not content.strip() or content not in str(caught.value)


def test_file_is_followed_and_a_broken_one_leaves_the_last_in_force(tmp_path: Path) -> None:
    path = secret_file(tmp_path / "s", OLD)
    secret = WorkerSecret(path)
    with capture_logs() as logs:
        secret_file(path, NEW)
        assert (secret.accepts(OLD), secret.accepts(NEW)) == (False, True)
        secret_file(path, "")
        assert secret.accepts(NEW)
        path.unlink()
        assert secret.accepts(NEW)
        assert secret.accepts(NEW)
    assert [line["event"] for line in logs] == ["files_changed", "files_broken", "files_broken"]
    assert OLD not in str(logs)
    assert NEW not in str(logs)


def test_unchanged_files_are_not_read_again(tmp_path: Path) -> None:
    path = secret_file(tmp_path / "s", OLD)
    age(path)
    built: list[tuple[bytes, ...]] = []
    followed = Followed([path], lambda contents: built.append(contents) or len(built))
    assert followed.get() == followed.get() == 1
    os.utime(path)
    assert followed.get() == 1
    path.write_text(NEW)
    assert followed.get() == 2


def test_secret_that_others_can_read_is_warned_about(tmp_path: Path) -> None:
    path = secret_file(tmp_path / "s", OLD)
    with capture_logs() as logs:
        WorkerSecret(path)
        path.chmod(0o644)
        WorkerSecret(path)
    assert [line["event"] for line in logs] == ["secret_readable_by_others"]


@pytest.mark.parametrize(("mode", "warned"), [(0o440, False), (0o444, True)])
def test_secret_that_kubernetes_gives_to_the_group_is_not_warned_about(
    mode: int, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = secret_file(tmp_path / "s", OLD)
    path.chmod(mode)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with capture_logs() as logs:
        WorkerSecret(path)
    assert bool(logs) is warned
