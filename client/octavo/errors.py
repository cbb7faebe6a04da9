"""Errors that a client of Octavo sees, each with a stable `reason`; see docs/errors.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from octavo.types import GenerateResult


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One fault of the input: the path of the field as in the proto, and what is wrong with it."""

    field: str
    description: str


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """What the service says of a failure, whichever way it came."""

    reason: str
    message: str
    code: int = 2
    """Numeric google.rpc.Code."""
    retry_after_s: float | None = None
    violations: tuple[FieldViolation, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)


class OctavoError(Exception):
    """Root of the errors.

    Attributes:
        reason: stable and machine-readable, UPPER_SNAKE_CASE.
        message: for people.
        retry_after_s: when a retry makes sense, after this many seconds.
        metadata: facts behind the message, such as the limit that was passed.
        partial: what the request had generated when it failed, or None.
    """

    default_reason = "UNKNOWN"

    def __init__(self, message: str, info: ErrorInfo | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.reason: str = info.reason if info is not None and info.reason else self.default_reason
        self.retry_after_s: float | None = None if info is None else info.retry_after_s
        self.metadata: dict[str, str] = {} if info is None else dict(info.metadata)
        self.partial: GenerateResult | None = None

    def __str__(self) -> str:
        return f"{self.message} [{self.reason}]"


class InvalidRequestError(OctavoError):
    """The request is wrong; `violations` names each field at fault."""

    default_reason = "INVALID_REQUEST"

    def __init__(self, message: str, info: ErrorInfo | None = None) -> None:
        super().__init__(message, info)
        self.violations: tuple[FieldViolation, ...] = () if info is None else info.violations

    @classmethod
    def of_fields(cls, *violations: tuple[str, str], reason: str = "INVALID_REQUEST") -> InvalidRequestError:
        """Return the error that names these (field, what is wrong)."""
        named = tuple(FieldViolation(path, description) for path, description in violations)
        message = "; ".join(f"{one.field}: {one.description}" for one in named)
        return cls(message, ErrorInfo(reason, message, 3, violations=named))


class NotFoundError(OctavoError):
    """What the request names does not exist."""

    default_reason = "NOT_FOUND"


class UnknownModelError(NotFoundError):
    """No such model is served."""

    default_reason = "UNKNOWN_MODEL"


class UnsupportedError(OctavoError):
    """The service, or the worker that would run the request, cannot do what it asks for."""

    default_reason = "UNSUPPORTED"


class AccessDeniedError(OctavoError):
    """The credentials are missing, wrong, or do not allow this."""

    default_reason = "ACCESS_DENIED"


class OverloadedError(OctavoError):
    """Refused for load; try again after `retry_after_s`."""

    default_reason = "OVERLOADED"


_PHASES: Final = {
    "QUEUE_TIMEOUT": "queued",
    "DEADLINE_QUEUED": "queued",
    "TTFT_DEADLINE": "prefill",
    "DEADLINE_RUNNING": "decode",
}


class DeadlineExceededError(OctavoError):
    """A deadline or timeout passed; `partial` holds what had been generated.

    `phase` tells when: `queued`, `prefill` (before the first token), `decode`, or `unknown` when the
    service did not answer in time to say.
    """

    default_reason = "DEADLINE_EXCEEDED"

    @property
    def phase(self) -> str:
        """Where the request was when its time ran out."""
        return self.metadata.get("phase") or _PHASES.get(self.reason, "unknown")


class UnavailableError(OctavoError):
    """Nothing can serve the request: no scheduler was reached, none has a worker, or it is draining."""

    default_reason = "UNAVAILABLE"


class RequestCancelledError(OctavoError):
    """The request was cancelled by somebody other than its caller, for instance a drain."""

    default_reason = "CANCELLED"


class InternalError(OctavoError):
    """The service failed; `reason` says how."""

    default_reason = "INTERNAL"


class ClientClosedError(OctavoError):
    """The client was closed, or belongs to another process (it was carried over a fork)."""

    default_reason = "CLIENT_CLOSED"


# google.rpc.Code -> class. Whatever is not named here is a plain OctavoError.
_BY_CODE: Final[Mapping[int, type[OctavoError]]] = {
    1: RequestCancelledError,
    2: InternalError,
    3: InvalidRequestError,
    4: DeadlineExceededError,
    5: NotFoundError,
    6: InvalidRequestError,
    7: AccessDeniedError,
    8: OverloadedError,
    9: UnsupportedError,
    10: InternalError,
    11: InvalidRequestError,
    12: UnsupportedError,
    13: InternalError,
    14: UnavailableError,
    15: InternalError,
    16: AccessDeniedError,
}


def error_of(info: ErrorInfo) -> OctavoError:
    """Return the error to raise for what the service said."""
    if info.reason == UnknownModelError.default_reason:
        return UnknownModelError(info.message, info)
    return _BY_CODE.get(info.code, OctavoError)(info.message, info)
