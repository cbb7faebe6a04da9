"""From bodies and headers of HTTP to requests of the SDK."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, cast

from octavo._sdk.channel import check_api_key
from octavo.errors import InvalidRequestError
from octavo.gateway.constraints import structured_of
from octavo.gateway.errors import CHALLENGE, Failure, GatewayError, invalid
from octavo.gateway.schemas import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    GenerationRequest,
    Message,
)
from octavo.gateway.tools import ToolUse, tool_use
from octavo.protocol.bounds import short
from octavo.sampling import SamplingParams
from octavo.types import ChatMessage, ChatOptions, GenerateOptions, Prompt, TemplateOptions

HEADER_PREFIX: Final = "x-octavo-"
PRIORITIES: Final = ("interactive", "standard", "batch")
DEGRADE_POLICIES: Final = ("may_trim", "may_shed")
_MILLISECONDS: Final = {
    "x-octavo-queue-timeout-ms": "queue_timeout",
    "x-octavo-ttft-deadline-ms": "ttft_deadline",
    "x-octavo-deadline-ms": "deadline",
}
_COUNTS: Final = {
    "x-octavo-keep-head-tokens": "keep_head_tokens",
    "x-octavo-keep-tail-tokens": "keep_tail_tokens",
}
_MAX_UINT32: Final = 2**32 - 1
_OTHERWISE: Final = {"top_k", "seed", "logit_bias", "stop", "max_tokens", "logprobs", "structured"}
_PROMPT: Final = ("cache_salt", "truncate_prompt_tokens")
"""Sampling parameters that HTTP has in another form than the SDK."""
_SAME: Final = ({one.name for one in fields(SamplingParams)} - _OTHERWISE) | {*_PROMPT, "stream_interval"}

HEADERS: Final[Mapping[str, str]] = {
    "x-octavo-priority": "interactive, standard (the default) or batch",
    "x-octavo-queue-timeout-ms": "longest wait in the queue; 0: start at once or not at all",
    "x-octavo-ttft-deadline-ms": "time until the first token",
    "x-octavo-deadline-ms": "time until the end",
    "x-octavo-degrade": "may_trim, may_shed, or both with a comma: what may be done under load",
    "x-octavo-keep-head-tokens": "tokens at the head of the prompt that trimming keeps",
    "x-octavo-keep-tail-tokens": "tokens at its tail that trimming keeps",
}
"""Headers of requests and what they mean."""


@dataclass(frozen=True, slots=True)
class ChatJob:
    """A conversation and what is wanted of it."""

    messages: list[ChatMessage]
    options: ChatOptions
    template: TemplateOptions
    """Of the options, how the conversation is rendered."""
    tools: ToolUse


def prompts(prompt: object) -> list[Prompt]:
    """Return the prompts of a request that may have one or several."""
    assert isinstance(prompt, str | list)
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [cast("Prompt", prompt)]
    return cast("list[Prompt]", prompt)


def completion_options(request: CompletionRequest, headers: Mapping[str, str]) -> GenerateOptions:
    """Return the options that all prompts of a request have.

    Raises:
        GatewayError: a header is wrong.
    """
    options = _options(request, headers)
    if request.max_tokens is not None:
        options["max_tokens"] = request.max_tokens
    if request.logprobs is not None:
        options["logprobs"] = request.logprobs
    if request.scored is not None:
        options["prompt_logprobs"] = request.scored
    return cast("GenerateOptions", options)


def embedding_options(request: EmbeddingRequest, headers: Mapping[str, str]) -> GenerateOptions:
    """Return the options that all inputs of a request have; raises as `completion_options` does."""
    options: dict[str, Any] = terms(headers)
    options.update(api_key=bearer_key(headers), pooling=request.pooling or "last", skip_text=True)
    options.update({name: getattr(request, name) for name in (*_PROMPT, "model")})
    options["order"] = request.priority
    return cast("GenerateOptions", options)


def chat_job(request: ChatRequest, headers: Mapping[str, str]) -> ChatJob:
    """Return the conversation and its options; raises as `completion_options` does."""
    options = _options(request, headers)
    max_tokens = request.max_completion_tokens or request.max_tokens
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    if request.logprobs:
        options["logprobs"] = request.top_logprobs or 0
    budget = request.thinking_token_budget
    if budget is not None and budget >= 0:
        options["thinking_token_budget"] = budget
    tools = [tool.model_dump(exclude_unset=True) for tool in request.tools or ()]
    template = template_options(tools, _template_vars(request), request.add_generation_prompt)
    if request.continue_final_message:
        template["continue_final_message"] = True
    if request.documents:
        template["documents"] = request.documents
    options.update(template)
    use = tool_use(request.tools, request.tool_choice, parallel=request.parallel_tool_calls)
    if use.forced:
        options["structured"] = use.structured()
    return ChatJob(chat_messages(request.messages), cast("ChatOptions", options), template, use)


def _template_vars(request: ChatRequest) -> dict[str, Any]:
    """Return the variables of the template; those given by name go before what the effort means."""
    effort = request.reasoning_effort
    found = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return {**found, **(request.chat_template_kwargs or {})}


def chat_messages(messages: list[Message]) -> list[ChatMessage]:
    """Return a conversation."""
    return [
        ChatMessage(turn.role, turn.text, turn.name, turn.tool_calls or (), turn.tool_call_id, turn.thoughts)
        for turn in messages
    ]


def template_options(
    tools: list[dict[str, Any]] | None,
    variables: Mapping[str, Any] | None,
    add_generation_prompt: bool | None,
) -> TemplateOptions:
    """Return how a conversation is rendered."""
    options: TemplateOptions = {}
    if tools:
        options["tools"] = tools
    if variables:
        options["template_vars"] = variables
    if add_generation_prompt is not None:
        options["add_generation_prompt"] = add_generation_prompt
    return options


def _options(request: GenerationRequest, headers: Mapping[str, str]) -> dict[str, Any]:
    options: dict[str, Any] = terms(headers)
    options["api_key"] = bearer_key(headers)
    for name in _SAME:
        value = getattr(request, name)
        if value is not None:
            options[name] = value
    if request.model:
        options["model"] = request.model
    if request.priority is not None:
        options["order"] = request.priority
    if request.top_k is not None:
        options["top_k"] = max(0, request.top_k)
    if request.seed is not None:
        # `vllm serve` takes negative ones.
        options["seed"] = request.seed % 2**64
    if request.stop:
        options["stop"] = request.stop
    if request.logit_bias:
        options["logit_bias"] = request.logit_bias
    if request.skip_special_tokens is False:
        options["keep_special_tokens"] = True
    structured = structured_of(request)
    if structured is not None:
        options["structured"] = structured
    return options


def terms(headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the terms of service that the headers of a request ask for.

    Raises:
        GatewayError: a header of ours is unknown or wrong.
    """
    found: dict[str, Any] = {}
    for name, value in headers.items():
        if not name.startswith(HEADER_PREFIX):
            continue
        if name == "x-octavo-priority":
            if value.lower() not in PRIORITIES:
                raise invalid(name, f"{name}: must be one of {', '.join(PRIORITIES)}, got {short(value)!r}")
            found["priority"] = value.lower()
        elif name == "x-octavo-degrade":
            policies = [part.strip().lower() for part in value.split(",")]
            if any(policy not in DEGRADE_POLICIES for policy in policies):
                raise invalid(
                    name,
                    f"{name}: must be {' and '.join(DEGRADE_POLICIES)}, or one of them, got {short(value)!r}",
                )
            found.update(dict.fromkeys(policies, True))
        elif name in _MILLISECONDS:
            found[_MILLISECONDS[name]] = _count(name, value) / 1000
        elif name in _COUNTS:
            found[_COUNTS[name]] = _count(name, value)
        else:
            raise invalid(
                short(name), f"{short(name)}: unknown header; there is {', '.join(HEADERS)}", "unknown_header"
            )
    return found


