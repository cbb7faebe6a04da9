"""Errors that clients see: one stable reason each, and the one table from reason to gRPC code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import grpc
from octavo.v1 import common_pb2

from scheduler_svc.core.errors import CoreError, Reason

_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})
# Trailing metadata beyond 8 KiB may be dropped on the way, and the facts travel three times in it.
_MAX_MESSAGE: Final = 400
_MAX_VIOLATIONS: Final = 8
_MAX_DESCRIPTION: Final = 160

CODES: Final[Mapping[str, grpc.StatusCode]] = MappingProxyType(
    {
        # The request is wrong.
        "INVALID_REQUEST": grpc.StatusCode.INVALID_ARGUMENT,
        "CHAT_TEMPLATE": grpc.StatusCode.INVALID_ARGUMENT,
        Reason.PROMPT_TOO_LONG: grpc.StatusCode.INVALID_ARGUMENT,
        Reason.INVALID_GRAMMAR: grpc.StatusCode.INVALID_ARGUMENT,
        Reason.UNKNOWN_MODEL: grpc.StatusCode.NOT_FOUND,
        Reason.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
        Reason.DUPLICATE_REQUEST_ID: grpc.StatusCode.ALREADY_EXISTS,
        # The caller may not.
        "NO_API_KEY": grpc.StatusCode.UNAUTHENTICATED,
        "BAD_API_KEY": grpc.StatusCode.UNAUTHENTICATED,
        "ROLE_REQUIRED": grpc.StatusCode.PERMISSION_DENIED,
        "LOOPBACK_REQUIRED": grpc.StatusCode.PERMISSION_DENIED,
        # The service has no room.
        Reason.QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
        "QUOTA_EXCEEDED": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "MEMORY_FULL": grpc.StatusCode.RESOURCE_EXHAUSTED,
        Reason.SHED: grpc.StatusCode.RESOURCE_EXHAUSTED,
        Reason.BREAKER_OPEN: grpc.StatusCode.RESOURCE_EXHAUSTED,
        Reason.DEADLINE_INFEASIBLE: grpc.StatusCode.RESOURCE_EXHAUSTED,
        "TOO_MANY_CALLS": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "SESSION_FULL": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "CREDITS_EXCEEDED": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "SLOW_CONSUMER": grpc.StatusCode.RESOURCE_EXHAUSTED,
        # Time ran out.
        "MESSAGE_TIMEOUT": grpc.StatusCode.DEADLINE_EXCEEDED,
        Reason.QUEUE_TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
        Reason.TTFT_DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
        Reason.DEADLINE_QUEUED: grpc.StatusCode.DEADLINE_EXCEEDED,
        Reason.DEADLINE_RUNNING: grpc.StatusCode.DEADLINE_EXCEEDED,
        # Nobody can serve it now.
        Reason.NO_WORKER: grpc.StatusCode.UNAVAILABLE,
        Reason.DRAINING: grpc.StatusCode.UNAVAILABLE,
        "TOKENIZER_FAILED": grpc.StatusCode.UNAVAILABLE,
        Reason.CANCELLED: grpc.StatusCode.CANCELLED,
        # The service failed. What ends processes must not be tried again, so it is not UNAVAILABLE.
        Reason.POISON: grpc.StatusCode.ABORTED,
        "TOKENIZER_CRASHED": grpc.StatusCode.ABORTED,
        Reason.STEP_FAILED: grpc.StatusCode.INTERNAL,
        "INTERNAL": grpc.StatusCode.INTERNAL,
        # Operators' own.
        "FAULTS_DISABLED": grpc.StatusCode.FAILED_PRECONDITION,
        "PIN_BUDGET": grpc.StatusCode.FAILED_PRECONDITION,
        "UNKNOWN_WORKER": grpc.StatusCode.NOT_FOUND,
        "UNKNOWN_PIN": grpc.StatusCode.NOT_FOUND,
    }
)


class ServiceError(Exception):
    """A refusal or failure that a client is told about. `reason` is a key of `CODES`."""

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        retry_after_s: float | None = None,
        violations: Sequence[tuple[str, str]] = (),
        metadata: Mapping[str, str] = _NOTHING,
    ) -> None:
        super().__init__(message)
        self.reason = str(reason)
        self.message = message
        self.retry_after_s = retry_after_s
        self.violations = tuple(violations)
        self.metadata = metadata

    @classmethod
    def invalid(cls, *violations: tuple[str, str], reason: str = "INVALID_REQUEST") -> ServiceError:
        """Return the error that names these fields and what is wrong with each."""
        message = "; ".join(f"{field}: {description}" for field, description in violations)
        return cls(reason, message, violations=violations)

    @classmethod
    def from_core(cls, error: CoreError) -> ServiceError:
        """Return what the core said, as an exception."""
        return cls(error.reason, error.message, retry_after_s=error.retry_after_s, metadata=error.metadata)

    def elsewhere(self, endpoint: str) -> ServiceError:
        """Name the scheduler that can serve the request instead, if it is known; return the error."""
        if endpoint:
            self.metadata = {**self.metadata, "endpoint": endpoint}
        return self

    @property
    def code(self) -> grpc.StatusCode:
        """The gRPC code of the reason."""
        return CODES[self.reason]

    def to_proto(self) -> common_pb2.Error:
        """Return the error as clients get it in a Session."""
        proto = common_pb2.Error(
            code=self.code.value[0],
            reason=self.reason,
            message=_clean(self.message, _MAX_MESSAGE),
            metadata=self.metadata,
            violations=[
                common_pb2.FieldViolation(field=field, description=_clean(text, _MAX_DESCRIPTION))
                for field, text in self.violations[:_MAX_VIOLATIONS]
            ],
        )
        if self.retry_after_s is not None:
            proto.retry_delay_ms = round(self.retry_after_s * 1000)
        return proto


def _clean(text: str, limit: int) -> str:
    """Cut to a length and drop what protobuf refuses: lone surrogates that exception texts may hold."""
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    return text.encode("utf-8", "replace").decode()
