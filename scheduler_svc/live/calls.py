"""What clients ask for, validated once at the edge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from octavo.protocol.steps import Priority
from octavo.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text."""

    text: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation: a serialized octavo.v1.Chat, parsed where it is rendered."""

    packed: bytes


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids: a serialized octavo.v1.TokenIds, parsed where it is checked."""

    packed: bytes


@dataclass(frozen=True, slots=True)
class ServiceTerms:
    """What a client asks of the service. Durations in seconds; None takes the default."""

    priority: Priority = Priority.STANDARD
    queue_timeout_s: float | None = None
    ttft_deadline_s: float | None = None
    deadline_s: float | None = None
    cache_salt: str = ""
    may_trim: bool = False
    """The prompt may be shortened and max_tokens lowered under load."""
    keep_head_tokens: int = 0
    keep_tail_tokens: int = 0
    may_shed: bool = False
    """It may be refused before others under load."""


@dataclass(frozen=True, slots=True)
class ResumedChoice:
    """What one choice had generated, and how much of its text was shown."""

    token_ids: tuple[int, ...]
    shown_bytes: int


@dataclass(frozen=True, slots=True)
class AcceptedAs:
    """How a request was accepted before its stream was lost."""

    prompt_tokens: int
    """Of its prompt as it was computed."""
    max_tokens: int | None
    """What max_tokens was lowered to, if it was."""


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A request, right in itself; what depends on the model is checked when it is admitted."""

    request_id: str
    model: str
    """Empty: the one model that is served."""
    prompt: TextPrompt | ChatPrompt | TokenPrompt
    sampling: SamplingParams
    terms: ServiceTerms = ServiceTerms()
    resumed: Mapping[int, ResumedChoice] = field(default_factory=dict)
    accepted_as: AcceptedAs | None = None
    """Set only for a request that may be trimmed."""
    return_token_ids: bool = False
    skip_text: bool = False
    keep_special_tokens: bool = False
