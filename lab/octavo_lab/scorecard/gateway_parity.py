"""The same requests to two servers that speak the OpenAI API, and where their answers differ."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

LOGPROB_TOLERANCE: Final = 2e-3
Position = tuple[str, float, dict[str, float]]
"""Token, log probability, and the best tokens with theirs."""
_TIMEOUT_S: Final = 300.0
Question = tuple[str, dict[str, Any]]
"""Path and body of a request."""


def questions() -> list[Question]:
    """Return fifty greedy requests that use what both servers have."""
    lines = (Path(__file__).parent / "gateway_questions.jsonl").read_text(encoding="utf-8").splitlines()
    return [(one["path"], one["body"]) for one in map(json.loads, lines)]


def answer(base: str, model: str, question: Question) -> dict[str, Any]:
    """Return the answer as a whole one, whether it is streamed or not."""
    path, body = question
    content, headers = json.dumps({"model": model, **body}).encode(), {"content-type": "application/json"}
    request = urllib.request.Request(base + path, content, headers)  # noqa: S310 # our own servers
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:  # noqa: S310 # our own servers
            text = reply.read().decode()
    except urllib.error.HTTPError as error:
        return {"status": error.code, "error": error.read().decode(errors="replace")}
    if body.get("stream"):
        events = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: {")]
        return _joined([json.loads(event) for event in events])
    found: dict[str, Any] = json.loads(text)
    return found


def _joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for event in events:
        usage = event.get("usage") or usage
        for part in event["choices"]:
            choice = choices.setdefault(part["index"], {"index": part["index"], "text": "", "logprobs": None})
            choice["text"] += part["text"] if "text" in part else part["delta"].get("content") or ""
            for name in ("finish_reason", "stop_reason"):
                choice[name] = part.get(name) if part.get(name) is not None else choice.get(name)
            for name, values in (part.get("logprobs") or {}).items():
                if values is not None:
                    held = choice["logprobs"] = choice["logprobs"] or {}
                    held.setdefault(name, []).extend(values)
    return {"choices": [choices[index] for index in sorted(choices)], "usage": usage}


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[str]:
    """Yield what differs: text, ends, usage, tokens, and log probabilities beyond the tolerance.

    A last character that `max_tokens` has cut in two is none: we show it as it decodes, and vLLM
    leaves it out, as the documents say.
    """
    if "choices" not in ours or "choices" not in theirs:
        if ours != theirs:
            yield f"answers: {str(ours)[:200]} and {str(theirs)[:200]}"
        return
    yield from _unlike(ours["usage"], theirs["usage"], "prompt_tokens", "completion_tokens", "total_tokens")
    if len(ours["choices"]) != len(theirs["choices"]):
        yield f"choices: {len(ours['choices'])} and {len(theirs['choices'])}"
    for one, other in zip(ours["choices"], theirs["choices"], strict=False):
        yield from _unlike(one, other, "finish_reason", "stop_reason", "token_ids")
        text, wanted = (it["text"] if "text" in it else it["message"]["content"] for it in (one, other))
        cut = one["finish_reason"] == other["finish_reason"] == "length" and text.rstrip("\ufffd") == wanted
        if text != wanted and not cut:
            yield f"text: {text!r} and {wanted!r}"
        yield from _differing_logprobs(_positions(one), _positions(other))


def _unlike(ours: dict[str, Any], theirs: dict[str, Any], *names: str) -> Iterator[str]:
    for name in names:
        if ours.get(name) != theirs.get(name):
            yield f"{name}: {ours.get(name)!r} and {theirs.get(name)!r}"


def _differing_logprobs(ours: list[Position], theirs: list[Position]) -> Iterator[str]:
    if len(ours) != len(theirs):
        yield f"positions with log probabilities: {len(ours)} and {len(theirs)}"
    for at, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one[0] != other[0] or abs(one[1] - other[1]) > LOGPROB_TOLERANCE:
            yield f"position {at}: {one[:2]} and {other[:2]}"
        elif one[2].keys() != other[2].keys():
            yield f"best at {at}: {sorted(one[2])} and {sorted(other[2])}"
        elif any(abs(one[2][name] - other[2][name]) > LOGPROB_TOLERANCE for name in one[2]):
            yield f"best at {at}: {one[2]} and {other[2]}"


def _positions(choice: dict[str, Any]) -> list[Position]:
    """Return the positions of a choice that has log probabilities."""
    held = choice.get("logprobs") or {}
    if "tokens" in held:
        return list(zip(held["tokens"], held["token_logprobs"], held["top_logprobs"], strict=True))
    return [
        (entry["token"], entry["logprob"], {one["token"]: one["logprob"] for one in entry["top_logprobs"]})
        for entry in held.get("content") or ()
    ]
