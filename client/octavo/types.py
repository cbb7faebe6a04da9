"""What the SDK takes and returns. Nothing here knows of gRPC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from octavo.protocol.steps import FinishReason, Priority, TokenLogprobs
from octavo.sampling import SamplingOptions, SamplingParams

Prompt = str | Sequence[int]
"""Text, or token ids."""

PriorityName = Literal["interactive", "standard", "batch"]
PoolingName = Literal["last", "mean"]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str
    name: str | None = None
    tool_calls: Sequence[Mapping[str, Any]] = ()
    """Tool calls of an assistant turn, as in the OpenAI API."""
    tool_call_id: str | None = None
    reasoning: str | None = None
    """What the model had thought before an assistant turn. Templates may drop it."""


Messages = str | Sequence[ChatMessage | Mapping[str, Any]]
"""A conversation; plain text is one turn of the user."""


class GenerateOptions(SamplingOptions, total=False):
    """Everything about a request but its input. What is absent takes the model's or the class's default.

    Those of `SamplingOptions` mean what they mean in `SamplingParams`, and override those of `sampling`.
    """

    model: str
    request_id: str
    """Unique among the live requests of the service; drawn when absent."""
    sampling: SamplingParams
    response_format: type | Mapping[str, Any]
    """The same as `structured`, as in the OpenAI API; or a class of pydantic, and `GenerateResult.parsed` is
    an instance of it."""
    priority: Priority | PriorityName
    queue_timeout: float
    """Longest wait in the queue, in seconds. 0: start at once or not at all."""
    ttft_deadline: float
    """Seconds until the first token."""
    deadline: float
    """Seconds until the end."""
    may_trim: bool
    keep_head_tokens: int
    keep_tail_tokens: int
    may_shed: bool
    cache_salt: str
    skip_text: bool
    """Token ids only: nothing is detokenized."""
    keep_special_tokens: bool
    truncate_prompt_tokens: int
    """Keep so many tokens at the end of the prompt; -1: as many as fit."""
    stream_interval: int
    """Tokens of a delta at least, but for the first and the last of a choice."""
    order: int
    """Within the class, lower first; in [-1000, 1000]. 0 when absent."""
    pooling: PoolingName
    """Return the vector of the input, and no output: the hidden state of its last token, or their mean."""
    api_key: str
    """Key of the user for whom the request is made, if that is not who owns the client."""


class TemplateOptions(TypedDict, total=False):
    """How a conversation is rendered."""

    tools: Sequence[Mapping[str, Any]]
    """Tools offered to the model, as in the OpenAI API."""
    template_vars: Mapping[str, Any]
    """Variables for the chat template."""
    add_generation_prompt: bool
    """Append the header of an assistant turn; so it is when absent."""
    continue_final_message: bool
    """The output goes on with the last message."""
    documents: Sequence[Mapping[str, Any]]
    """For templates that take documents."""


class ChatOptions(GenerateOptions, TemplateOptions, total=False):
    """Options of a chat."""

    thinking_token_budget: int
    """Most tokens of thoughts, of a model that thinks; then they are ended."""


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One request of a batch: its input, and options that override those of the whole batch."""

    input: Prompt | Sequence[ChatMessage | Mapping[str, Any]]
    """Text or token ids, or a conversation."""
    options: Mapping[str, Any]
    """As in `GenerateOptions`, or `ChatOptions` for a conversation."""

    @property
    def is_chat(self) -> bool:
        """Whether the input is a conversation."""
        return not isinstance(self.input, str) and any(not isinstance(part, int) for part in self.input)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The service took the request."""

    queue_position: int
    estimated_wait_s: float | None
    prompt_tokens: int
    level: int
    """Degradation level at admission, 0 to 4."""
    seed: int
    trimmed_tokens: int = 0
    """Prompt tokens that were trimmed away under load."""
    clamped_max_tokens: int | None = None
    """max_tokens in force, when it was lowered under load."""
    in_reasoning: bool = False
    """The output goes on with thoughts that the prompt begins."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What came since the last delta of this choice. Text is whole characters and may be empty."""

    choice: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost, in tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    trimmed_tokens: int = 0
    clamped_max_tokens: int | None = None
    """max_tokens in force, when it was lowered under load."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time went, in seconds, as the service saw it."""

    queue_s: float = 0.0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    total_s: float = 0.0
    preemptions: int = 0
    recoveries: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the `n` outputs of a request. `finish_reason` is None in a partial result."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop: str | int | None = None
    """The stop string or token id that ended it."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    usage: Usage = Usage()
    timings: Timings = Timings()


@dataclass(frozen=True, slots=True)
class Progress:
    """What came since the last time: at most one delta for each choice, and the choices that have ended."""

    deltas: tuple[Delta, ...]
    ended: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """The outcome of a request."""

    request_id: str
    choices: tuple[Choice, ...]
    seed: int | None
    """The random stream that was used: give it again to get the same output."""
    level: int | None = None
    """Degradation level of the service at admission, 0 to 4."""
    in_reasoning: bool = False
    """The output goes on with thoughts that the prompt begins."""
    parsed: Any = None
    """The first choice, as an instance of the class that `response_format` named. None without one, and when
    the output did not come to its end, by max_tokens for instance."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token of the prompt, when asked for. The first follows nothing: its rank is 0."""
    embedding: tuple[float, ...] = ()
    """The vector of the prompt, when that was asked for."""

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Output tokens of the first choice."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the first choice ended."""
        return self.choices[0].finish_reason

    @property
    def timings(self) -> Timings:
        """Timings of the first choice."""
        return self.choices[0].timings

    @property
    def usage(self) -> Usage:
        """Usage of the request: the prompt once, the output of all choices."""
        first = self.choices[0].usage
        return Usage(
            prompt_tokens=first.prompt_tokens,
            completion_tokens=sum(choice.usage.completion_tokens for choice in self.choices),
            cached_tokens=first.cached_tokens,
            trimmed_tokens=first.trimmed_tokens,
            clamped_max_tokens=first.clamped_max_tokens,
        )


