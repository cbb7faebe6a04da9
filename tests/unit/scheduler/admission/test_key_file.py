from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest
import structlog
from octavo.keys import KeyFile, KeyFileError

from scheduler_svc.admission.key_file import KeyFileWatch
from scheduler_svc.observe.metrics import SchedulerMetrics


class Desk:
    """A key file that is followed, and what came of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = SchedulerMetrics()
        self.loaded: list[list[str]] = []
        self.watch = KeyFileWatch(path, self.metrics, self._take)

    def _take(self, file: KeyFile) -> None:
        self.loaded.append(sorted(file.tenants))

    @property
    def broken(self) -> float:
        return self.metrics.key_file_broken._value.get()


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    path = tmp_path / "keys.toml"
    path.write_text("[tenants.a]\n")
    return Desk(path)


async def test_file_is_taken_in_again_only_when_it_has_changed(desk: Desk) -> None:
    desk.watch.load()
    await desk.watch.poll()
    desk.path.touch()
    await desk.watch.poll()
    assert desk.loaded == [["a"]]
    desk.path.write_text("[tenants.b]\n")
    await desk.watch.poll()
    assert desk.loaded == [["a"], ["b"]]


async def test_change_within_one_tick_of_the_clock_is_seen(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_svc.admission.key_file.time.time", lambda: desk.path.stat().st_mtime)
    desk.watch.load()
    await desk.watch.poll()
    before = desk.path.stat()
    desk.path.write_text("[tenants.z]\n")
    os.utime(desk.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    await desk.watch.poll()
    assert desk.loaded == [["a"], ["z"]]


async def test_file_replaced_as_kubernetes_does_is_followed(desk: Desk, tmp_path: Path) -> None:
    old, new = tmp_path / "v1", tmp_path / "v2"
    for folder, tenant in ((old, "a"), (new, "b")):
        folder.mkdir()
        (folder / "keys.toml").write_text(f"[tenants.{tenant}]\n")
        long_ago = time.time() - 1000
        os.utime(folder / "keys.toml", (long_ago, long_ago))
    link = tmp_path / "data"
    link.symlink_to(old)
    desk.watch = KeyFileWatch(link / "keys.toml", desk.metrics, desk._take)
    desk.watch.load()
    await desk.watch.poll()
    (tmp_path / "next").symlink_to(new)
    (tmp_path / "next").rename(link)
    await desk.watch.poll()
    assert desk.loaded == [["a"], ["b"]]


@pytest.mark.parametrize(
    "content",
    [
        b"[tenants",
        b"\xff",
        b"[tenants.a]\nweight = 0\n",
        b"[tenants.a]\nweight = 1" + b"0" * 400,
        b"[tenants.a]\nweight = " + b"1" * 5000,
        b"[tenants.a]\nweight = " + b"[" * 9000,
        None,
    ],
)
async def test_broken_file_leaves_the_last_one_in_force_and_is_said_once_and_loudly(
    desk: Desk, content: bytes | None
) -> None:
    desk.watch.load()
    with structlog.testing.capture_logs() as logs:
        if content is None:
            desk.path.unlink()
        else:
            desk.path.write_bytes(content)
        for _ in range(3):
            await desk.watch.poll()
    (line,) = logs
    assert (line["event"], line["log_level"]) == ("key_file_broken", "error")
    assert line["problem"] == desk.watch.problem
    assert desk.loaded == [["a"]]
    assert desk.broken == 1
    desk.path.write_text("[tenants.a]\n")
    await desk.watch.poll()
    assert desk.watch.problem is None
    assert desk.broken == 0


async def test_file_that_cannot_be_opened_for_a_moment_is_good_again_with_the_same_content(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    desk.watch.load()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        await desk.watch.poll()
    assert desk.watch.problem == os.strerror(errno.EACCES)
    assert desk.broken == 1
    await desk.watch.poll()
    assert desk.watch.problem is None
    assert desk.broken == 0


async def test_bug_while_a_file_is_taken_in_is_told_and_the_file_tried_again(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.watch.load()
    desk.path.write_text("[tenants.b]\n")
    with monkeypatch.context() as patch:
        patch.setattr("scheduler_svc.admission.key_file._parse", lambda _: {}["x"])
        await desk.watch.poll()
    assert desk.watch.problem == "KeyError: 'x'"
    assert desk.broken == 1
    await desk.watch.poll()
    assert desk.loaded == [["a"], ["b"]]
    assert desk.watch.problem is None


@pytest.mark.parametrize("content", ["[tenants", None])
def test_file_that_is_broken_at_the_start_is_refused(desk: Desk, content: str | None) -> None:
    if content is None:
        desk.path.unlink()
    else:
        desk.path.write_text(content)
    with pytest.raises(KeyFileError):
        desk.watch.load()
