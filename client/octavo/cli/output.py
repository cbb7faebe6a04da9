"""What all commands share in how they print."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Self, TextIO

from octavo.errors import OctavoError

EXIT_INTERRUPTED: Final = 130
"""Ended by Ctrl-C, as shells say it."""

_CODES: Final = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_BAR_CELLS: Final = 24


def paint(text: str, colour: str, stream: TextIO | None = None) -> str:
    """Return the text in a colour, or as it is where nobody would see one."""
    stream = sys.stdout if stream is None else stream
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{_CODES[colour]}m{text}\x1b[0m"


def fail(message: str) -> None:
    """Print an error, on one line, to stderr."""
    flat = " ".join(message.split())
    print(f"{paint('octavo: error:', 'red', sys.stderr)} {flat}", file=sys.stderr)


def describe(error: OctavoError) -> str:
    """Return the one line about an error that a person reads."""
    retry = "" if error.retry_after_s is None else f" (try again in {error.retry_after_s:.1f} s)"
    return f"{error.message}{retry} [{error.reason}]"


def note(message: str) -> None:
    """Print something by the way, to stderr."""
    print(paint(message, "dim", sys.stderr), file=sys.stderr)


def table(header: Sequence[str], rows: Sequence[Sequence[object]], right: Sequence[int] = ()) -> str:
    """Return rows under a header, in columns; those in `right` are set to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]

    def line(row: Sequence[str]) -> str:
        set_cells = (
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(set_cells).rstrip()

    return "\n".join([paint(line(header), "bold"), *map(line, cells)])


def to_json(record: object) -> str:
    """Return a record as JSON, enums by name; escaped where stdout cannot show all characters."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return json.dumps(_plain(record), indent=2, ensure_ascii=not encoding.lower().startswith("utf"))


def _plain(value: object) -> Any:
    if isinstance(value, enum.Enum):
        return value.name.lower()
    if isinstance(value, bytes):  # The text of a token, perhaps a part of a character.
        return value.decode(errors="replace")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


class ProgressLine:
    """Shows how far something is: a bar on a terminal, elsewhere a line for each new thing."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._what = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._terminal and self._what:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def __call__(self, what: str, fraction: float) -> None:
        """Show that `what` is done to `fraction`."""
        if self._terminal:
            filled = round(fraction * _BAR_CELLS)
            bar = "█" * filled + "░" * (_BAR_CELLS - filled)
            sys.stderr.write(f"\r\x1b[K{bar} {fraction:4.0%}  {what}")
            sys.stderr.flush()
        elif what != self._what:
            note(what)
        self._what = what


def duration(seconds: float) -> str:
    """Return a time span as people say it."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
