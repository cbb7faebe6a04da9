"""A user's own requests: JSON lines, or a file in ShareGPT's format."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from octavo_lab.command import BenchError
from octavo_lab.datasets.tokenizers import Tokenizer, counts
from octavo_lab.load.target import PlannedRequest

_HUMAN = ("human", "user")


@dataclass(frozen=True, slots=True)
class FileRequests:
    """Requests of a file, in its order."""

    requests: tuple[PlannedRequest, ...]
    at_s: tuple[float, ...] | None
    """When they came, where every line says so."""


async def read(path: Path, tokenizer: Tokenizer, output_tokens: int | None) -> FileRequests:
    """Read a file of requests.

    JSON lines have `prompt` (text or token ids) or `messages`; and, each optional, `output_tokens`,
    `timestamp` (seconds), `kind`, and `options` (of the request, by the names of the SDK). A ShareGPT file
    is one JSON list of objects with `conversations`: the first human turn is asked, and the answer after
    it says how many tokens are wanted.

    Args:
        path: the file.
        tokenizer: counts what the file does not say.
        output_tokens: wanted of requests that do not say how many.

    Raises:
        BenchError: a line is wrong; it is named.
    """
    try:
        text = await asyncio.to_thread(path.read_text, encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"{path}: {error}") from error
    times: list[float] = []
    if text.lstrip().startswith("["):
        requests = await _share_gpt(path, text, tokenizer)
    else:
        requests, times = _json_lines(path, text, output_tokens)
    if not requests:
        raise BenchError(f"{path} has no requests")
    counted = iter(await counts(tokenizer, [_text(one.prompt) for one in requests if one.form != "tokens"]))
    requests = [
        replace(one, prompt_tokens=len(one.prompt) if one.form == "tokens" else next(counted))
        for one in requests
    ]
    return FileRequests(tuple(requests), tuple(times) or None)


def _json_lines(path: Path, text: str, output_tokens: int | None) -> tuple[list[PlannedRequest], list[float]]:
    requests: list[PlannedRequest] = []
    times: list[float] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            requests.append(_request(row, output_tokens))
            if "timestamp" in row:
                times.append(float(row["timestamp"]))
        except (ValueError, TypeError, AttributeError) as error:
            raise BenchError(f"{path}:{number}: {error}") from error
    if times and (len(times) < len(requests) or times != sorted(times)):
        raise BenchError(f"{path}: either every line has a timestamp, in order, or none")
    return requests, times


def _request(row: Mapping[str, Any], output_tokens: int | None) -> PlannedRequest:
    prompt, wanted = row.get("prompt", row.get("messages")), row.get("output_tokens", output_tokens)
    if not prompt or not isinstance(prompt, str | list):
        raise ValueError("has no prompt (text or token ids) and no messages")
    if wanted is None:
        raise ValueError("does not say output_tokens: say how many are wanted with --output-tokens")
    if not isinstance(wanted, int) or wanted < 1:
        raise ValueError(f"output_tokens must be a whole number of at least 1, got {wanted!r}")
    if isinstance(prompt, list) and not (_are_tokens(prompt) or _are_turns(prompt)):
        raise ValueError("a list is token ids, or messages with role and content")
    options = row.get("options", {})
    if not isinstance(options, dict):
        raise TypeError("options must be an object")
    return PlannedRequest(
        prompt=prompt, prompt_tokens=0, output_tokens=wanted, kind=str(row.get("kind", "")), options=options
    )


def _are_tokens(prompt: list[Any]) -> bool:
    return all(isinstance(one, int) for one in prompt)


def _are_turns(prompt: list[Any]) -> bool:
    return all(isinstance(one, dict) and {"role", "content"} <= one.keys() for one in prompt)


async def _share_gpt(path: Path, text: str, tokenizer: Tokenizer) -> list[PlannedRequest]:
    try:
        rows = json.loads(text)
        pairs = [pair for row in rows if (pair := _first_exchange(row["conversations"]))]
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise BenchError(f"{path} is not in ShareGPT's format: {error!r}") from error
    wanted = await counts(tokenizer, [answer for _, answer in pairs])
    return [
        PlannedRequest(prompt=question, prompt_tokens=0, output_tokens=max(1, tokens))
        for (question, _), tokens in zip(pairs, wanted, strict=True)
    ]


def _first_exchange(turns: Sequence[Mapping[str, str]]) -> tuple[str, str] | None:
    """Return the first thing that a person said, and the answer; None if there is none."""
    for turn, after in itertools.pairwise(turns):
        if turn["from"] in _HUMAN and after["from"] not in _HUMAN and turn["value"].strip():
            return turn["value"], after["value"]
    return None


def _text(prompt: Any) -> str:
    """Return the text of a prompt, of a conversation that of its contents."""
    return prompt if isinstance(prompt, str) else "\n".join(str(turn["content"]) for turn in prompt)
