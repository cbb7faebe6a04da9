"""`octavo keys`: what becomes of a key file, and what is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from octavo.cli.main import main
from octavo.keys import KeyFile, Role, hash_of, new_key

ONCE = new_key()
WRITTEN = f"""\
# Ours.
[tenants.acme]
weight = 2.0  # twice the others

[[keys]]  # of the app
id = "app"
hash = "{hash_of(ONCE)}"
tenant = "acme"
roles = ["user"]

[[keys]]
id = "ops"
hash = "{hash_of(new_key())}"
tenant = "acme"
roles = ["operator"]
"""


def keys(*arguments: object) -> int:
    return main(["keys", *map(str, arguments)])


def read(path: Path) -> KeyFile:
    return KeyFile.parse(path.read_text())


def test_key_is_added_to_a_new_file_that_is_private_and_salted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.toml"
    assert keys("add", path, "--tenant", "acme") == 0
    key = capsys.readouterr().out.strip()
    found = read(path).find(key)
    assert found is not None
    assert (found.id, found.tenant.name, found.roles) == ("acme", "acme", {Role.INFERENCE})
    assert path.stat().st_mode & 0o777 == 0o600
    assert key not in path.read_text()
    assert hash_of(key) not in path.read_text()
    assert (
        keys("add", path, "--tenant", "acme", "--id", "boss", "--role", "operator", "--role", "metrics") == 0
    )
    boss = read(path).find(capsys.readouterr().out.strip())
    assert boss is not None
    assert boss.roles == {Role.OPERATOR, Role.METRICS}


def test_key_file_stays_readable_for_the_scheduler_whose_group_it_was_given(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(WRITTEN)
    path.chmod(0o640)
    group = os.getgid() if os.getuid() else 12345
    os.chown(path, -1, group)

    assert keys("revoke", path, "app") == 0
    status = path.stat()
    assert (status.st_mode & 0o777, status.st_gid) == (0o640, group)
    assert [file.name for file in tmp_path.iterdir()] == ["keys.toml"]


def test_what_was_written_by_hand_stays_and_its_keys_stay_good(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(WRITTEN)
    assert keys("add", path, "--tenant", "other") == 0
    text = path.read_text()
    assert text.startswith("salt = ")
    assert WRITTEN.rstrip() in text
    assert read(path).find(ONCE) is not None
    assert read(path).find(capsys.readouterr().out.strip()) is not None


def test_revoked_key_is_gone_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(WRITTEN)
    assert keys("revoke", path, "app") == 0
    assert read(path).find(ONCE) is None
    assert [one.id for one in read(path).keys] == ["ops"]
    assert "weight = 2.0  # twice the others" in path.read_text()


def test_rotation_leaves_the_former_key_in_force_until_it_is_revoked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(WRITTEN)
    assert keys("rotate", path, "app") == 0
    second = capsys.readouterr().out.strip()
    former, now = read(path).find(ONCE), read(path).find(second)
    assert former is not None
    assert now is not None
    assert (former.id, now.id, now.roles) == ("app.old", "app", {Role.INFERENCE})
    assert keys("rotate", path, "app") == 0
    third = capsys.readouterr().out.strip()
    assert [read(path).find(key) is not None for key in (ONCE, second, third)] == [False, True, True]
    assert keys("rotate", path, "app", "--at-once") == 0
    fourth = capsys.readouterr().out.strip()
    assert [read(path).find(key) is not None for key in (second, third, fourth)] == [False, False, True]


def test_list_shows_no_hash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(WRITTEN)
    assert keys("list", path) == 0
    assert keys("list", path, "--json") == 0
    told = capsys.readouterr().out
    assert "app" in told
    assert "operator" in told
    assert hash_of(ONCE)[-20:] not in told


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("add", "FILE", "--tenant", "acme", "--id", "app"), "there is a key app"),
        (("add", "FILE", "--tenant", "a b"), "'a b' is no name"),
        (("revoke", "FILE", "nobody"), "no key has the id nobody"),
        (("rotate", "FILE", "nobody"), "no key has the id nobody"),
        (("list", "GONE"), "No such file"),
    ],
)
def test_what_cannot_be_done_is_said_and_changes_nothing(
    arguments: tuple[str, ...], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(WRITTEN)
    names = {"FILE": path, "GONE": tmp_path / "gone"}
    assert keys(*(names.get(one, one) for one in arguments)) == 1
    assert problem in capsys.readouterr().err
    assert path.read_text() == WRITTEN
