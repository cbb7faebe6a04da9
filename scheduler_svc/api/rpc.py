"""What all methods of the port share: deadlines, and how a call ends with an error."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, TypeVar

import grpc
import structlog
from octavo.service.status import Context, abort

from scheduler_svc.errors import ServiceError

_log = structlog.get_logger()
_R = TypeVar("_R")


def answering(
    method: Callable[[Any, Any, Context], Awaitable[_R]],
) -> Callable[[Any, Any, Context], Awaitable[_R]]:
    """Make a method answer a ServiceError as the error it is, and a bug as INTERNAL."""

    @wraps(method)
    async def wrapper(self: object, request: object, context: Context) -> _R:
        try:
            return await method(self, request, context)
        except ServiceError as error:
            # Not the exception itself: it holds on to all that its frames held, and a client that does not
            # read keeps us waiting below for as long as it likes.
            failure = error.to_proto()
        except grpc.aio.AbortError:
            raise
        except grpc.aio.InternalError:
            # So grpc says when the client went away during an operation.
            raise asyncio.CancelledError from None
        except Exception:  # noqa: BLE001 - logged
            _log.exception("call_failed", method=method.__name__)
            failure = ServiceError("INTERNAL", "the scheduler failed").to_proto()
        return await abort(context, failure)

    return wrapper


def rpc_deadline(context: Context, now: float) -> float | None:
    """Return when the call's own deadline passes, in monotonic seconds."""
    left_s = context.time_remaining()
    # Without a deadline grpc says some hundreds of years.
    return now + left_s if left_s is not None and left_s < 365 * 86400 else None
