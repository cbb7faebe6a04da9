"""Commands, flags and JSON in README and docs are those of the program."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
from octavo.batch_file import read_requests
from octavo.cli.main import ADDED, COMMANDS, load_command
from octavo.gateway.schemas import ChatRequest, CompletionRequest
from pydantic import BaseModel

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
}


@cache
def parser_of(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"octavo {command}", allow_abbrev=False)
    load_command(command).configure(parser, command)
    return parser


def flags_of(parser: argparse.ArgumentParser, words: list[str]) -> tuple[set[str], list[str]]:
    """Return the flags of a command, or of the subcommand that the words name, and the words after it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for at, word in enumerate(words):
                if word in action.choices:
                    chosen = action.choices[word]
                    with suppress(SystemExit):  # A bench has its arguments once some are read.
                        chosen.parse_known_args([])
                    return flags_of(chosen, words[at + 1 :])
    return {flag for action in parser._actions for flag in action.option_strings}, words


def code_lines(page: Path) -> Iterator[str]:
    """Yield the lines of code blocks, continued ones as one, and spans of code in the text."""
    text = page.read_text()
    for block in re.findall(r"^ *```\w*\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE):
        yield from block.replace("\\\n", " ").splitlines()
    prose = re.sub(r"^ *```\w*\n.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose))


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command `octavo ...`, without what it is piped to and without comments."""
    for line in code_lines(page):
        found = re.match(r"\s*(?:\$ )?(?:[A-Z_]+=\S+ )*octavo ([a-z].*)", line)
        if found is None:
            continue
        try:
            words = shlex.split(re.sub(r"<([a-z ]+)>", r"\1", found[1]), comments=True)
        except ValueError:
            continue
        end = next((at for at, word in enumerate(words) if word in ("|", "||", "&&", ";", ">", "&")), None)
        yield words[:end]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_flags_of_a_page_exist(page: Path) -> None:
    wrong = []
    for words in commands(page):
        command, rest = words[0], words[1:]
        if command not in COMMANDS | ADDED:
            wrong.append(" ".join(words))
            continue
        known, rest = flags_of(parser_of(command), rest)
        for word in rest:
            flag = word.partition("=")[0]
            if re.fullmatch(r"--[a-z][a-z0-9-]+", flag) and flag not in known:
                wrong.append(f"{flag} in: octavo {' '.join(words)}")
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_targets_of_make_on_a_page_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        word
        for line in code_lines(page)
        if (found := re.match(r"\s*make ((?:[a-z-]+ ?)+)", line)) is not None
        for word in found[1].split()
    }
    assert named <= targets


def bodies() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for line in code_lines(page):
            route = next((route for route in BODIES if route in line), None)
            data = re.search(r"(?:-d|--data) '(\{.*?\})'", line)
            if route is not None and data is not None:
                yield route, data[1]


def test_bodies_of_curl_are_requests() -> None:
    found = list(bodies())

    for route, body in found:
        BODIES[route].model_validate(json.loads(body))
    assert len(found) >= 2


def test_lines_of_batch_files_are_requests(tmp_path: Path) -> None:
    lines = [
        line
        for line in code_lines(ROOT / "docs/cli.md")
        if line.startswith("{") and ('"prompt"' in line or '"messages"' in line or '"body"' in line)
    ]
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(lines))

    assert lines
    assert [line.error for line in read_requests(path, {}) if line.error is not None] == []
