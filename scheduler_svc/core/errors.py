"""Why the core refuses or fails a request."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Reason(enum.StrEnum):
    """Stable reasons; the shell maps each to a gRPC code."""

    QUEUE_FULL = "QUEUE_FULL"
    SHED = "SHED"
    BREAKER_OPEN = "BREAKER_OPEN"
    DEADLINE_INFEASIBLE = "DEADLINE_INFEASIBLE"
    QUEUE_TIMEOUT = "QUEUE_TIMEOUT"
    TTFT_DEADLINE = "TTFT_DEADLINE"
    DEADLINE_QUEUED = "DEADLINE_QUEUED"
    DEADLINE_RUNNING = "DEADLINE_RUNNING"
    CANCELLED = "CANCELLED"
    UNKNOWN_MODEL = "UNKNOWN_MODEL"
    NO_WORKER = "NO_WORKER"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    INVALID_GRAMMAR = "INVALID_GRAMMAR"
    DRAINING = "DRAINING"
    POISON = "POISON"
    STEP_FAILED = "STEP_FAILED"
    UNSUPPORTED = "UNSUPPORTED"
    DUPLICATE_REQUEST_ID = "DUPLICATE_REQUEST_ID"


@dataclass(frozen=True, slots=True)
class CoreError:
    """A refusal or failure, for people and programs."""

    reason: Reason
    message: str
    retry_after_s: float | None = None
    metadata: dict[str, str] = field(default_factory=dict)


class ProtocolViolationError(Exception):
    """A worker said something that its books do not allow; it is re-attached."""


class IllegalTransitionError(Exception):
    """A lifecycle was asked for a step that its table does not have; nothing was changed."""
