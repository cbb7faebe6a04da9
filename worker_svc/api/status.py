"""Refusals of the worker's RPCs."""

from __future__ import annotations

import math

import grpc
from octavo.protocol.convert import ProtocolError
from octavo.v1 import common_pb2


class Refusal(Exception):
    """A call that ends with `code`; `reason` is stable and machine-readable."""

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str,
        message: str,
        *,
        retry_after_s: float | None = None,
        **metadata: str,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s
        self.metadata = metadata

    def to_proto(self) -> common_pb2.Error:
        """Return what the caller is told."""
        proto = common_pb2.Error(
            code=self.code.value[0], reason=self.reason, message=self.message, metadata=self.metadata
        )
        if self.retry_after_s is not None:
            proto.retry_delay_ms = math.ceil(self.retry_after_s * 1000)
        return proto


def malformed(error: ProtocolError, what: str = "message") -> Refusal:
    """Return the refusal of a message that its sender should not have sent."""
    code = grpc.StatusCode.INVALID_ARGUMENT
    return Refusal(code, "MALFORMED_MESSAGE", f"{what}: {error}", field=error.field)
