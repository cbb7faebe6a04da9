"""`octavo embed`: the vectors of texts."""

from __future__ import annotations

import argparse
import json
import sys

from octavo.cli import request


def configure(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the command's arguments."""
    del name
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="a text; none: each line of stdin is one")
    parser.add_argument("--pooling", choices=("last", "mean"), default="last", help="of the hidden states")
    parser.add_argument("--model", metavar="NAME", help="model to use, where several are served")
    request.add_endpoint(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print a vector a line, as JSON, and return the exit code."""
    texts = arguments.texts or sys.stdin.read().splitlines()
    with request.connect(arguments) as client:
        result = client.embed(texts, pooling=arguments.pooling, model=arguments.model or "")
    for vector in result.embeddings:
        print(json.dumps(vector))
    return 0