def _count(name: str, value: str) -> int:
    if not (value.isascii() and value.isdigit()) or len(value) > 10 or int(value) > _MAX_UINT32:
        raise invalid(name, f"{name}: must be a whole number from 0 to {_MAX_UINT32}, got {short(value)!r}")
    return int(value)


def bearer_key(headers: Mapping[str, str]) -> str:
    """Return the API key of a request, empty when it has none: never the gateway's own.

    It is a bearer token, or in the header that Anthropic's clients use.

    Raises:
        GatewayError: nobody can have such a key, since it cannot be passed on.
    """
    scheme, _, given = headers.get("authorization", "").partition(" ")
    key = given.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()
    try:
        check_api_key(key)
    except InvalidRequestError as error:
        failure = Failure(401, error.message, "invalid_api_key", retry=False, headers=CHALLENGE)
        raise GatewayError(failure) from None
    return key


def renamed(request: GenerationRequest) -> Mapping[str, str]:
    """Return the parameters that this request has under other names, by path in the proto."""
    names = {"terms.order": "priority"}
    if request.structured_outputs is not None:
        names["sampling.structured"] = "structured_outputs"
    if isinstance(request, ChatRequest):
        if request.max_completion_tokens is not None:
            names["sampling.max_tokens"] = "max_completion_tokens"
        if request.top_logprobs is not None:
            names["sampling.logprobs"] = "top_logprobs"
    return names
