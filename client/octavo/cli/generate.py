"""`octavo generate`: complete a prompt."""

from __future__ import annotations

import argparse
import sys

from octavo.cli import output, request


def configure(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the command's arguments."""
    del name
    parser.add_argument("prompt", nargs="?", default="-", help="the prompt; `-` or nothing reads stdin")
    parser.add_argument("--json", action="store_true", help="print the whole result as JSON")
    parser.add_argument("--n", type=int, metavar="N", help="independent outputs (with --json)")
    parser.add_argument(
        "--logprobs", type=int, metavar="N", help="log probabilities of the N best tokens (with --json)"
    )
    request.add_endpoint(parser)
    request.add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Do it and return the exit code."""
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    options = request.options(arguments)
    if not arguments.json and (arguments.n or arguments.logprobs is not None):
        output.fail("--n and --logprobs need --json")
        return 2
    for name in ("n", "logprobs"):
        if getattr(arguments, name) is not None:
            options[name] = getattr(arguments, name)
    with request.connect(arguments) as client:
        if arguments.json:
            print(output.to_json(client.generate(prompt, **options)))
            return 0
        with client.stream(prompt, **options) as stream:
            request.print_deltas(stream)
            request.print_cost(stream.result)
    return 0
