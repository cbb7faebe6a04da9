"""Bodies of /v1/responses, as OpenAI's API has them, and the chats that they mean. Nothing is stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from octavo.gateway.dialects.chats import chat_of
from octavo.gateway.errors import invalid
from octavo.gateway.schemas import MAX_MESSAGES, MAX_PARTS, ChatRequest, TokenCount
from octavo.gateway.strict import EMPTY, FALSE, MAX_TOOLS, NOTHING, Strict

RENAMED: Final[Mapping[str, str]] = {"sampling.max_tokens": "max_output_tokens", "chat": "input"}
"""Parameters that have other names than elsewhere, by path in the proto."""


class InputPart(Strict):
    """Part of a message or of thoughts."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"annotations": EMPTY, "logprobs": EMPTY}

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"]
    text: str | None = None
    refusal: str | None = None


Content = str | Annotated[list[InputPart], Field(max_length=MAX_PARTS, fail_fast=True)]


class InputItem(Strict):
    """A message, a call of a function, its result, or what the model had thought."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "encrypted_content": (None, ""),
        "namespace": NOTHING,
        "caller": NOTHING,
        "phase": (None, "commentary", "final_answer"),
        "created_by": NOTHING,
    }

    type: Literal["message", "function_call", "function_call_output", "reasoning"] | None = None
    id: str | None = Field(None, max_length=256, description="accepted; nothing is stored under it")
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    role: str | None = Field(None, max_length=64)
    content: Content | None = None
    summary: Annotated[list[InputPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    call_id: str | None = Field(None, max_length=256)
    name: str | None = Field(None, max_length=256)
    arguments: str | None = None
    output: Content | None = None


class FunctionTool(Strict):
    """A function that the model may call."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"defer_loading": FALSE, "output_schema": NOTHING}

    type: Literal["function"]
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenTool(Strict):
    """Names a function."""

    type: Literal["function"]
    name: str = Field(max_length=256)


class AllowedTools(Strict):
    """Those of the tools that the model is offered this time."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class TextFormat(Strict):
    """What the output is."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, max_length=256)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Strict):
    """How the model answers."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"verbosity": (None, "medium")}

    format: TextFormat | None = None


class ReasoningOptions(Strict):
    """How the model thinks."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"generate_summary": (None, "auto")}

    effort: str | None = Field(None, max_length=32)
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="accepted: thoughts come as they are"
    )


class ResponsesRequest(Strict):
    """Body of /v1/responses."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background": FALSE,
        "context_management": EMPTY,
        "conversation": NOTHING,
        "include": (*EMPTY, ["reasoning.encrypted_content"]),
        "max_tool_calls": NOTHING,
        "previous_response_id": NOTHING,
        "prompt": NOTHING,
        "prompt_cache_key": NOTHING,
        "prompt_cache_retention": NOTHING,
        "safety_identifier": NOTHING,
        "service_tier": (None, "auto", "default"),
        "stream_options": (*EMPTY, {"include_obfuscation": False}),
        "top_logprobs": (None, 0),
        "truncation": (None, "disabled"),
    }

    model: str | None = Field(None, max_length=1024)
    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: str | None = Field(None, description="a system message before all others")
    max_output_tokens: TokenCount | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = True
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, Annotated[str, Field(max_length=512)]] | None = Field(
        None, max_length=16, description="comes back in the response"
    )
    store: bool | None = Field(None, description="accepted: nothing is stored, and the response says so")
    stream: bool | None = False
    user: str | None = Field(None, max_length=256)


def as_chat(body: ResponsesRequest) -> ChatRequest:
    """Return the chat that a body means.

    Raises:
        GatewayError: it means none.
    """
    same = (
        *("model", "temperature", "top_p", "presence_penalty", "frequency_penalty"),
        *("parallel_tool_calls", "stream", "user"),
    )
    wanted: dict[str, Any] = {name: getattr(body, name) for name in same}
    wanted["messages"] = _messages(body)
    wanted["max_completion_tokens"] = body.max_output_tokens
    if body.reasoning is not None:
        wanted["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        wanted["response_format"] = _format(body.text.format)
    tools, choice = body.tools or [], body.tool_choice
    if isinstance(choice, AllowedTools):
        allowed = {tool.name for tool in choice.tools}
        tools, wanted["tool_choice"] = [tool for tool in tools if tool.name in allowed], choice.mode
    elif isinstance(choice, ChosenTool):
        wanted["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice != "auto" or tools:
        wanted["tool_choice"] = choice
    if tools:
        wanted["tools"] = [_tool(tool) for tool in tools]
    return chat_of(wanted)


def _tool(tool: FunctionTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude_unset=True, exclude={"type"})}


def _format(given: TextFormat) -> dict[str, Any]:
    if given.type != "json_schema":
        return {"type": given.type}
    named = {"name": given.name, "schema": given.schema_ or {}, "strict": given.strict}
    return {"type": "json_schema", "json_schema": named}


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    if body.instructions:
        turns.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*turns, {"role": "user", "content": body.input}]
    names: dict[str | None, str | None] = {}
    thoughts = ""
    for number, item in enumerate(body.input):
        if item.type == "reasoning":
            thoughts = _joined(item.content or item.summary)
        elif item.type == "function_call_output":
            name = names.get(item.call_id)
            result = {"role": "tool", "content": _joined(item.output), "tool_call_id": item.call_id}
            turns.append(result | ({"name": name} if name else {}))
        elif item.type == "function_call":
            names[item.call_id] = item.name
            turn = _assistant_turn(turns)
            turn.setdefault("tool_calls", []).append(_call(item))
            thoughts = _leave_thoughts(turn, thoughts)
        else:
            turns.append(_message(number, item))
            if item.role == "assistant":
                thoughts = _leave_thoughts(turns[-1], thoughts)
    return _one_system_turn(turns)


def _message(number: int, item: InputItem) -> dict[str, Any]:
    if item.role is None or item.content is None:
        raise invalid(f"input[{number}]", f"input[{number}]: a message has role and content")
    # Templates know of one role for whoever sets the rules.
    role = "system" if item.role == "developer" else item.role
    return {"role": role, "content": _joined(item.content)}


def _assistant_turn(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the turn that a call belongs to, a new one unless the last is the assistant's."""
    if not turns or turns[-1]["role"] != "assistant":
        turns.append({"role": "assistant", "content": None})
    return turns[-1]


def _leave_thoughts(turn: dict[str, Any], thoughts: str) -> str:
    """Give a turn the thoughts that came before it; return those that are left: none."""
    if thoughts:
        turn["reasoning_content"] = thoughts
    return ""


def _call(item: InputItem) -> dict[str, Any]:
    function = {"name": item.name, "arguments": item.arguments or "{}"}
    return {"id": item.call_id, "type": "function", "function": function}


def _joined(content: str | Iterable[InputPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text or part.refusal or "" for part in content)


def _one_system_turn(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return turns whose first system messages are one: many templates take no second."""
    first = list(takewhile(lambda turn: turn["role"] == "system", turns))
    if len(first) < 2:
        return turns
    said = "\n\n".join(turn["content"] for turn in first)
    return [{"role": "system", "content": said}, *turns[len(first) :]]
