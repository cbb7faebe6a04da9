"""`octavo audit`: have workers verify their books, while they serve."""

from __future__ import annotations

import argparse
from typing import Final

from octavo.cli import output, request
from octavo.types import WorkerAudit

EXIT_VIOLATION: Final = 1


def configure(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the command's arguments."""
    del name
    parser.add_argument("worker", nargs="?", metavar="WORKER", help="one worker (default: all)")
    parser.add_argument("--json", action="store_true", help="print as JSON")
    request.add_endpoint(parser)


def run(arguments: argparse.Namespace) -> int:
    """Do it and return the exit code."""
    with request.connect(arguments) as client:
        audits = client.audit(arguments.worker)
    print(output.to_json(audits) if arguments.json else "\n".join(map(_say, audits)) or "no workers")
    return 0 if all(audit.ok for audit in audits) else EXIT_VIOLATION


def _say(audit: WorkerAudit) -> str:
    if audit.violation is not None:
        verdict = output.paint(f"violated: {audit.violation}", "red")
    elif audit.problem is not None:
        verdict = output.paint(f"no verdict: {audit.problem}", "red")
    else:
        verdict = f"ok, {audit.blocks} blocks, {audit.check_s * 1000:.1f} ms"
    return f"{audit.worker_id}  {verdict}"
