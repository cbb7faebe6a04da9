"""Entry of the command `octavo`: finds the command, runs it, turns errors into one line and a code."""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Final, Protocol, cast

# Before gRPC is loaded: what it has to say is told as an error, in one line.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from octavo.cli import output
from octavo.errors import (
    AccessDeniedError,
    DeadlineExceededError,
    InvalidRequestError,
    OctavoError,
    OverloadedError,
    UnavailableError,
)
from octavo.service.home import ensure_home

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

# Name -> module and what it does. The modules are loaded one at a time: some need an extra.
COMMANDS: Final = {
    "up": ("octavo.cli.up", "run a scheduler and workers on this machine"),
    "scheduler": ("octavo.cli.services", "run a scheduler"),
    "worker": ("octavo.cli.services", "run a worker"),
    "gateway": ("octavo.cli.services", "run the OpenAI-compatible HTTP gateway"),
    "generate": ("octavo.cli.generate", "complete a prompt"),
    "embed": ("octavo.cli.embed", "print the vectors of texts"),
    "chat": ("octavo.cli.chat", "talk to a model"),
    "batch": ("octavo.cli.batch", "run a file of requests, for throughput"),
    "status": ("octavo.cli.status", "show what a scheduler is doing"),
    "explain": ("octavo.cli.explain", "say where the time of a request went, and what held it up"),
    "usage": ("octavo.cli.usage", "say who has used the devices, and what that costs, as CSV"),
    "pin": ("octavo.cli.pins", "keep a prefix in KV memory, whatever the load"),
    "unpin": ("octavo.cli.pins", "let a pinned prefix go"),
    "drain": ("octavo.cli.drain", "take a worker or a scheduler out of service, and let what runs end"),
    "audit": ("octavo.cli.audit", "have workers verify their books, while they serve"),
    "health": ("octavo.cli.health", "say whether a service takes work"),
    "certs": ("octavo.cli.certs", "make certificates for TLS, and an authority for them"),
    "keys": ("octavo.cli.keys", "add, list, revoke and rotate API keys in a key file"),
    "doctor": ("octavo.cli.doctor", "look whether Octavo would run on this machine, and what to do if not"),
}
# Commands of rooms above this one: what an installation must hold for them, and what they do. Their modules
# are entry points of the group, which other distributions may join with commands of their own.
ADDED: Final = {
    "bench": ("octavo[bench]", "measure a service, or parts of it"),
    "chaos": ("octavo[bench]", "attack a stack of real processes, and see what its clients notice"),
    "tune": ("octavo[bench]", "find the settings that serve most within a latency target"),
    "replay": ("octavo[scheduler]", "replay a plan log, and tell why a request waited"),
}
ENTRY_POINTS: Final = "octavo.commands"

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
# What a write to stdout fails with that nothing can be written to any more.
_OUTPUT_ERRORS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
EXIT_BROKEN_PIPE: Final = 141
# The first class that fits decides.
EXIT_CODES: Final[tuple[tuple[type[OctavoError], int], ...]] = (
    (InvalidRequestError, EXIT_USAGE),
    (UnavailableError, 3),
    (OverloadedError, 4),
    (DeadlineExceededError, 5),
    (AccessDeniedError, 6),
    (OctavoError, EXIT_FAILED),
)
_LINES: Final = "\n".join(f"  {name:<10} {what}" for name, (_, what) in (COMMANDS | ADDED).items())
EPILOG: Final = f"""\
commands (octavo COMMAND --help tells more):
{_LINES}

exit codes: 0 done, 1 failed, 2 wrong usage or invalid request, 3 service unavailable,
4 refused for load, 5 deadline passed, 6 not allowed, 130 interrupted
"""


class Command(Protocol):
    """What a module of this package offers."""

    def configure(self, parser: argparse.ArgumentParser, name: str) -> None:
        """Add the command's arguments."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it and return the exit code."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if sys.stdout is None:  # It was closed before we began.
        if sys.stderr is not None:
            output.fail("stdout is closed")
        return EXIT_USAGE
    _prepare_surroundings()
    parser = argparse.ArgumentParser(
        prog="octavo",
        usage="octavo [--version] COMMAND ...",
        description="Large language models over gRPC.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", help=argparse.SUPPRESS, prog="octavo")
    known = COMMANDS | ADDED
    chosen = next((word for word in given if word in known), None)
    may_name_another = chosen is None and any(not word.startswith("-") for word in given)
    others = _others() if may_name_another else {}
    chosen = chosen or next((word for word in given if word in others), None)
    try:
        for name in (*known, *others):
            _, what = known.get(name, ("", f"a command of {others.get(name)}"))
            command_parser = commands.add_parser(
                name, description=f"{what[0].upper()}{what[1:]}.", allow_abbrev=False
            )
            if name == chosen:
                command = load_command(name)
                command.configure(command_parser, name)
        parsed = parser.parse_args(given)
        if parsed.version:
            print(_version())
            code = 0
        elif parsed.command is None:
            parser.print_help()
            code = EXIT_USAGE
        else:
            code = command.run(parsed)
        sys.stdout.flush()
    except OctavoError as error:
        output.fail(output.describe(error))
        return next(code for kind, code in EXIT_CODES if isinstance(error, kind))
    except KeyboardInterrupt:
        return output.EXIT_INTERRUPTED
    except BrokenPipeError:  # The reader of our output has left.
        _drop_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        if error.errno not in _OUTPUT_ERRORS or error.filename is not None:
            raise
        _drop_output()
        output.fail(f"cannot write to stdout: {error.strerror}")
        return EXIT_USAGE
    return code


def _prepare_surroundings() -> None:
    """Let a terminal that lacks a character show its escape, and a user without a home have one."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if (told := ensure_home()) is not None:
        output.note(told)


def _others() -> dict[str, str]:
    """Return the commands of other distributions than ours, and which distribution each is of."""
    return {
        point.name: point.dist.name if point.dist else point.value
        for point in _entry_points()
        if point.name not in ADDED
    }


def _entry_points() -> EntryPoints:
    from importlib.metadata import entry_points  # noqa: PLC0415 # an eighth of the time that --help takes

    return entry_points(group=ENTRY_POINTS)


def load_command(name: str) -> Command:
    """Return the module of a command; exits with advice when it is not installed."""
    if name in COMMANDS:
        return cast("Command", import_module(COMMANDS[name][0]))
    point = next(iter(_entry_points().select(name=name)), None)
    extra, _ = ADDED.get(name, ("", ""))
    try:
        if point is None:
            raise ModuleNotFoundError(name="octavo-lab")
        return cast("Command", point.load())
    except ModuleNotFoundError as error:
        output.fail(f"octavo {name} needs {error.name}" + (f": pip install '{extra}'" if extra else ""))
        sys.exit(EXIT_FAILED)


def _drop_output() -> None:
    """Nothing may be written while the interpreter ends."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _version() -> str:
    from octavo import __version__  # noqa: PLC0415 # reads the package's metadata

    return f"octavo {__version__}"


if __name__ == "__main__":
    sys.exit(main())
