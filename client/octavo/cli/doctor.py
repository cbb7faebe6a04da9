"""`octavo doctor`: would a demo stack run on this machine, and what is to be done if not?"""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Final

from octavo.checks import machine, network
from octavo.checks.child import findings_of
from octavo.checks.finding import Finding, Mark
from octavo.checks.finding import run as run_check
from octavo.cli import output

ENTRY_POINTS: Final = "octavo.checks"
"""Group of the checks of other rooms: name of the extra -> module with `CHECKS`."""
EXIT_WOULD_NOT_RUN: Final = 1
_MARKS: Final = {
    Mark.FINE: ("✓", "ok", "green"),
    Mark.WARNING: ("!", "!", "yellow"),
    Mark.FAILED: ("✗", "x", "red"),
}
"""Mark -> how it looks, how it looks where that cannot be shown, and its colour."""
_NAME_CELLS: Final = 10
_MOST_CELLS: Final = 100


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All that was found."""

    would_run: bool
    findings: list[Finding]


def configure(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the command's arguments."""
    del name
    parser.description = (
        "Look at this machine: would `octavo up` run here? Each line tells what was found, and what to do "
        "where it is not fine. Exits with 0 if a demo stack would run, with 1 if not."
    )
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.add_argument("--host", default="127.0.0.1", help="as of octavo up")
    for flag, default in (("--port", 50051), ("--worker-port", 50061), ("--gateway-port", 8000)):
        parser.add_argument(flag, type=_port, default=default, metavar="PORT", help="as of octavo up")


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be from 0 to 65535, got {text!r}")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Do it and return the exit code."""
    findings = []
    for finding in _findings(arguments):
        findings.append(finding)
        if not arguments.json:
            before = findings[-2].check if len(findings) > 1 else ""
            print(_lines(finding, named=finding.check != before), flush=True)
    would_run = all(finding.mark is not Mark.FAILED for finding in findings)
    if arguments.json:
        print(output.to_json(Diagnosis(would_run, findings)))
    else:
        print(f"\n{_verdict(findings)}")
    return 0 if would_run else EXIT_WOULD_NOT_RUN


def _findings(arguments: argparse.Namespace) -> Iterator[Finding]:
    ports = [
        network.Port(arguments.port, "scheduler", "--port"),
        network.Port(arguments.worker_port, "worker", "--worker-port"),
        network.Port(arguments.gateway_port, "gateway", "--gateway-port"),
        network.Port(9464, "metrics"),
        network.Port(9465, "metrics"),
    ]
    for check in (*machine.CHECKS, *network.checks(arguments.host, ports)):
        yield from run_check(check)
    rooms = {point.name: point.module for point in entry_points(group=ENTRY_POINTS)}
    for name, module in rooms.items():
        try:
            yield from findings_of(name, module)
        except OSError as error:
            found = f"no process can be started to look: {error.strerror}"
            yield Finding(Mark.FAILED, found, "see the limits on processes and memory", name)


def _lines(finding: Finding, *, named: bool) -> str:
    """Return a finding as lines: a mark, the name of its check, what was found, what to do."""
    mark, plain, colour = _MARKS[finding.mark]
    mark = output.paint((mark if _shows(mark) else plain).ljust(2), colour)
    name = (finding.check if named else "").ljust(_NAME_CELLS)
    found = _wrapped(finding.found or "?", "")
    advice = _wrapped(finding.advice, "-> ") if finding.advice else []
    indent = " " * (len("xx ") + _NAME_CELLS + 1)
    return f"\n{indent}".join([f"{mark} {name} {found[0]}", *found[1:], *advice])


def _wrapped(text: str, lead: str) -> list[str]:
    width = min(shutil.get_terminal_size().columns, _MOST_CELLS) - _NAME_CELLS - 4
    return textwrap.wrap(
        text,
        max(width, 20),
        initial_indent=lead,
        subsequent_indent=" " * len(lead),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _shows(character: str) -> bool:
    try:
        character.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def _verdict(findings: list[Finding]) -> str:
    failures = [finding.check for finding in findings if finding.mark is Mark.FAILED]
    if failures:
        return output.paint(f"A demo stack would not run here: {', '.join(dict.fromkeys(failures))}.", "red")
    return output.paint("A demo stack would run here: octavo up", "green")
