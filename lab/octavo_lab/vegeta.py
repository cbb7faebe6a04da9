"""Targets for vegeta, in its JSON format: one line for each request that it is to make.

    octavo bench vegeta-targets --model demo --count 200 > targets.json
    vegeta attack -format=json -targets=targets.json -rate=20 -duration=10s | vegeta report

vegeta goes through its targets in turn and begins again at the end.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from octavo_lab.command import BenchError, Flag, add_flags

_WORDS: Final = (
    "the", "of", "a", "in", "river", "stone", "light", "paper", "fold", "sheet", "press", "ink", "book",
    "time", "when", "they", "made", "letters", "from", "lead", "and", "bound", "pages", "again", "small",
)  # fmt: skip


FLAGS: Final[tuple[Flag, ...]] = (
    ("--url", str, "http://127.0.0.1:8000", "URL", "the gateway"),
    ("--count", int, 100, "N", "targets to write"),
    ("--prompts", Path, None, "FILE", "one prompt per line, used in turn"),
    ("--words", int, 64, "N", "words of the prompts that are made up"),
    ("--max-tokens", int, 32, "N", "output of a request"),
    ("--seed", int, 1, "N", "of the prompts that are made up"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_flags(parser, FLAGS)
    parser.add_argument("--model", required=True, help="model that the requests name")
    parser.add_argument("--chat", action="store_true", help="conversations of one turn, not completions")
    parser.add_argument("--stream", action="store_true", help="ask for server-sent events")
    told = "header of each request, as x-octavo-priority:batch; may be repeated"
    parser.add_argument("--header", action="append", default=[], metavar="NAME:VALUE", help=told)


def run(arguments: argparse.Namespace) -> str:
    """Return the targets, one a line."""
    if arguments.count < 1 or arguments.words < 1 or arguments.max_tokens < 1:
        raise BenchError("--count, --words and --max-tokens must be at least 1")
    headers = {"Content-Type": ["application/json"]}
    for text in arguments.header:
        name, colon, value = text.partition(":")
        if not colon or not name.strip():
            raise BenchError(f"--header must be NAME:VALUE, got {text!r}")
        headers.setdefault(name.strip(), []).append(value.strip())
    path = "/v1/chat/completions" if arguments.chat else "/v1/completions"
    target = {"method": "POST", "url": arguments.url.rstrip("/") + path, "header": headers}
    # Every request has the same amount of work, so that a rate means something.
    work = {"max_tokens": arguments.max_tokens, "ignore_eos": True, "stream": arguments.stream}
    lines = []
    for prompt in itertools.islice(_prompts(arguments), arguments.count):
        asked = {"messages": [{"role": "user", "content": prompt}]} if arguments.chat else {"prompt": prompt}
        body = json.dumps({"model": arguments.model, **work, **asked}).encode()
        lines.append(json.dumps({**target, "body": base64.b64encode(body).decode()}))
    return "\n".join(lines)


def _prompts(arguments: argparse.Namespace) -> Iterator[str]:
    if arguments.prompts is not None:
        try:
            lines = arguments.prompts.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise BenchError(f"{arguments.prompts}: {error}") from None
        given = [line for line in lines if line.strip()]
        if not given:
            raise BenchError(f"{arguments.prompts} holds no prompt")
        yield from itertools.cycle(given)
    chance = random.Random(arguments.seed)
    while True:
        yield " ".join(chance.choices(_WORDS, k=arguments.words))
