"""Answers of /v1/responses, as OpenAI's API has them."""

from __future__ import annotations

import time
from typing import Any

from octavo.gateway.dialects.parts_writer import OpenPart, PartsWriter, named_event
from octavo.gateway.dialects.responses_body import ResponsesRequest
from octavo.gateway.errors import Failure
from octavo.gateway.writers import DONE, Head
from octavo.parsing.events import CallBegun, Content, Reasoning
from octavo.parsing.output import OutputForm
from octavo.protocol.steps import FinishReason
from octavo.types import Choice, Usage


class ResponsesWriter(PartsWriter):
    """Writes a response of output items. Its events are numbered."""

    def __init__(self, body: ResponsesRequest, head: Head, form: OutputForm) -> None:
        super().__init__(head, form)
        self._body = body
        self._number = 0

    # Events --------------------------------------------------------------------------------------

    def _event(self, kind: str, **members: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return named_event({"type": f"response.{kind}", "sequence_number": number, **members})

    def _start(self, prompt_tokens: int) -> bytes:
        del prompt_tokens
        response = self._response("in_progress")
        return self._event("created", response=response) + self._event("in_progress", response=response)

    def _opened(self, part: OpenPart) -> bytes:
        added = self._event("output_item.added", output_index=part.index, item=_item(part, is_open=True))
        if part.kind is CallBegun:
            return added
        return added + self._event("content_part.added", **_place(part), part=_content(part, ""))

    def _piece(self, part: OpenPart, text: str) -> bytes:
        if part.kind is CallBegun:
            where = {"item_id": _item_id(part), "output_index": part.index}
            return self._event("function_call_arguments.delta", **where, delta=text)
        if part.kind is Reasoning:
            return self._event("reasoning_text.delta", **_place(part), delta=text)
        return self._event("output_text.delta", **_place(part), delta=text, logprobs=[])

    def _closed(self, part: OpenPart) -> bytes:
        told = self._told(part)
        return told + self._event("output_item.done", output_index=part.index, item=_item(part))

    def _told(self, part: OpenPart) -> bytes:
        """Return the events that tell a part as a whole."""
        if part.kind is CallBegun:
            where = {"item_id": _item_id(part), "output_index": part.index}
            return self._event("function_call_arguments.done", **where, name=part.name, arguments=part.text)
        if part.kind is Reasoning:
            told = self._event("reasoning_text.done", **_place(part), text=part.text)
        else:
            told = self._event("output_text.done", **_place(part), text=part.text, logprobs=[])
        return told + self._event("content_part.done", **_place(part), part=_content(part, part.text))

    def _finish(self, choice: Choice, usage: Usage) -> bytes:
        response = self._answer(choice, usage)
        return self._event(response["status"], response=response) + DONE

    def failed(self, failure: Failure) -> bytes:
        """Return the events that end a stream which failed."""
        said = failure.body["error"]
        error = {"code": said["code"], "message": said["message"], "param": said["param"]}
        number, self._number = self._number, self._number + 1
        # Clients raise what is in `error`; the API has the same beside it.
        event = named_event({"type": "error", "sequence_number": number, **error, "error": said})
        response = self._response("failed", error={"code": said["code"], "message": said["message"]})
        return event + self._event("failed", response=response) + DONE

    # The response --------------------------------------------------------------------------------

    def _answer(self, choice: Choice, usage: Usage) -> dict[str, Any]:
        is_cut = choice.finish_reason is FinishReason.LENGTH
        return self._response(
            "incomplete" if is_cut else "completed",
            completed_at=None if is_cut else int(time.time()),
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            output=[_item(part) for part in self._parts],
            usage=_usage(usage),
        )

    def _response(self, status: str, **members: Any) -> dict[str, Any]:
        body = self._body
        text_format = body.text.format if body.text is not None else None
        tools = [tool.model_dump() for tool in body.tools or ()]
        choice = body.tool_choice or "auto"
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": self._head.model,
            "output": [],
            "parallel_tool_calls": self._form.parallel,
            "previous_response_id": None,
            "prompt_cache_key": None,
            "reasoning": _given(body.reasoning) or {"effort": None, "summary": None},
            "safety_identifier": None,
            "service_tier": "default",
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": _given(text_format) or {"type": "text"}},
            "tool_choice": choice if isinstance(choice, str) else _given(choice),
            "tools": tools,
            "top_logprobs": 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "presence_penalty": body.presence_penalty or 0.0,
            "frequency_penalty": body.frequency_penalty or 0.0,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            **members,
        }


def _given(model: Any) -> dict[str, Any] | None:
    """Return what a part of the body says, as it was sent."""
    return model.model_dump(by_alias=True) if model is not None else None


def _item_id(part: OpenPart) -> str:
    prefix = {CallBegun: "fc", Reasoning: "rs", Content: "msg"}[part.kind]
    return f"{prefix}_{part.id.removeprefix('call_')}"


def _place(part: OpenPart) -> dict[str, Any]:
    return {"item_id": _item_id(part), "output_index": part.index, "content_index": 0}


def _content(part: OpenPart, text: str) -> dict[str, Any]:
    if part.kind is Reasoning:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _item(part: OpenPart, *, is_open: bool = False) -> dict[str, Any]:
    item: dict[str, Any] = {
        "id": _item_id(part),
        "status": "in_progress" if is_open else "completed",
    }
    content = [] if is_open else [_content(part, part.text)]
    if part.kind is CallBegun:
        named = {"call_id": part.id, "name": part.name, "arguments": part.text}
        return {**item, "type": "function_call", **named}
    if part.kind is Reasoning:
        return {**item, "type": "reasoning", "summary": [], "content": content}
    return {**item, "type": "message", "role": "assistant", "content": content}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        # Tokens are not counted by what they say.
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
