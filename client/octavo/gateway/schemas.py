"""Bodies of requests, as the OpenAI API and `vllm serve` have them.

What is not here is refused by name. `neutral` lists parameters that are known elsewhere and not
supported here: a client may send them with a value that asks for nothing. `null` is the same as leaving
a parameter out, for every one that may be left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from octavo.gateway.errors import MAX_FAULTS
from octavo.gateway.strict import EMPTY as _EMPTY
from octavo.gateway.strict import FALSE as _FALSE
from octavo.gateway.strict import MAX_TOOLS, Strict
from octavo.gateway.strict import NOTHING as _NOTHING
from octavo.gateway.strict import conflict as _conflict
from octavo.gateway.tools import ToolChoice, Tools
from octavo.protocol.bounds import BOUNDS, MAX_ORDER, MAX_PROMPT_TOKENS
from octavo.sampling import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_SEQUENCE_TOKENS,
    MAX_BAD_SEQUENCES,
    MAX_BAD_WORD_BYTES,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_SEED,
    MAX_STOP_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)

MAX_PROMPTS: Final = 256
MAX_INPUTS: Final = 2048
"""Of a request for embeddings, as OpenAI has it."""
MAX_MESSAGES: Final = 4096
MAX_PARTS: Final = 4096
DEFAULT_COMPLETION_TOKENS: Final = 16

TokenId = Annotated[int, Field(ge=0, lt=2**32)]
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenCount = Annotated[int, Field(ge=1, lt=2**31)]
# The first wrong item of a list speaks for all: to tell of a million takes more than to serve thousands.
Tokens = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT_TOKENS, fail_fast=True)]
StopString = Annotated[str, Field(max_length=MAX_STOP_BYTES)]
StopStrings = StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)]
BadSequences = Annotated[
    list[Annotated[list[TokenId], Field(min_length=1, max_length=MAX_BAD_SEQUENCE_TOKENS, fail_fast=True)]],
    Field(max_length=MAX_BAD_SEQUENCES, fail_fast=True),
]
PromptTokens = Literal[-1] | Annotated[int, Field(ge=1, lt=2**31)]
BadWords = Annotated[
    list[Annotated[str, Field(max_length=MAX_BAD_WORD_BYTES)]],
    Field(max_length=MAX_BAD_WORDS, fail_fast=True),
]
Grammar = Annotated[str, Field(max_length=BOUNDS["StructuredOutput.grammar"].bytes)]
Choices = Annotated[
    list[str], Field(min_length=1, max_length=BOUNDS["ChoiceList.values"].count, fail_fast=True)
]
Objects = Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)]


def _first_fault(data: object) -> object:
    """Return biases, or only the first that is wrong: it speaks for all."""
    if isinstance(data, dict):
        for token, bias in data.items():
            if type(bias) not in (int, float) or not -100 <= bias <= 100 or not str(token).isdecimal():
                return {token: bias}
    return data


def _bounded_parts(data: object) -> object:
    """Refuse a part with many unknown names before each of them is complained about."""
    if isinstance(data, list):
        for number, part in enumerate(data):
            if isinstance(part, dict) and len(part) > MAX_FAULTS:
                return [*data[:number], {name: part[name] for name in islice(part, MAX_FAULTS)}]
    return data


class StreamOptions(Strict):
    """What a stream says beside the output."""

    include_usage: bool | None = Field(False, description="a last event with the usage")
    continuous_usage_stats: bool | None = Field(False, description="usage so far in every event")
    include_obfuscation: Literal[False] | None = Field(False, description="events are never padded")


class JsonSchema(Strict):
    """A schema that the output follows."""

    name: str | None = Field("", max_length=256)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(None, description="the output always follows the schema")


class ResponseFormat(Strict):
    """What the output is."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    format: dict[str, Any] | None = Field(None, description="of a structural tag of xgrammar")
    structures: Objects | None = Field(None, description="of one in its older form: begin, schema, end")
    triggers: Annotated[list[str], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        None, description="with `structures`: texts that begin one of them"
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise _conflict("json_schema", "goes with the type json_schema, and only with it")
        tagged = self.format is not None or (self.structures is not None and self.triggers is not None)
        if (self.type == "structural_tag") != tagged:
            raise _conflict("format", "goes with the type structural_tag, and only with it")
        return self


class StructuredOutputs(Strict):
    """One constraint on the output, in the terms of `vllm serve`."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "whitespace_pattern": _NOTHING,
        "disable_additional_properties": _FALSE,
    }

    json_: dict[str, Any] | Grammar | None = Field(None, alias="json")
    regex: Grammar | None = None
    choice: Choices | None = None
    grammar: Grammar | None = None
    json_object: bool | None = None
    structural_tag: Grammar | None = None
    disable_any_whitespace: bool | None = None

    @model_validator(mode="after")
    def _only_one(self) -> Self:
        texts = [self.json_, self.regex, self.grammar, self.structural_tag]
        if sum(one is not None for one in [*texts, self.choice, self.json_object or None]) != 1:
            names = "json, regex, choice, grammar, json_object and structural_tag"
            raise ValueError(f"exactly one of {names} must be given")
        return self


class GenerationRequest(Strict):
    """What completions and chats share."""

    model: str | None = Field(None, max_length=1024, description="may be left out when one model is served")
    temperature: float | None = Field(None, ge=0, description="0 is greedy")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="0 and -1 keep all")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), le=MAX_SEED)
    logit_bias: (
        Annotated[dict[TokenId, Bias], Field(max_length=MAX_LOGIT_BIASES), BeforeValidator(_first_fault)]
        | None
    ) = None
    n: int | None = Field(1, ge=1, le=MAX_N)
    stop: StopStrings | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None = (
        None
    )
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    allowed_token_ids: (
        Annotated[list[TokenId], Field(max_length=MAX_ALLOWED_TOKEN_IDS, fail_fast=True)] | None
    ) = None
    bad_words: BadWords | None = None
    bad_words_token_ids: BadSequences | None = Field(None, description="as bad_words, given as tokens")
    include_stop_str_in_output: bool | None = None
    logprob_token_ids: (
        Annotated[list[TokenId], Field(max_length=MAX_LOGPROB_TOKEN_IDS, fail_fast=True)] | None
    ) = Field(None, description="tokens whose log probabilities are told instead of those of the best ones")
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="not with stream")
    priority: int | None = Field(
        None, ge=-MAX_ORDER, le=MAX_ORDER, description="order within the class; lower goes first"
    )
    stream_interval: int | None = Field(
        None, ge=1, lt=2**31, description="tokens of an event at least, but for the first and the last"
    )
    truncate_prompt_tokens: PromptTokens | None = Field(
        None, description="tokens at the end of the prompt to keep at most; -1: as many as fit"
    )
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: str | None = Field(
        None, min_length=1, max_length=1024, description="narrows who shares cached prefixes with it"
    )
    return_token_ids: bool | None = Field(None, description="token ids beside the text of each choice")
    return_tokens_as_token_ids: bool | None = Field(
        None, description="tokens of logprobs are called token_id:N"
    )
    user: str | None = Field(None, max_length=256, description="named in the gateway's log of requests")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise _conflict("stream_options", "needs stream to be true")
        if self.prompt_logprobs is not None and self.stream:
            raise _conflict("prompt_logprobs", "is not available with stream")
        constrained = self.response_format is not None and self.response_format.type != "text"
        if constrained and self.structured_outputs is not None:
            raise _conflict("structured_outputs", "excludes response_format")
        return self


_UNSUPPORTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "ec_transfer_params": _NOTHING,
    "kv_transfer_params": _NOTHING,
    "length_penalty": (None, 1, 1.0),
    "logits_processors": _EMPTY,
    "metadata": _EMPTY,
    "repetition_detection": _NOTHING,
    "service_tier": (None, "auto", "default"),
    "spaces_between_special_tokens": (None, True),
    "store": _FALSE,
    "use_beam_search": _FALSE,
    "vllm_xargs": _EMPTY,
}


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **_UNSUPPORTED,
        "add_special_tokens": (None, True),
        "best_of": (None, 1),
        "prompt_embeds": _EMPTY,
        "suffix": (None, ""),
        "thinking_token_budget": (None, -1),
    }

    prompt: (
        str
        | Tokens
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    ) = Field(description="text or token ids; a list of either makes n choices for each")
    max_tokens: int | None = Field(
        DEFAULT_COMPLETION_TOKENS, ge=0, lt=2**31, description="0 needs echo or prompt_logprobs"
    )
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = Field(False, description="the text begins with the prompt")

    @model_validator(mode="after")
    def _belongs_together(self) -> Self:
        if self.logprob_token_ids and self.logprobs is None:
            raise _conflict("logprob_token_ids", "needs logprobs")
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise _conflict("max_tokens", "must be at least 1 without echo and prompt_logprobs")
        return self

    @property
    def scored(self) -> int | None:
        """How many best tokens are wanted in the place of each of the prompt; None where it is not scored."""
        if self.prompt_logprobs is None and self.echo and self.logprobs is not None:
            return self.logprobs
        # What generates nothing still has to ask for something.
        return 0 if self.prompt_logprobs is None and self.max_tokens == 0 else self.prompt_logprobs


class ContentPart(BaseModel):
    """Part of a message. There may be thousands, so nothing is asked of each in Python."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["text"] = Field(description="only text")
    text: str


class Message(Strict):
    """One turn of a conversation."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "annotations": _EMPTY,
        "audio": _NOTHING,
        "function_call": _NOTHING,
        "refusal": (None, ""),
    }

    role: str = Field(max_length=64, description="system, user, assistant, tool, or one of the model's own")
    content: (
        str
        | Annotated[
            list[ContentPart], Field(max_length=MAX_PARTS, fail_fast=True), BeforeValidator(_bounded_parts)
        ]
        | None
    ) = Field(None, description="parts are joined by line breaks")
    name: str | None = Field(None, max_length=256)
    tool_calls: Objects | None = None
    tool_call_id: str | None = Field(None, max_length=256)
    reasoning_content: str | None = Field(None, description="what the model had thought before it")
    reasoning: str | None = Field(None, description="the same, as some clients call it")

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and not self.tool_calls and self.thoughts is None:
            raise _conflict("content", "must be given")
        return self

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""

    @property
    def thoughts(self) -> str | None:
        """What the model had thought."""
        return self.reasoning_content or self.reasoning


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ChatRequest(GenerationRequest):
    """Body of /v1/chat/completions."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **_UNSUPPORTED,
        "add_special_tokens": _FALSE,
        "audio": _NOTHING,
        "chat_template": _NOTHING,
        "echo": _FALSE,
        "function_call": (None, "none"),
        "functions": _EMPTY,
        "media_io_kwargs": _EMPTY,
        "mm_processor_kwargs": _EMPTY,
        "modalities": (None, ["text"]),
        "prediction": _NOTHING,
        "safety_identifier": _NOTHING,
        "prompt_cache_key": _NOTHING,
        "verbosity": _NOTHING,
        "web_search_options": _NOTHING,
    }

    messages: Messages
    max_tokens: TokenCount | None = Field(None, json_schema_extra={"deprecated": True})
    max_completion_tokens: TokenCount | None = Field(None, description="by default what the context leaves")
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Tools | None = Field(None, description="given to the model's template")
    tool_choice: ToolChoice | None = Field(None, description="auto when there are tools, by default")
    parallel_tool_calls: bool | None = Field(True, description="more than one call in an answer")
    reasoning_effort: str | None = Field(
        None, max_length=32, description="variable for the template; none also sets enable_thinking to false"
    )
    thinking_token_budget: int | None = Field(
        None, ge=-1, lt=2**31, description="most tokens of thoughts; -1 is no bound"
    )
    include_reasoning: bool | None = Field(True, description="the answer has the model's thoughts")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables for the template")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(None, description="the output goes on with the last message")
    documents: Objects | None = Field(None, description="given to the model's template")

    @model_validator(mode="after")
    def _belongs_together(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise _conflict("top_logprobs", "needs logprobs to be true")
        if self.logprob_token_ids and not self.logprobs:
            raise _conflict("logprob_token_ids", "needs logprobs to be true")
        if self.continue_final_message and self.add_generation_prompt:
            raise _conflict("continue_final_message", "does not go with add_generation_prompt")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise _conflict("max_tokens", "contradicts max_completion_tokens")
        return self


class TokenizeRequest(Strict):
    """Body of /tokenize: a prompt, or messages."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "chat_template": _NOTHING,
        "continue_final_message": _FALSE,
        "media_io_kwargs": _EMPTY,
        "mm_processor_kwargs": _EMPTY,
    }

    model: str | None = Field(None, max_length=1024)
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(None, description="by default true for a prompt")
    return_token_strs: bool | None = False
    tools: Objects | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise _conflict("prompt", "one of prompt and messages must be given")
        if self.messages is not None and self.add_special_tokens:
            raise _conflict("add_special_tokens", "is not supported with messages: the template adds them")
        if self.prompt is not None and (self.tools or self.chat_template_kwargs):
            raise _conflict("tools", "tools and chat_template_kwargs go with messages")
        return self


class EmbeddingRequest(Strict):
    """Body of /v1/embeddings."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "add_special_tokens": (None, True),
        "dimensions": _NOTHING,
        "mm_processor_kwargs": _EMPTY,
        "normalize": (None, True),
        "use_activation": (None, True),
    }

    model: str | None = Field(None, max_length=1024)
    input: (
        str
        | Tokens
        | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
        | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
    ) = Field(description="text or token ids, or a list of either")
    encoding_format: Literal["float", "base64"] | None = Field(
        "float", description="base64: of float32 numbers, little endian"
    )
    pooling: Literal["last", "mean"] | None = Field(
        "last", description="of the hidden states: that of the last token, or their mean"
    )
    truncate_prompt_tokens: PromptTokens | None = None
    priority: int | None = Field(None, ge=-MAX_ORDER, le=MAX_ORDER)
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    user: str | None = Field(None, max_length=256)


class DetokenizeRequest(Strict):
    """Body of /detokenize."""

    model: str | None = Field(None, max_length=1024)
    tokens: list[TokenId] = Field(max_length=MAX_PROMPT_TOKENS, fail_fast=True)
