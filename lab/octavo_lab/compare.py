"""`octavo bench compare`: runs of `octavo bench serve`, side by side."""

from __future__ import annotations

import argparse
from pathlib import Path

from octavo_lab.command import BenchError
from octavo_lab.load import files, tables
from octavo_lab.serve.plan import parse_slo


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="FILE", help="what `bench serve --out` wrote")
    parser.add_argument("--slo", metavar="ttft=MS,tpot=MS,e2e=MS", help="as in `bench serve`")


def run(arguments: argparse.Namespace) -> str:
    """Read; return the table."""
    if len(arguments.runs) < 2:
        raise BenchError("it takes two runs to compare")
    runs = [files.read(path) for path in arguments.runs]
    parts = [tables.compared(runs, parse_slo(arguments.slo))]
    parts.extend(f"Note: {difference}." for difference in tables.differences(runs))
    return "\n\n".join(parts)
