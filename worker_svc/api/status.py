"""Refusals of the worker's RPCs, as the rich error model has them."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from octavo.protocol.convert import ProtocolError

DOMAIN = "octavo.v1"
DETAILS_KEY = "grpc-status-details-bin"


class Refusal(Exception):
    """A call that ends with `code`; `reason` is stable and machine-readable."""

    def __init__(self, code: grpc.StatusCode, reason: str, message: str, **metadata: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.metadata = metadata


def malformed(error: ProtocolError, what: str = "message") -> Refusal:
    """Return the refusal of a message that its sender should not have sent."""
    code = grpc.StatusCode.INVALID_ARGUMENT
    return Refusal(code, "MALFORMED_MESSAGE", f"{what}: {error}", field=error.field)


async def abort(context: grpc.aio.ServicerContext[Any, Any], refusal: Refusal) -> NoReturn:
    """End the call with the refusal as `google.rpc.Status`."""
    info = any_pb2.Any()
    info.Pack(error_details_pb2.ErrorInfo(reason=refusal.reason, domain=DOMAIN, metadata=refusal.metadata))
    status = status_pb2.Status(code=refusal.code.value[0], message=refusal.message, details=[info])
    await context.abort(
        refusal.code, refusal.message, trailing_metadata=((DETAILS_KEY, status.SerializeToString()),)
    )
