"""The interceptor that refuses calls whose key does not allow them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from octavo.service.status import Context, abort

from scheduler_svc.admission.access import Access
from scheduler_svc.errors import ServiceError


class AccessInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Refuses calls before their message is even parsed."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the handler of a call, or one that refuses it."""
        handler = await continuation(handler_call_details)
        try:
            self._access.authorize(handler_call_details.method, handler_call_details.invocation_metadata)
        except ServiceError as error:
            # An unknown method (no handler) is answered as such by grpc.
            return _refuse(handler, error) if handler is not None else handler
        return handler


def _refuse(handler: grpc.RpcMethodHandler[Any, Any], error: ServiceError) -> grpc.RpcMethodHandler[Any, Any]:
    """Return a handler for the same kind of call that says no."""

    async def refuse(_: object, context: Context) -> None:
        await abort(context, error.to_proto())

    make: Callable[..., grpc.RpcMethodHandler[Any, Any]]
    match (handler.request_streaming, handler.response_streaming):
        case (False, False):
            make = grpc.unary_unary_rpc_method_handler
        case (False, True):
            make = grpc.unary_stream_rpc_method_handler
        case (True, False):
            make = grpc.stream_unary_rpc_method_handler
        case _:
            make = grpc.stream_stream_rpc_method_handler
    return make(refuse)
