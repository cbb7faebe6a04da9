"""`octavo health`: say whether a service takes work, for probes of containers."""

from __future__ import annotations

import argparse
from typing import Final

import grpc

from octavo._sdk.channel import channel_options, parse_endpoints
from octavo.cli import output

EXIT_UNAVAILABLE: Final = 3
# grpc.health.v1: an empty request asks for the server as a whole, the answer's first field is its state.
_METHOD: Final = "/grpc.health.v1.Health/Check"
_SERVING: Final = b"\x08\x01"


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
    parser.add_argument("--timeout", type=float, default=3.0, metavar="S", help="default: 3 seconds")


def run(arguments: argparse.Namespace) -> int:
    """Do it and return the exit code."""
    endpoints = parse_endpoints(arguments.address)
    answers = [answer for one in endpoints if (answer := _ask(one, arguments.timeout)) is not None]
    if not answers:
        output.fail(f"{', '.join(endpoints)} cannot be reached")
        return EXIT_UNAVAILABLE
    serving = _SERVING in answers
    print("serving" if serving else "not serving")
    return 0 if serving else EXIT_UNAVAILABLE


def _ask(endpoint: str, timeout_s: float) -> bytes | None:
    """Return what a service says of itself; None when it cannot be reached."""
    with grpc.insecure_channel(endpoint, options=channel_options(endpoint)) as channel:
        check = channel.unary_unary(_METHOD, request_serializer=bytes, response_deserializer=bytes)
        try:
            return bytes(check(b"", timeout=timeout_s))
        except grpc.RpcError:
            return None
