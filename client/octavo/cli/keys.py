"""`octavo keys`: add, list, revoke and rotate API keys in a key file, whose other lines stay as they are."""

from __future__ import annotations

import argparse
import re
import secrets
import tomllib
from pathlib import Path
from typing import Final

from octavo.cli import output
from octavo.keys import Key, KeyFile, KeyFileError, Role, check_name, hash_of, new_key
from octavo.service.private import write_private

_TABLE: Final = re.compile(r"(?m)^(?=[ \t]*\[)")
_FORMER: Final = ".old"
"""Behind the id of a key that a rotation left in force."""


def configure(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the command's arguments."""
    del name
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    add = actions.add_parser("add", help="make a key and print it: it is shown this once")
    add.add_argument("--tenant", required=True, metavar="NAME", help="whose it is; made if it is new")
    add.add_argument("--id", metavar="ID", help="names the key in logs (default: the tenant's name)")
    add.add_argument(
        "--role",
        action="append",
        choices=[role.value for role in Role],
        help="what it allows; may be repeated (default: inference)",
    )
    shown = actions.add_parser("list", help="show ids, tenants and roles")
    revoke = actions.add_parser("revoke", help="take a key out of force")
    rotate = actions.add_parser(
        "rotate", help=f"make a key for an id and print it; the former one stays in force as ID{_FORMER}"
    )
    rotate.add_argument("--at-once", action="store_true", help="take the former one out of force")
    shown.add_argument("--json", action="store_true", help="print as JSON")
    for action in (add, shown, revoke, rotate):
        action.add_argument("file", type=Path, metavar="FILE", help="key file (docs/tenants.md)")
    for action in (revoke, rotate):
        action.add_argument("id", metavar="ID", help="of the key")


def run(arguments: argparse.Namespace) -> int:
    """Do it and return the exit code."""
    path: Path = arguments.file
    try:
        is_new = arguments.action == "add" and not path.exists()
        text = "" if is_new else path.read_text(encoding="utf-8")
        found = KeyFile.parse(text)
        if arguments.action == "list":
            _list(found, as_json=arguments.json)
            return 0
        changed, key = _change(arguments, text, found)
        # What comes out is what a scheduler will read.
        KeyFile.parse(changed)
        write_private(path, changed)
    except KeyFileError as error:
        output.fail(f"{path}: {error}")
        return 1
    except (OSError, UnicodeDecodeError) as error:
        output.fail(f"{path}: {error.strerror if isinstance(error, OSError) else 'it is not UTF-8'}")
        return 1
    if key is not None:
        print(key)
    return 0


def _change(arguments: argparse.Namespace, text: str, found: KeyFile) -> tuple[str, str | None]:
    """Return the new content of the file, and the key that was made, if one was.

    Raises:
        KeyFileError: it cannot be done.
    """
    if arguments.action == "add":
        name = arguments.id or arguments.tenant
        for one in (name, arguments.tenant):
            check_name(one)
        if any(one.id == name for one in found.keys):
            raise KeyFileError(f"there is a key {name}: name another --id, or `octavo keys rotate` it")
        if arguments.tenant not in found.tenants:
            text = f'{text.rstrip()}\n\n[tenants."{arguments.tenant}"]\n'
        return _with_key(text, found, name, arguments.tenant, arguments.role or [Role.INFERENCE])
    old = next((one for one in found.keys if one.id == arguments.id), None)
    if old is None:
        raise KeyFileError(f"no key has the id {arguments.id}")
    if arguments.action == "revoke":
        return _without(text, old.id), None
    text = _without(text, f"{old.id}{_FORMER}")
    text = _without(text, old.id) if arguments.at_once else _renamed(text, old)
    return _with_key(text, found, old.id, old.tenant.name, sorted(old.roles))


def _with_key(text: str, found: KeyFile, name: str, tenant: str, roles: list[str]) -> tuple[str, str]:
    """Return the content with an entry for a new key, and that key."""
    key, salt = new_key(), found.salt
    if salt is None:
        salt = secrets.token_bytes(16)
        text = f'salt = "{salt.hex()}"\n\n{text.lstrip()}'
    shown = ", ".join(f'"{role}"' for role in roles)
    entry = (
        f'[[keys]]\nid = "{name}"\nhash = "{hash_of(key, salt)}"\ntenant = "{tenant}"\nroles = [{shown}]\n'
    )
    return f"{text.rstrip()}\n\n{entry}", key


def _blocks(text: str) -> list[str]:
    """Return what stands before the first table, and then each table."""
    return _TABLE.split(text)


def _id_of(block: str) -> str | None:
    """Return the id of a block that is an entry of a key."""
    if not block.lstrip().startswith("[[keys]]"):
        return None
    try:
        return str(tomllib.loads(block)["keys"][0].get("id"))
    except tomllib.TOMLDecodeError:
        raise KeyFileError("it is written in a way that only its author can edit") from None


def _without(text: str, name: str) -> str:
    return "".join(block for block in _blocks(text) if _id_of(block) != name)


def _renamed(text: str, old: Key) -> str:
    line = re.compile(rf'(?m)^(\s*id\s*=\s*["\']){re.escape(old.id)}(?=["\'])')
    return "".join(
        line.sub(rf"\g<1>{old.id}{_FORMER}", block) if _id_of(block) == old.id else block
        for block in _blocks(text)
    )


def _list(found: KeyFile, *, as_json: bool) -> None:
    if as_json:
        rows = [{"id": one.id, "tenant": one.tenant.name, "roles": sorted(one.roles)} for one in found.keys]
        print(output.to_json(rows))
        return
    table = [(one.id, one.tenant.name, ", ".join(sorted(one.roles))) for one in found.keys]
    print(output.table(("key", "tenant", "roles"), table))
