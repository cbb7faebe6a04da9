"""Benchmarks that users can run: `octavo bench NAME`."""

import argparse
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Flag = tuple[str, Callable[[str], Any], Any, str, str]
"""Flag, type, default, metavar, help."""


def add_flags(parser: argparse._ActionsContainer, flags: Iterable[Flag]) -> None:
    """Add flags that take a value; the help tells each default that there is."""
    for flag, kind, default, metavar, told in flags:
        shown = told if default in (None, "") else f"{told} (default: %(default)s)"
        parser.add_argument(flag, type=kind, default=default, metavar=metavar, help=shown)


class BenchInterrupted(Exception):
    """A benchmark was interrupted; `partial` is the text of what there is."""

    def __init__(self, partial: str) -> None:
        super().__init__(partial)
        self.partial = partial


class BenchError(Exception):
    """A benchmark cannot be run as asked, or its results not be written; the message is one line.

    `partial` is the text of what there is all the same.
    """

    def __init__(self, message: str, *, partial: str = "") -> None:
        super().__init__(message)
        self.partial = partial


def claim_folder(folder: Path) -> None:
    """Make a folder for results, before there are any to lose.

    Raises:
        BenchError: nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"{folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BenchError(f"{folder}: nothing can be written there")


def claim_file(path: Path) -> None:
    """See that a file for results can be written, before there are any to lose; what it holds stays.

    Raises:
        BenchError: it cannot.
    """
    claim_folder(path.parent)
    if path.is_dir():
        raise BenchError(f"{path} is a folder")
    if path.exists() and not os.access(path, os.W_OK):
        raise BenchError(f"{path} cannot be written")
