"""`octavo bench`: benchmarks that users can run."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Final

from octavo.cli import output

from octavo_lab.command import BenchError, BenchInterrupted

BENCHES: Final = {
    "serve": (
        "octavo_lab.serve.command",
        "drive a service with planned traffic, and tell what its clients see",
    ),
    "compare": ("octavo_lab.compare", "set runs of `octavo bench serve` side by side"),
    "chunked": (
        "octavo_lab.chunked",
        "what chunked prefill spares running requests while long prompts arrive",
    ),
    "overload": (
        "octavo_lab.overload",
        "a service driven past its capacity and back: what it refuses, keeps, and how soon it recovers",
    ),
    "ladder": (
        "octavo_lab.ladder",
        "static against continuous batching, contiguous against paged memory, under the same traffic",
    ),
    "fragmentation": (
        "octavo_lab.fragmentation",
        "how much of the KV memory holds tokens, paged against contiguous",
    ),
    "vegeta-targets": ("octavo_lab.vegeta", "requests to a gateway, as a file of targets for vegeta"),
    "fleet": (
        "octavo_lab.fleet",
        "one late-binding queue against routers that bind early, on public traces, simulated",
    ),
}


def configure(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the command's arguments."""
    del name
    benches = parser.add_subparsers(dest="bench", metavar="NAME", required=True)
    for bench, (module, what) in BENCHES.items():
        bench_parser = benches.add_parser(bench, help=what, description=f"{what[0].upper()}{what[1:]}.")
        import_module(module).configure(bench_parser)


def run(arguments: argparse.Namespace) -> int:
    """Do it and return the exit code."""
    module, _ = BENCHES[arguments.bench]
    try:
        print(import_module(module).run(arguments))
    except BenchInterrupted as error:
        print(error.partial)
        return output.EXIT_INTERRUPTED
    except ModuleNotFoundError as error:
        output.fail(f"octavo bench {arguments.bench} needs {error.name}: pip install 'octavo[bench]'")
        return 1
    except BenchError as error:
        if error.partial:
            print(error.partial)
        output.fail(str(error))
        return 2
    return 0
