"""`octavo explain`: where the time of a request went, and what held it up."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from octavo.cli import output, request


def configure(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the command's arguments."""
    del name
    parser.add_argument("request_id", metavar="REQUEST_ID", help="its id, as the client or the log has it")
    parser.add_argument(
        "--plan-log",
        type=Path,
        metavar="FILE",
        help="a plan log (default: that of the scheduler at --endpoint, if it is on this machine)",
    )
    parser.add_argument("--json", action="store_true", help="print as JSON")
    request.add_endpoint(parser)


def run(arguments: argparse.Namespace) -> int:
    """Do it and return the exit code."""
    from octavo.cli.main import load_command  # noqa: PLC0415 # which loads this module

    path = arguments.plan_log
    if path is None:
        with request.connect(arguments) as client:
            plan_log = client.status().plan_log
        if plan_log is None:
            output.fail("the scheduler keeps no plan log: start it with --plan-log FILE, or name one here")
            return 2
        path = Path(plan_log.path)
    plan_logs: Any = load_command("replay")
    code: int = plan_logs.explain(path, arguments.request_id, as_json=arguments.json)
    return code
