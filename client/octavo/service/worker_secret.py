"""The secret that schedulers share with their workers: whoever has it may command a worker."""

from __future__ import annotations

import hmac
from pathlib import Path
from typing import Final

from octavo.service.followed import Followed

LEAST: Final = 16
"""Characters of a secret."""
_KEY: Final = "authorization"


class WorkerSecret:
    """The secrets of a file, one a line. The first is presented, each is accepted: so it can be replaced."""

    def __init__(self, path: Path) -> None:
        """Raises OSError or ValueError when the file cannot be used."""
        self._lines = Followed([path], _parse, secret=path)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return what goes with a call to a worker."""
        return ((_KEY, f"Bearer {self._lines.get()[0]}"),)

    def accepts(self, presented: str | None) -> bool:
        """Return whether it is one of the secrets; takes as long for any that is not."""
        given = (presented or "").encode()
        return sum(hmac.compare_digest(line.encode(), given) for line in self._lines.get()) > 0


def _parse(contents: tuple[bytes, ...]) -> tuple[str, ...]:
    lines = tuple(line.strip() for line in contents[0].decode().splitlines() if line.strip())
    for line in lines:
        if len(line) < LEAST or not line.isascii() or not line.isprintable() or " " in line:
            raise ValueError(f"a secret is one line of {LEAST} printable characters or more")
    if not lines:
        raise ValueError("the file holds no secret")
    return lines
