"""Answers of /v1/messages, as Anthropic's API has them."""

from __future__ import annotations

import json
from typing import Any, Final

from octavo.gateway.dialects.parts_writer import OpenPart, PartsWriter, named_event
from octavo.gateway.errors import Failure
from octavo.parsing.events import CallBegun, Content, Reasoning
from octavo.protocol.steps import FinishReason
from octavo.types import Choice, Usage

_EMPTY: Final[dict[type, dict[str, Any]]] = {
    Content: {"type": "text", "text": ""},
    Reasoning: {"type": "thinking", "thinking": "", "signature": ""},
}


class MessagesWriter(PartsWriter):
    """Writes a message of content blocks."""

    def _start(self, prompt_tokens: int) -> bytes:
        usage = _usage(Usage(prompt_tokens=prompt_tokens))
        start = {"type": "message_start", "message": {**self._message([]), "usage": usage}}
        return named_event(start) + named_event({"type": "ping"})

    def _opened(self, part: OpenPart) -> bytes:
        block = _EMPTY.get(part.kind) or {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
        return named_event({"type": "content_block_start", "index": part.index, "content_block": block})

    def _piece(self, part: OpenPart, text: str) -> bytes:
        if part.kind is CallBegun:
            delta = {"type": "input_json_delta", "partial_json": text}
        elif part.kind is Reasoning:
            delta = {"type": "thinking_delta", "thinking": text}
        else:
            delta = {"type": "text_delta", "text": text}
        return named_event({"type": "content_block_delta", "index": part.index, "delta": delta})

    def _closed(self, part: OpenPart) -> bytes:
        return named_event({"type": "content_block_stop", "index": part.index})

    def _finish(self, choice: Choice, usage: Usage) -> bytes:
        end = {"type": "message_delta", "delta": self._stop(choice), "usage": _usage(usage)}
        return named_event(end) + named_event({"type": "message_stop"})

    def _answer(self, choice: Choice, usage: Usage) -> dict[str, Any]:
        blocks = [_block(part) for part in self._parts]
        return {**self._message(blocks), **self._stop(choice), "usage": _usage(usage)}

    def _message(self, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": blocks,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _stop(self, choice: Choice) -> dict[str, Any]:
        reason, sequence = "end_turn", None
        if choice.finish_reason is FinishReason.LENGTH:
            reason = "max_tokens"
        elif isinstance(choice.stop, str):
            reason, sequence = "stop_sequence", choice.stop
        elif any(part.kind is CallBegun for part in self._parts):
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def refusal(self, failure: Failure) -> bytes:
        """Return the answer of a request that failed."""
        return failure.encoded(anthropic=True)

    def failed(self, failure: Failure) -> bytes:
        """Return the event that ends a stream which failed."""
        return named_event(failure.anthropic_body)


def _block(part: OpenPart) -> dict[str, Any]:
    if part.kind is CallBegun:
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": _object(part.text)}
    if part.kind is Reasoning:
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    return {"type": "text", "text": part.text}


def _object(arguments: str) -> Any:
    """Return arguments as an object; what was cut short is not one yet."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _usage(usage: Usage) -> dict[str, int]:
    """Return the usage. Tokens from the cache are counted beside the others of the prompt."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
