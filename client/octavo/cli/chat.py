"""`octavo chat`: talk to a model."""

from __future__ import annotations

import argparse
import sys
from typing import Any, Final

from octavo.cli import output, request
from octavo.client import Client
from octavo.errors import OctavoError
from octavo.types import ChatMessage

HELP: Final = "/reset starts over, /system TEXT sets the system prompt, /quit or Ctrl-D ends."


def configure(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the command's arguments."""
    del name
    parser.add_argument("--message", metavar="TEXT", help="say this, print the answer and exit")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument("--json", action="store_true", help="with --message: print the whole result as JSON")
    request.add_endpoint(parser)
    request.add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Do it and return the exit code."""
    options = request.options(arguments)
    turns = [ChatMessage("system", arguments.system)] if arguments.system else []
    with request.connect(arguments) as client:
        if arguments.message is None:
            client.models()  # A service that cannot be reached is told before the first prompt.
            _converse(client, turns, options)
            return 0
        turns.append(ChatMessage("user", arguments.message))
        if arguments.json:
            print(output.to_json(client.chat(turns, **options)))
        else:
            _answer(client, turns, options)
    return 0


def _answer(client: Client, turns: list[ChatMessage], options: dict[str, Any]) -> str:
    with client.chat_stream(turns, **options) as stream:
        request.print_deltas(stream)
        request.print_cost(stream.result)
        return stream.result.text


def _converse(client: Client, turns: list[ChatMessage], options: dict[str, Any]) -> None:
    if sys.stdin.isatty():
        import readline  # noqa: F401, PLC0415 # gives input() a history, on terminals only

        output.note(HELP)
    while True:
        try:
            said = input(paint_prompt()).strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        command, _, rest = said.partition(" ")
        match command:
            case "":
                continue
            case "/quit" | "/exit":
                return
            case "/reset":
                turns[:] = [turn for turn in turns if turn.role == "system"]
            case "/system":
                turns[:] = [ChatMessage("system", rest)] if rest else []
            case _ if command.startswith("/"):
                output.note(HELP)
            case _:
                turns.append(ChatMessage("user", said))
                try:
                    turns.append(ChatMessage("assistant", _answer(client, turns, options)))
                except KeyboardInterrupt:
                    turns.pop()
                    print()
                    output.note("stopped")
                except OctavoError as error:
                    if not sys.stdin.isatty():  # Nobody is there to say something else.
                        raise
                    turns.pop()
                    output.fail(output.describe(error))


def paint_prompt() -> str:
    """Return the prompt; its colour codes are marked, so that readline knows its width."""
    painted = output.paint("> ", "cyan")
    return painted if painted == "> " else "\x01\x1b[36m\x02> \x01\x1b[0m\x02"
