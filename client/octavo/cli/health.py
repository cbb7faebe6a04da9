"""`octavo health`: say whether a service takes work, for probes of containers."""

from __future__ import annotations

import argparse
from typing import Final

from octavo._sdk.channel import parse_endpoints
from octavo._sdk.health import Health, ask_health, is_url
from octavo.cli import output, request

EXIT_UNAVAILABLE: Final = 3


def configure(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the command's arguments."""
    del name
    parser.add_argument(
        "address",
        nargs="?",
        metavar="ADDRESS",
        help="service to ask, as host:port, or http://host:port for a gateway; of several, separated "
        "by commas, one has to take work (default: $OCTAVO_ENDPOINT or 127.0.0.1:50051)",
    )
    parser.add_argument(
        "--alive",
        action="store_true",
        help="be content with any answer: a service that loads, drains or stands by is not stuck",
    )
    request.add_tls(parser)
    parser.add_argument("--timeout", type=float, default=3.0, metavar="S", help="default: 3 seconds")


def run(arguments: argparse.Namespace) -> int:
    """Do it and return the exit code."""
    given, tls = arguments.address, request.tls_of(arguments)
    endpoints = (given,) if given is not None and is_url(given) else parse_endpoints(given)
    answers = {ask_health(one, arguments.timeout, tls) for one in endpoints} - {Health.UNREACHABLE}
    if not answers:
        output.fail(f"{', '.join(endpoints)} cannot be reached")
        return EXIT_UNAVAILABLE
    health = Health.SERVING if Health.SERVING in answers else Health.NOT_SERVING
    print(health.value)
    return 0 if health is Health.SERVING or arguments.alive else EXIT_UNAVAILABLE
