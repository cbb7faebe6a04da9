"""How a call ends with an error: as `google.rpc.Status` in the trailers, for all services alike."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final, NoReturn, cast

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from octavo.v1 import common_pb2

Context = grpc.aio.ServicerContext[Any, Any]
DOMAIN: Final = "octavo"
"""Of every ErrorInfo: reasons are unique within it."""
STATUS_KEY: Final = "grpc-status-details-bin"
ERROR_KEY: Final = "octavo-error-bin"
"""Trailing metadata with the serialized `octavo.v1.Error`, for clients without googleapis."""
_BY_NUMBER: Final = {code.value[0]: code for code in grpc.StatusCode}


def status_of(error: common_pb2.Error) -> status_pb2.Status:
    """Return the same facts in the rich error model."""
    details: list[any_pb2.Any] = []

    def attach(
        detail: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo | error_details_pb2.BadRequest,
    ) -> None:
        packed = any_pb2.Any()
        packed.Pack(detail)
        details.append(packed)

    attach(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata))
    if error.HasField("retry_delay_ms"):
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(error.retry_delay_ms)
        attach(retry)
    if error.violations:
        attach(
            error_details_pb2.BadRequest(
                field_violations=[
                    error_details_pb2.BadRequest.FieldViolation(
                        field=violation.field, description=violation.description
                    )
                    for violation in error.violations
                ]
            )
        )
    return status_pb2.Status(code=error.code, message=error.message, details=details)


def error_in(failure: grpc.aio.AioRpcError) -> common_pb2.Error | None:
    """Return what a call ended with, if one of our services ended it."""
    trailer = cast("Iterable[tuple[str, str | bytes]]", failure.trailing_metadata() or ())
    value = dict(trailer).get(ERROR_KEY)
    try:
        return common_pb2.Error.FromString(value) if isinstance(value, bytes) else None
    except DecodeError:
        return None


def trailing_metadata(error: common_pb2.Error) -> tuple[tuple[str, bytes], ...]:
    """Return the metadata that carries an error beside the status."""
    return (
        (STATUS_KEY, status_of(error).SerializeToString()),
        (ERROR_KEY, error.SerializeToString()),
    )


async def abort(context: Context, error: common_pb2.Error) -> NoReturn:
    """End a call with an error.

    Raises:
        AbortError: as grpc wants it.
        CancelledError: the client has gone.
    """
    try:
        await context.abort(_BY_NUMBER[error.code], error.message, trailing_metadata(error))
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None
    raise AssertionError("abort returns")
