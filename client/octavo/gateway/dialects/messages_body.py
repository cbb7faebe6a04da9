"""Bodies of /v1/messages, as Anthropic's API has them, and the chats that they mean."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from octavo.gateway.dialects.chats import chat_of
from octavo.gateway.schemas import MAX_MESSAGES, MAX_PARTS, ChatRequest, StopStrings, TokenCount
from octavo.gateway.strict import EMPTY, MAX_TOOLS, NOTHING, Strict

RENAMED: Final[Mapping[str, str]] = {
    "sampling.max_tokens": "max_tokens",
    "sampling.stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
}
"""Parameters that have other names than elsewhere, by path in the proto."""
CacheControl = Annotated[dict[str, Any], Field(max_length=16)]
_CACHED: Final = "accepted: every prefix is cached as it is"


class TextBlock(Strict):
    """A text."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"citations": EMPTY}

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = Field(None, description=_CACHED)


Texts = str | Annotated[list[TextBlock], Field(max_length=MAX_PARTS, fail_fast=True)]


class ContentBlock(Strict):
    """Part of a message: text, thoughts, a call of a tool, or its result."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"citations": EMPTY, "caller": NOTHING}

    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: str | None = Field(None, max_length=256)
    name: str | None = Field(None, max_length=256)
    input: dict[str, Any] | None = None
    tool_use_id: str | None = Field(None, max_length=256)
    content: Texts | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = Field(None, description=_CACHED)


class Turn(Strict):
    """One turn of a conversation."""

    role: Literal["user", "assistant"]
    content: str | Annotated[list[ContentBlock], Field(max_length=MAX_PARTS, fail_fast=True)]


class InputTool(Strict):
    """A tool that the model may call."""

    type: Literal["custom"] | None = None
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = Field(None, description=_CACHED)


class InputToolChoice(Strict):
    """Whether the model calls tools, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, max_length=256)
    disable_parallel_tool_use: bool | None = False


class Thinking(Strict):
    """Whether the model thinks first, where its template lets it choose."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1, lt=2**31, description="where thoughts can be bounded")
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Strict):
    """A schema that the output follows."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """What the output is."""

    effort: str | None = Field(None, max_length=32)
    format: OutputFormat | None = None


class Metadata(Strict):
    """Who asks."""

    user_id: str | None = Field(None, max_length=256)


class CountTokensRequest(Strict):
    """Body of /v1/messages/count_tokens: the prompt of a message."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "cache_control": NOTHING,
        "context_management": NOTHING,
        "mcp_servers": EMPTY,
    }

    model: str = Field(max_length=1024)
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Texts | None = None
    tools: Annotated[list[InputTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: InputToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountTokensRequest):
    """Body of /v1/messages."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **CountTokensRequest.neutral,
        "container": NOTHING,
        "inference_geo": NOTHING,
        "service_tier": (None, "auto", "standard_only"),
        "speed": (None, "standard"),
    }

    max_tokens: TokenCount
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=2**31)
    stop_sequences: StopStrings | None = None
    stream: bool | None = False
    metadata: Metadata | None = None


def as_chat(body: CountTokensRequest) -> ChatRequest:
    """Return the chat that a body means.

    Raises:
        GatewayError: it means none.
    """
    wanted: dict[str, Any] = {"model": body.model, "messages": _messages(body)}
    if body.tools:
        wanted["tools"] = [_tool(tool) for tool in body.tools]
    if body.tool_choice is not None:
        wanted |= _choice(body.tool_choice)
    # Whoever wants thoughts says so here.
    thinks = body.thinking is not None and body.thinking.type != "disabled"
    wanted["chat_template_kwargs"] = {"enable_thinking": thinks}
    if body.thinking is not None and thinks:
        wanted["thinking_token_budget"] = body.thinking.budget_tokens
    if body.output_config is not None:
        wanted["reasoning_effort"] = body.output_config.effort
        if (shape := body.output_config.format) is not None:
            wanted["response_format"] = {"type": "json_schema", "json_schema": {"schema": shape.schema_}}
    if isinstance(body, MessagesRequest):
        same = ("max_tokens", "temperature", "top_p", "top_k", "stream")
        wanted |= {name: getattr(body, name) for name in same}
        wanted["stop"] = body.stop_sequences
        wanted["user"] = body.metadata.user_id if body.metadata is not None else None
    return chat_of(wanted)


def _tool(tool: InputTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    if tool.description is None:
        del function["description"]
    return {"type": "function", "function": function}


def _choice(choice: InputToolChoice) -> dict[str, Any]:
    named: object = {"auto": "auto", "any": "required", "none": "none"}.get(choice.type)
    if choice.type == "tool":
        named = {"type": "function", "function": {"name": choice.name or ""}}
    return {"tool_choice": named, "parallel_tool_calls": not choice.disable_parallel_tool_use}


def _messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _joined(body.system)})
    names: dict[str, str] = {}
    for turn in body.messages:
        if isinstance(turn.content, str):
            messages.append({"role": turn.role, "content": turn.content})
        elif turn.role == "assistant":
            messages.append(_assistant(turn.content, names))
        else:
            messages += _user(turn.content, names)
    return messages


def _joined(texts: str | list[TextBlock] | None) -> str:
    return "\n".join(text.text for text in texts) if isinstance(texts, list) else texts or ""


def _assistant(blocks: list[ContentBlock], names: dict[str, str]) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": "assistant", "content": _words(blocks)}
    thoughts = "".join(block.thinking or "" for block in blocks)
    if thoughts:
        turn["reasoning_content"] = thoughts
    calls = [block for block in blocks if block.type == "tool_use"]
    names.update({block.id or "": block.name or "" for block in calls})
    if calls:
        turn["tool_calls"] = [_call(block) for block in calls]
    return turn


def _call(block: ContentBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": json.dumps(block.input or {}, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


def _user(blocks: list[ContentBlock], names: dict[str, str]) -> list[dict[str, Any]]:
    """Return the results of tools, then what the user says."""
    turns: list[dict[str, Any]] = [
        {
            "role": "tool",
            "content": _joined(block.content),
            "tool_call_id": block.tool_use_id,
            "name": names.get(block.tool_use_id or ""),
        }
        for block in blocks
        if block.type == "tool_result"
    ]
    if not turns or any(block.type == "text" for block in blocks):
        turns.append({"role": "user", "content": _words(blocks)})
    return turns


def _words(blocks: list[ContentBlock]) -> str:
    return "\n".join(block.text or "" for block in blocks if block.type == "text")
