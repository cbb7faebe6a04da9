"""Benchmarks that users can run: `octavo bench NAME`.

Each is a module with `configure(parser)` and `run(arguments)`, which returns what is to be printed. It raises
BenchError when it cannot be done as asked or its results not be written, BenchInterrupted when asked to stop.
"""

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
    """A benchmark was interrupted; the message is the text of what there is."""


class BenchError(Exception):
    """Why a benchmark cannot be done, in one line; `partial` is the text of what there is all the same."""

    def __init__(self, message: str, *, partial: str = "") -> None:
        super().__init__(message)
        self.partial = partial


def claim_folder(folder: Path) -> None:
    """Make a folder for results, before there are any to lose; BenchError: nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"{folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BenchError(f"{folder}: nothing can be written there")


def claim_file(path: Path) -> None:
    """See, or raise BenchError, that a file for results can be written; what it holds stays."""
    claim_folder(path.parent)
    if path.is_dir():
        raise BenchError(f"{path} is a folder")
    if path.exists() and not os.access(path, os.W_OK):
        raise BenchError(f"{path} cannot be written")