@dataclass(frozen=True, slots=True)
class EmbeddingResult:
    """Vectors of some inputs, in order."""

    embeddings: tuple[tuple[float, ...], ...]
    """Each of length 1."""
    prompt_tokens: int
    """Of all inputs."""


@dataclass(frozen=True, slots=True)
class Tokenization:
    """Token ids of an input, and the text of each when asked for."""

    token_ids: tuple[int, ...]
    pieces: tuple[str, ...]
    max_model_len: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that is served."""

    id: str
    revision: str
    max_model_len: int
    vocab_size: int
    has_chat_template: bool
    adapters: tuple[str, ...]
    workers: int
    """Workers that serve it now."""
    generation_defaults: Mapping[str, float] = field(default_factory=dict)
    """What a request gets that leaves temperature, top_p, top_k, min_p or repetition_penalty open."""
    aliases: tuple[str, ...] = ()
    """Further names that requests may use."""
    tool_format: str = ""
    """How its output has calls of tools; empty where that is not known."""
    reasoning_format: str = ""
    """How its output has thoughts; empty where it has none."""


@dataclass(frozen=True, slots=True)
class PinResult:
    """What came of a pin: a prefix of so many tokens, in full blocks."""

    tokens: int
    blocks: int
    workers: int
    """Workers that keep it, each block as soon as it is computed there."""
    without_room: tuple[str, ...] = ()
    """Ids of the workers of the model whose pin budget has no room for it."""


@dataclass(frozen=True, slots=True)
class WorkerAudit:
    """What came of the audit of one worker's books."""

    worker_id: str
    violation: str | None
    """The first invariant that does not hold."""
    problem: str | None
    """Why there is no verdict."""
    blocks: int
    """Size of its pool."""
    check_s: float
    """How long the check took, which is how long the next step waited."""

    @property
    def ok(self) -> bool:
        """Whether the audit was made and found nothing."""
        return self.violation is None and self.problem is None


@dataclass(frozen=True, slots=True)
class DrainResult:
    """What was left when the drain began."""

    running: int
    waiting: int
