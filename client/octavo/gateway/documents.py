"""The OpenAPI document: what answers look like, and which headers there are."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import BaseModel

from octavo.gateway.routes import Route
from octavo.gateway.translate import DEGRADE_POLICIES, HEADERS, PRIORITIES


class ErrorBody(BaseModel):
    """What went wrong. `param` names the parameter or header at fault."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(BaseModel):
    """An error, as OpenAI's."""

    error: ErrorBody


class AnthropicErrorBody(BaseModel):
    """What went wrong."""

    type: str
    message: str


class AnthropicErrorAnswer(BaseModel):
    """An error, as Anthropic's."""

    type: Literal["error"]
    error: AnthropicErrorBody


class PromptTokensDetails(BaseModel):
    """Prompt tokens that were found in the cache, and those that were trimmed away under load."""

    cached_tokens: int
    trimmed_tokens: int


class CompletionTokensDetails(BaseModel):
    """`clamped_max_tokens`: the limit in force, where it was lowered under load."""

    clamped_max_tokens: int


class UsageAnswer(BaseModel):
    """What a request cost."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class CompletionLogprobsAnswer(BaseModel):
    """Log probabilities of a completion."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptTokenAnswer(BaseModel):
    """A token in the place of one of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobsAnswer = list[dict[str, PromptTokenAnswer] | None]
"""For each token of the prompt: by token id, itself and the best ones; the first has none."""


class _ChoiceAnswer(BaseModel):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class CompletionChoice(_ChoiceAnswer):
    """One completion."""

    text: str
    logprobs: CompletionLogprobsAnswer | None
    prompt_logprobs: PromptLogprobsAnswer | None = None


class CompletionAnswer(BaseModel):
    """Completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageAnswer


class TokenAnswer(BaseModel):
    """A token; `bytes` are its own, also where it is a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class PositionAnswer(TokenAnswer):
    """The sampled token of a position, and the best ones."""

    top_logprobs: list[TokenAnswer]


class ChatLogprobsAnswer(BaseModel):
    """Log probabilities of a message."""

    content: list[PositionAnswer]
    refusal: None


class CalledFunction(BaseModel):
    """A function and its arguments, as JSON text."""

    name: str
    arguments: str


class ToolCallAnswer(BaseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class MessageAnswer(BaseModel):
    """What the model says, what it thought before, and what it calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallAnswer] | None = None


class ChatChoice(_ChoiceAnswer):
    """One answer."""

    message: MessageAnswer
    logprobs: ChatLogprobsAnswer | None


class ChatAnswer(BaseModel):
    """Answers in a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageAnswer
    prompt_logprobs: PromptLogprobsAnswer | None = None


class EmbeddingItem(BaseModel):
    """The vector of one input, of length 1; as base64 where that was asked for."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    """What the inputs cost."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(BaseModel):
    """Vectors."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[EmbeddingItem]
    usage: EmbeddingUsage


class ModelAnswer(BaseModel):
    """A model by one of its names (`root` is the first), or an adapter of the model that is its `parent`.

    `workers` serve it now. `generation_defaults` are what a request gets that leaves them open.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    revision: str
    workers: int
    generation_defaults: dict[str, float]


class ModelsAnswer(BaseModel):
    """The models that are served."""

    object: Literal["list"]
    data: list[ModelAnswer]


class ResponseAnswer(BaseModel):
    """A response. `output` has items of the types reasoning, message and function_call."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any]


class MessagesAnswer(BaseModel):
    """A message. `content` has blocks of the types thinking, text and tool_use."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: dict[str, Any]


class TokenCountAnswer(BaseModel):
    """Tokens of a prompt."""

    input_tokens: int


class TokenizeAnswer(BaseModel):
    """Tokens of an input."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(BaseModel):
    """Text of tokens."""

    prompt: str


class HealthAnswer(BaseModel):
    """Whether requests can be served, and why not."""

    status: Literal["ok", "unavailable"]
    reason: str | None = None


class VersionAnswer(BaseModel):
    """Version of Octavo."""

    version: str


_ANSWERS: Final[dict[str, type[BaseModel]]] = {
    "completion": CompletionAnswer,
    "chat": ChatAnswer,
    "embeddings": EmbeddingsAnswer,
    "response": ResponseAnswer,
    "message": MessagesAnswer,
    "token_count": TokenCountAnswer,
    "models": ModelsAnswer,
    "model": ModelAnswer,
    "tokenize": TokenizeAnswer,
    "detokenize": DetokenizeAnswer,
    "health": HealthAnswer,
    "version": VersionAnswer,
}
_GENERATING: Final = ("completion", "chat", "response", "message")
_SCHEDULED: Final = (*_GENERATING, "embeddings")

ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    "4XX": {"model": ErrorAnswer, "description": "refused; see docs/gateway.md for the codes"},
    "5XX": {"model": ErrorAnswer, "description": "the service failed, or cannot serve now"},
}
"""What every route may answer."""
ANTHROPIC_ERRORS: Final = {status: {**said, "model": AnthropicErrorAnswer} for status, said in ERRORS.items()}


def answers(route: Route) -> dict[str, Any]:
    """Return what the document says of a route, as arguments of `add_api_route`."""
    kind = route.answer
    if kind == "metrics":
        content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
        return {"responses": {200: {"content": content}}, "response_model": None}
    answer: dict[str, Any] = {"model": _ANSWERS[kind]}
    found: dict[str, Any] = {"responses": {200: answer}, "response_model": None}
    if kind == "health":
        found["responses"][503] = {"model": HealthAnswer}
    if route.anthropic:
        found["responses"] |= ANTHROPIC_ERRORS
    if kind in _GENERATING:
        answer["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
    if kind in _SCHEDULED:
        found["openapi_extra"] = {"parameters": [_header(name) for name in HEADERS]}
    return found


def _header(name: str) -> dict[str, Any]:
    if name == "x-octavo-priority":
        schema: dict[str, Any] = {"type": "string", "enum": list(PRIORITIES)}
    elif name == "x-octavo-degrade":
        schema = {"type": "string", "enum": [*DEGRADE_POLICIES, ",".join(DEGRADE_POLICIES)]}
    else:
        schema = {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}
    return {"name": name, "in": "header", "required": False, "description": HEADERS[name], "schema": schema}
