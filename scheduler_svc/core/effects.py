"""What the core wants done, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from octavo.protocol.steps import FinishReason, Plan, TokenLogprobs

from scheduler_svc.core.errors import CoreError


@dataclass(frozen=True, slots=True)
class SendPlan:
    """Send a plan to a worker."""

    worker_id: str
    plan: Plan


@dataclass(frozen=True, slots=True)
class SendCancel:
    """Tell a worker to drop sequences at its next step boundary."""

    worker_id: str
    handles: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DetachWorker:
    """Drop the stream to a worker and attach anew; the core has already let go of it."""

    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class RequestAccepted:
    """The request is in the queue."""

    request_id: str
    queue_position: int
    estimated_wait_s: float | None
    estimated_ttft_s: float | None = None
    level: int = 0
    """Degradation level, 0 to 4."""


class TokenDelta(NamedTuple):
    """New tokens of one choice. A tuple because one is made per sequence and step."""

    request_id: str
    choice: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None


@dataclass(frozen=True, slots=True)
class EmitTokens:
    """Tokens for clients: all of one report."""

    deltas: list[TokenDelta]


@dataclass(frozen=True, slots=True)
class EmitPromptLogprobs:
    """Log probabilities of tokens of a prompt: each index once, in order."""

    request_id: str
    first_position: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class EmitEmbedding:
    """The vector of a prompt."""

    request_id: str
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ChargeTenant:
    """What a step has computed of one choice beside the tokens that it emits.

    Also for a request that has ended: a worker may be computing it until it hears of that.
    """

    request_id: str
    tenant: str
    prompt_tokens: int
    """Of prompt and resumed tokens; never twice for the same token of a choice."""
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ChoiceTimings:
    """Where the time of a choice went, in seconds since the request arrived."""

    queue_s: float
    ttft_s: float | None
    tpot_s: float
    total_s: float
    preemptions: int
    recoveries: int


@dataclass(frozen=True, slots=True)
class FinishChoice:
    """A choice has ended; nothing more comes for it."""

    request_id: str
    choice: int
    reason: FinishReason
    stop_token_id: int | None
    cached_tokens: int
    completion_tokens: int
    timings: ChoiceTimings
    error: CoreError | None
    last: bool
    """No other choice of the request remains."""


@dataclass(frozen=True, slots=True)
class Reject:
    """The request as a whole is refused, or failed before any of its choices ended."""

    request_id: str
    error: CoreError


@dataclass(frozen=True, slots=True)
class LogEvent:
    """Something worth a log line."""

    name: str
    fields: dict[str, object]


Effect = (
    SendPlan
    | SendCancel
    | DetachWorker
    | RequestAccepted
    | EmitTokens
    | EmitPromptLogprobs
    | EmitEmbedding
    | ChargeTenant
    | FinishChoice
    | Reject
    | LogEvent
)
