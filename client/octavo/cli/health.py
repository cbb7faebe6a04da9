"""`octavo health`: say whether a service takes work, for probes of containers."""

from __future__ import annotations

import argparse
from typing import Final

import grpc

from octavo.cli import output

EXIT_UNAVAILABLE: Final = 3
# grpc.health.v1: an empty request asks for the server as a whole, the answer's first field is its state.
_METHOD: Final = "/grpc.health.v1.Health/Check"
_SERVING: Final = b"\x08\x01"


def configure(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the command's arguments."""
    del name
    parser.add_argument("address", nargs="?", default="127.0.0.1:50051", help="default: 127.0.0.1:50051")
    parser.add_argument("--timeout", type=float, default=3.0, metavar="S", help="default: 3 seconds")


def run(arguments: argparse.Namespace) -> int:
    """Do it and return the exit code."""
    with grpc.insecure_channel(arguments.address) as channel:
        check = channel.unary_unary(_METHOD, request_serializer=bytes, response_deserializer=bytes)
        try:
            serving = check(b"", timeout=arguments.timeout) == _SERVING
        except grpc.RpcError:
            output.fail(f"{arguments.address} cannot be reached")
            return EXIT_UNAVAILABLE
    print("serving" if serving else "not serving")
    return 0 if serving else EXIT_UNAVAILABLE
