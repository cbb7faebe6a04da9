"""Answers of /v1/chat/completions."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from typing import Any

from octavo.gateway.logprobs import ChatLogprobs
from octavo.gateway.schemas import ChatRequest
from octavo.gateway.writers import ChoicesWriter, Head, quote
from octavo.parsing.events import CallArguments, CallBegun, Content, Event, Reasoning
from octavo.parsing.formats import TOOL_FORMATS
from octavo.parsing.output import PLAIN, OutputForm, OutputParser
from octavo.types import Choice, Delta


class ChatWriter(ChoicesWriter):
    """Writes the messages of a model. What is plain text goes past the parser."""

    object_whole = "chat.completion"
    object_event = "chat.completion.chunk"

    def __init__(self, request: ChatRequest, head: Head, form: OutputForm = PLAIN) -> None:
        """`form`: what may be found in the text."""
        num_choices = request.n or 1
        super().__init__(request, head, num_choices)
        self._form = form
        self._shows_reasoning = request.include_reasoning is not False
        self._begun = [False] * num_choices
        self._parsers: dict[int, OutputParser] = {}
        self._num_calls = [0] * num_choices
        self._logprobs = (
            [ChatLogprobs(as_ids=self._as_ids) for _ in range(num_choices)] if request.logprobs else None
        )
        self._tells_all = request.logprobs or self._with_ids or self._usage_always

    # Events --------------------------------------------------------------------------------------

    def _event(self, delta: Delta, first_choice: int, ended: Choice | None, prompt_tokens: int) -> list[str]:
        parts = super()._event(delta, first_choice, ended, prompt_tokens)
        if self._begun[delta.choice]:
            return parts
        self._begun[delta.choice] = True
        role = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
        return [self._begin, str(delta.choice), ",", role, *parts]

    def _delta(self, index: int, delta: Delta, ended: Choice | None) -> str:
        if self._form.is_plain:
            told = f'{{"content":{quote(delta.text)}}}'
        else:
            members = self._members(index, self._parsed(index, delta.text, is_last=ended is not None))
            if not members and ended is None and not self._tells_all:
                return ""
            told = json.dumps(members, ensure_ascii=False, separators=(",", ":"))
        if self._logprobs is None:
            return f'"delta":{told},"logprobs":null'
        logprobs = json.dumps(self._logprobs[index].take(delta.logprobs), ensure_ascii=False)
        return f'"delta":{told},"logprobs":{logprobs}'

    def _parsed(self, index: int, text: str, *, is_last: bool) -> list[Event]:
        parser = self._parsers.get(index)
        if parser is None:
            parser = OutputParser(self._form, in_reasoning=self._in_reasoning)
            self._parsers[index] = parser
        return [*parser.feed(text), *(parser.close() if is_last else ())]

    def _members(self, index: int, events: Iterable[Event]) -> dict[str, Any]:
        """Return the members of a delta, and of a message: those that have something to say."""
        members: dict[str, Any] = {}
        for found in events:
            match found:
                case Content(text):
                    members["content"] = members.get("content", "") + text
                case Reasoning(text) if self._shows_reasoning:
                    members["reasoning_content"] = members.get("reasoning_content", "") + text
                case CallBegun(name):
                    members.setdefault("tool_calls", []).append(self._begin_call(index, name))
                case CallArguments(text):
                    calls = members.setdefault("tool_calls", [])
                    if not calls:
                        calls.append({"index": self._num_calls[index] - 1, "function": {"arguments": ""}})
                    calls[-1]["function"]["arguments"] += text
        return members

    def _begin_call(self, index: int, name: str) -> dict[str, Any]:
        number = self._num_calls[index]
        self._num_calls[index] += 1
        function = {"name": name, "arguments": ""}
        return {"index": number, "id": call_id(self._form), "type": "function", "function": function}

    # Whole answers -------------------------------------------------------------------------------

    def _output(self, index: int, choice: Choice) -> dict[str, Any]:
        logprobs = self._logprobs[index].take(choice.logprobs) if self._logprobs is not None else None
        if self._form.is_plain:
            found: dict[str, Any] = {"content": choice.text}
        else:
            found = self._members(index, self._parsed(index, choice.text, is_last=True))
            for call in found.get("tool_calls", ()):
                del call["index"]
        content = found.pop("content", None if "tool_calls" in found else "")
        message = {"role": "assistant", "content": content, "refusal": None, **found}
        return {"message": message, "logprobs": logprobs}

    def _more(self) -> dict[str, Any]:
        return {"prompt_logprobs": self._scores[0]} if 0 in self._scores else {}

    def _reason(self, index: int, choice: Choice) -> str | None:
        reason = super()._reason(index, choice)
        # As with OpenAI and `vllm serve`: who has named the function is told of a usual end.
        called = self._num_calls[index] > 0 and self._form.forced != "arguments"
        return "tool_calls" if called and reason == "stop" else reason


def call_id(form: OutputForm) -> str:
    """Return an id for a call, of the kind that the model's template takes back."""
    known = TOOL_FORMATS.get(form.tool_format)
    if known is not None and known.id_chars is not None:
        return secrets.token_hex(known.id_chars)[: known.id_chars]
    return f"call_{secrets.token_hex(12)}"
