"""Reads the streams of the OpenAI API: server-sent events, each a piece of output or the usage at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from octavo_lab.load.records import Answer, Outcome
from octavo_lab.load.target import Sink
from octavo_lab.load.targets import outcomes


class StreamReader:
    """One stream, as its bytes come."""

    def __init__(self, sink: Sink, *, chat: bool) -> None:
        self._sink = sink
        self._chat = chat
        self._rest = b""
        self._chunks = 0
        self._usage: Mapping[str, Any] = {}
        self._error: tuple[Outcome, str] | None = None
        self._done = False

    def feed(self, data: bytes) -> None:
        """Take in what came; it may be split anywhere."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            # All else is comments, names of events, and empty lines.
            if line.startswith(b"data:"):
                self._event(line[5:].strip())

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        try:
            event = json.loads(data)
            if event.get("error"):
                self._error = outcomes.of_http(None, json.dumps(event))
                return
            choices = event.get("choices")
            if choices and _has_output(choices[0], self._chat):
                self._chunks += 1
                self._sink.chunk()
            self._usage = event.get("usage") or self._usage
        except (ValueError, AttributeError, LookupError, TypeError):
            self._error = (Outcome.ERROR, "BAD_EVENT")

    def answer(self) -> Answer:
        """Return how a stream ended that was read to its end."""
        if self._error is not None:
            return self.failed(*self._error)
        if not self._done:
            return self.failed(Outcome.ERROR, "STREAM_CUT")
        return Answer(
            prompt_tokens=self._usage.get("prompt_tokens"),
            output_tokens=self._usage.get("completion_tokens"),
            cached_tokens=(self._usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        )

    def failed(self, outcome: Outcome, reason: str) -> Answer:
        """Return an end that is not a good one; the output until then was received."""
        return Answer(outcome=outcome, reason=reason, output_tokens=self._chunks)


def _has_output(choice: Mapping[str, Any], chat: bool) -> bool:
    if chat:
        return any(value for name, value in (choice.get("delta") or {}).items() if name != "role")
    # A token may have no text of its own. An event that only says how a request ended has no token.
    return bool(choice.get("text")) or choice.get("finish_reason") is None
