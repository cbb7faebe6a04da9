"""API keys and the key file: who may use a scheduler, as whom, and how much of it.

The file holds hashes, never keys. A key is random, so one pass of SHA-256 is as good as a slow hash; the salt
is one of the whole file, so that a lookup costs the same whoever asks, and however many keys there are.
docs/tenants.md describes the format.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Final

KEY_PREFIX: Final = "octavo_"
_KEY: Final = re.compile(rf"{KEY_PREFIX}[A-Za-z0-9_-]{{43}}")
_KEY_BYTES: Final = 32
_HASH: Final = re.compile(r"(sha256|hmac-sha256):([0-9a-f]{64})")
"""Without the salt of the file, as all were once, and with it."""
_SALT: Final = re.compile(r"([0-9a-f]{2}){16,64}")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MAX_QUOTA: Final = 2**32 - 1


class Role(StrEnum):
    """What a key allows."""

    INFERENCE = "inference"
    """Requests in the name of its tenant."""
    OPERATOR = "operator"
    """The service `octavo.v1.Operations`, channelz, and the metrics."""
    METRICS = "metrics"
    """The status, and the metrics."""
    FORWARD = "forward"
    """Calls whose requests carry keys of their own, as a gateway makes them; nothing else."""


_FORMER_NAMES: Final = {"user": Role.INFERENCE}


class KeyFileError(Exception):
    """The key file cannot be used; the message names each fault, one a line, and no key or hash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """Most that a tenant may have at once, or start in a minute. None is without limit."""

    requests_in_flight: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Prompt and output tokens together."""
    waiting_requests: int | None = None
    """Requests without output yet."""
    waiting_tokens: int | None = None
    """Prompt tokens of those."""
    tokenizer_bytes_per_minute: int | None = None
    """Input for tokenizers: prompts, and what is to be tokenized or detokenized."""


QUOTAS: Final = tuple(one.name for one in fields(Quotas))


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose work it is: what quotas, fair shares, cached prefixes and accounts go by."""

    name: str
    weight: float = 1.0
    """Share under the policy `fair`, relative to other tenants."""
    quotas: Quotas = Quotas()


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a tenant, by its hash."""

    id: str
    """Names it where people look: in the file, and in logs."""
    digest: bytes = field(repr=False)
    tenant: Tenant
    roles: frozenset[Role]

    def has(self, role: Role) -> bool:
        """Return whether it allows what a role does: who may change things may look at them."""
        return role in self.roles or (role is Role.METRICS and Role.OPERATOR in self.roles)


class KeyFile:
    """The keys and tenants of a file."""

    def __init__(
        self, tenants: Mapping[str, Tenant], keys: tuple[Key, ...], salt: bytes | None = None
    ) -> None:
        self.tenants = tenants
        self.keys = keys
        self.salt = salt
        self._by_digest = {key.digest: key for key in keys}

    @classmethod
    def parse(cls, text: str) -> KeyFile:
        """Return what a file says.

        Raises:
            KeyFileError: it is not what docs/tenants.md describes.
        """
        try:
            content = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise KeyFileError(f"it is not TOML: {error}") from None
        except (ValueError, RecursionError) as error:
            # An integer of thousands of digits, or tables in tables without end.
            raise KeyFileError(f"it cannot be read: {error}") from None
        return _Reader(content).read()

    def find(self, key: str) -> Key | None:
        """Return the entry of a key as a client presents it, or None."""
        if not is_key(key):
            return None
        for digest in (digest_of(key, self.salt), digest_of(key)):
            found = self._by_digest.get(digest)
            # The dictionary compares too, but not in constant time.
            if found is not None and hmac.compare_digest(found.digest, digest):
                return found
        return None


def check_name(name: str) -> None:
    """Raise KeyFileError for what cannot name a tenant or a key."""
    if _NAME.fullmatch(name) is None:
        raise KeyFileError(f"{name!r} is no name: it has letters, digits, '.', '_' and '-', 64 at most")


def new_key() -> str:
    """Return a new key: a prefix by which scanners for leaked secrets find it, and 256 random bits."""
    return KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def is_key(key: str) -> bool:
    """Return whether it has the form of a key; no other is in any file."""
    return _KEY.fullmatch(key) is not None


def may_be_key(key: str) -> bool:
    """Return whether it has the form of a key, or of a token that a scheduler may take for one."""
    return is_key(key) or key.count(".") == 2


def digest_of(key: str, salt: bytes | None = None) -> bytes:
    """Return the SHA-256 of a key, with a salt its HMAC."""
    if salt is None:
        return hashlib.sha256(key.encode()).digest()
    return hmac.digest(salt, key.encode(), "sha256")


def hash_of(key: str, salt: bytes | None = None) -> str:
    """Return what a key file with this salt holds of a key."""
    return f"{'sha256' if salt is None else 'hmac-sha256'}:{digest_of(key, salt).hex()}"


class _Reader:
    """Turns the tables of a file into records, and collects all that is wrong with them."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content
        self._problems: list[str] = []

    def read(self) -> KeyFile:
        self._refuse_unknown("", self._content, ("salt", "tenants", "keys"))
        salt = self._salt()
        tables = self._content.get("tenants", {})
        if not isinstance(tables, dict):
            raise KeyFileError("tenants must be tables: [tenants.NAME]")
        tenants = {name: self._tenant(name, table) for name, table in tables.items()}
        entries = self._content.get("keys", [])
        if not isinstance(entries, list):
            raise KeyFileError("keys must be an array of tables: [[keys]]")
        keys = [self._key(index, entry, tenants) for index, entry in enumerate(entries)]
        found = tuple(key for key in keys if key is not None)
        self._refuse_twins(found)
        if self._problems:
            raise KeyFileError("\n".join(self._problems))
        return KeyFile(tenants, found, salt)

    def _salt(self) -> bytes | None:
        given = self._content.get("salt")
        if given is None:
            return None
        if not isinstance(given, str) or _SALT.fullmatch(given) is None:
            self._problem("salt", "must be 16 to 64 bytes in hexadecimal")
            return b""
        return bytes.fromhex(given)

    def _tenant(self, name: str, table: Any) -> Tenant:
        where = f"tenants.{name}"
        if _NAME.fullmatch(name) is None:
            self._problem(where, "a name has letters, digits, '.', '_' and '-', 64 at most")
        if not isinstance(table, dict):
            self._problem(where, "must be a table")
            return Tenant(name)
        self._refuse_unknown(where, table, ("weight", *QUOTAS))
        weight = table.get("weight", 1.0)
        if not _is_number(weight) or not 0 < weight <= sys.float_info.max:
            self._problem(f"{where}.weight", f"must be a positive number, got {_shown(weight)}")
            weight = 1.0
        quotas: dict[str, int] = {}
        for quota in QUOTAS:
            value = table.get(quota)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_QUOTA:
                self._problem(f"{where}.{quota}", f"must be a whole number from 1, got {_shown(value)}")
            else:
                quotas[quota] = value
        return Tenant(name, float(weight), Quotas(**quotas))

    def _key(self, index: int, entry: Any, tenants: Mapping[str, Tenant]) -> Key | None:
        where = f"keys[{index}]"
        if not isinstance(entry, dict):
            self._problem(where, "must be a table")
            return None
        name = entry.get("id")
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            self._problem(f"{where}.id", "must be set: letters, digits, '.', '_' and '-', 64 at most")
            return None
        where = f"keys[{index}] ({name})"
        self._refuse_unknown(where, entry, ("id", "hash", "tenant", "roles"))
        match = _HASH.fullmatch(entry["hash"]) if isinstance(entry.get("hash"), str) else None
        if match is None:
            self._problem(f"{where}.hash", "must be 'sha256:' or 'hmac-sha256:', and 64 hexadecimal digits")
        elif match[1] != "sha256" and "salt" not in self._content:
            self._problem(f"{where}.hash", "was made with a salt, and the file has none")
        tenant = tenants.get(entry["tenant"]) if isinstance(entry.get("tenant"), str) else None
        if tenant is None:
            got = _shown(entry.get("tenant"))
            self._problem(f"{where}.tenant", f"must name a table [tenants.NAME], got {got}")
        roles = self._roles(where, entry.get("roles", [Role.INFERENCE.value]))
        if match is None or tenant is None:
            return None
        return Key(name, bytes.fromhex(match[2]), tenant, roles)

    def _roles(self, where: str, value: Any) -> frozenset[Role]:
        known = {role.value: role for role in Role} | _FORMER_NAMES
        if not isinstance(value, list) or not value or any(role not in list(known) for role in value):
            self._problem(f"{where}.roles", f"must be a list of {', '.join(Role)}")
            return frozenset()
        return frozenset(known[role] for role in value)

    def _refuse_twins(self, keys: tuple[Key, ...]) -> None:
        ids: set[str] = set()
        digests: dict[bytes, str] = {}
        for key in keys:
            if key.id in ids:
                self._problem("keys", f"two have the id {key.id}")
            if key.digest in digests:
                self._problem("keys", f"{digests[key.digest]} and {key.id} have the same hash")
            ids.add(key.id)
            digests[key.digest] = key.id

    def _refuse_unknown(self, where: str, table: Mapping[str, Any], known: tuple[str, ...]) -> None:
        for name in table:
            if name not in known:
                dotted = f"{where}.{name}" if where else name
                self._problem(dotted, f"no such setting; there is {', '.join(known)}")

    def _problem(self, where: str, what: str) -> None:
        # Where a key stands by mistake, it is not repeated.
        self._problems.append(_KEY.sub(f"{KEY_PREFIX}...", f"{where}: {what}"))


def _shown(value: object) -> str:
    """Return a value for a message; Python shows no integer of thousands of digits."""
    try:
        return repr(value)
    except (ValueError, RecursionError):
        return "what is too large to show"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
