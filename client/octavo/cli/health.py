"""`octavo health`: say whether a service takes work, for probes of containers."""

from __future__ import annotations

import argparse
from typing import Final

from octavo._sdk.channel import parse_endpoints
from octavo._sdk.health import Health, ask_health
from octavo.cli import output, request

EXIT_UNAVAILABLE: Final = 3


def configure(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the command's arguments."""
    del name
    parser.add_argument(
        "address",
        nargs="?",
        metavar="HOST:PORT",
        help="service to ask; of several, separated by commas, one has to take work "
        "(default: $OCTAVO_ENDPOINT or 127.0.0.1:50051)",
    )
    request.add_tls(parser)
    parser.add_argument("--timeout", type=float, default=3.0, metavar="S", help="default: 3 seconds")


def run(arguments: argparse.Namespace) -> int:
    """Do it and return the exit code."""
    endpoints = parse_endpoints(arguments.address)
    tls = request.tls_of(arguments)
    answers = {ask_health(one, arguments.timeout, tls) for one in endpoints} - {Health.UNREACHABLE}
    if not answers:
        output.fail(f"{', '.join(endpoints)} cannot be reached")
        return EXIT_UNAVAILABLE
    health = Health.SERVING if Health.SERVING in answers else Health.NOT_SERVING
    print(health.value)
    return 0 if health is Health.SERVING else EXIT_UNAVAILABLE
