"""`octavo bench`: benchmarks that users can run."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any, Final

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
        "octavo_lab.overload.command",
        "a service driven past its capacity and back: what it refuses, keeps, and how soon it recovers",
    ),
    "ladder": (
        "octavo_lab.ladder.command",
        "static against continuous batching, contiguous against paged memory, under the same traffic",
    ),
    "fragmentation": (
        "octavo_lab.fragmentation",
        "how much of the KV memory holds tokens, paged against contiguous",
    ),
    "vegeta-targets": ("octavo_lab.vegeta", "requests to a gateway, as a file of targets for vegeta"),
    "whatif": (
        "octavo_lab.whatif",
        "how much sooner a request of a plan log would have begun without a tenant, or by another policy",
    ),
    "fleet": (
        "octavo_lab.fleet.command",
        "one late-binding queue against routers that bind early, on public traces, simulated",
    ),
}


class _BenchParser(argparse.ArgumentParser):
    """Reads the module of a bench when its arguments are read: what estimates and draws is slow to import."""

    module = ""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Read the arguments; see `argparse`."""
        if self.module:
            import_module(self.module).configure(self)
            self.module = ""
        return super().parse_known_args(args, namespace)


def configure(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the command's arguments."""
    del name
    benches = parser.add_subparsers(dest="bench", metavar="NAME", required=True, parser_class=_BenchParser)
    for bench, (module, what) in BENCHES.items():
        added = benches.add_parser(bench, help=what, description=f"{what[0].upper()}{what[1:]}.")
        added.module = module


def run(arguments: argparse.Namespace) -> int:
    """Do it and return the exit code."""
    module, _ = BENCHES[arguments.bench]
    try:
        print(import_module(module).run(arguments))
    except BenchInterrupted as error:
        print(error)
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
