"""`octavo pin` and `octavo unpin`: prefixes that stay in KV memory."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from octavo.cli import output, request
from octavo.errors import InvalidRequestError
from octavo.types import ChatMessage, Messages, PinResult, Prompt


def configure(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the command's arguments."""
    parser.add_argument("name", metavar="NAME", help="names the pin, within its model")
    parser.add_argument("--model", default="", metavar="MODEL", help="where several are served")
    if name == "pin":
        prefix = parser.add_mutually_exclusive_group(required=True)
        prefix.add_argument("--text", metavar="TEXT", help="the beginning of prompts")
        prefix.add_argument("--file", metavar="FILE", help="a file that holds it; `-` reads stdin")
        prefix.add_argument(
            "--system", metavar="TEXT", help="system prompt of conversations, rendered with the template"
        )
        parser.add_argument(
            "--cache-salt", default="", metavar="SALT", help="as in the requests that share the prefix"
        )
        parser.add_argument(
            "--tenant", metavar="NAME", help="whose requests it is for (default: the tenant of the key)"
        )
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.set_defaults(lifts=name == "unpin")
    request.add_endpoint(parser)


def run(arguments: argparse.Namespace) -> int:
    """Do it and return the exit code."""
    name, model = arguments.name, arguments.model
    if arguments.lifts:
        with request.connect(arguments) as client:
            blocks = client.unpin_prefix(name, model=model)
        print(output.to_json({"blocks": blocks}) if arguments.json else f"unpinned {name}: {blocks} blocks")
        return 0
    prefix = _prefix(arguments)
    with request.connect(arguments) as client:
        pinned = client.pin_prefix(
            name, prefix, model=model, cache_salt=arguments.cache_salt, tenant=arguments.tenant
        )
    print(output.to_json(pinned) if arguments.json else _say(name, pinned))
    return 0


def _prefix(arguments: argparse.Namespace) -> Prompt | Messages:
    if arguments.system is not None:
        return [ChatMessage("system", arguments.system)]
    if arguments.text is not None:
        text: str = arguments.text
        return text
    if arguments.file == "-":
        return sys.stdin.read()
    try:
        return Path(arguments.file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InvalidRequestError.of_fields(("file", f"{arguments.file}: {why}")) from None


def _say(name: str, pinned: PinResult) -> str:
    line = f"pinned {name}: {pinned.blocks} blocks of {pinned.tokens} tokens, on {pinned.workers} workers"
    if pinned.without_room:
        line += f"; no room within the pin budget of {', '.join(pinned.without_room)}"
    return line
