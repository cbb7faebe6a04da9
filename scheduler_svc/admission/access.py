"""Who calls: from the key that a call or a request carries to a tenant, or a refusal."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

import grpc
import grpc.aio
from grpc_channelz.v1 import channelz_pb2
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection
from octavo.keys import Key, KeyFile, Role, Tenant
from octavo.v1 import generation_pb2, operations_pb2

from scheduler_svc.api.rpc import Context, abort
from scheduler_svc.errors import ServiceError
from scheduler_svc.observe.metrics import Metrics

GENERATION: Final = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name
OPERATIONS: Final = operations_pb2.DESCRIPTOR.services_by_name["Operations"].full_name
CHANNELZ: Final = channelz_pb2.DESCRIPTOR.services_by_name["Channelz"].full_name
ANONYMOUS: Final = Tenant("anonymous")
"""Everybody's tenant where there is no key file."""

# Probes and tools ask these before they have a key. What is not named here is for operators.
_OPEN: Final = frozenset({health.SERVICE_NAME, reflection.SERVICE_NAME})
_ANY_KEY: Final = frozenset({GENERATION})

Metadata = Iterable[tuple[str, str | bytes]]


class Access:
    """Tells whose a key is. Without a key file everybody is the anonymous tenant and may do anything."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.key_file: KeyFile | None = None
        """The one in force; replaced as a whole."""

    def tenant(self, key: str | None, role: Role = Role.USER) -> Tenant:
        """Return the tenant in whose name a request with this key runs.

        Raises:
            ServiceError: there is no key, it is not known, or lacks the role.
        """
        if self.key_file is None:
            return ANONYMOUS
        return self._find(self.key_file, key, role).tenant

    def most_live(self, key: str | None) -> int | None:
        """Return how many requests the tenant of a key may have at once; None is without limit."""
        if self.key_file is None or key is None:
            return None
        found = self.key_file.find(key)
        return found.tenant.quotas.requests_in_flight if found is not None else None

    def check(self, method: str, metadata: Metadata | None) -> None:
        """Refuse a call that its key does not allow. `method` is `/package.Service/Method`.

        Raises:
            ServiceError: there is no key, it is not known, or lacks the role.
        """
        service = method.split("/")[1] if method.count("/") == 2 else ""
        if self.key_file is None or service in _OPEN:
            return
        self._find(self.key_file, presented(metadata), None if service in _ANY_KEY else Role.OPERATOR)

    def named(self, tenant: str) -> Tenant | None:
        """Return a tenant by name."""
        if self.key_file is None:
            return ANONYMOUS if tenant == ANONYMOUS.name else None
        return self.key_file.tenants.get(tenant)

    def _find(self, key_file: KeyFile, presented_key: str | None, role: Role | None) -> Key:
        if presented_key is None:
            raise self._refusal("NO_API_KEY", "an API key is needed, as metadata `authorization: Bearer KEY`")
        key = key_file.find(presented_key)
        if key is None:
            raise self._refusal("BAD_API_KEY", "the API key is not known here")
        if role is not None and role not in key.roles:
            error = self._refusal("ROLE_REQUIRED", f"the key {key.id} does not have the role {role}")
            error.metadata = {"key": key.id, "role": str(role)}
            raise error
        return key

    def _refusal(self, reason: str, message: str) -> ServiceError:
        self._metrics.access_refusals.labels(reason).inc()
        return ServiceError(reason, message)


def presented(metadata: Metadata | None) -> str | None:
    """Return the key in a call's metadata as it stands there, or None if there is none."""
    values = [value for name, value in metadata or () if name == "authorization"]
    if not values:
        return None
    scheme, _, key = str(values[0]).partition(" ")
    # With two of them, one may be of somebody else: who put it there does not matter.
    return key.strip() if scheme.lower() == "bearer" and len(values) == 1 else ""


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
            self._access.check(handler_call_details.method, handler_call_details.invocation_metadata)
        except ServiceError as error:
            # A method that does not exist stays one that does not exist.
            return _refuse(handler, error) if handler is not None else handler
        return handler


def _refuse(handler: grpc.RpcMethodHandler[Any, Any], error: ServiceError) -> grpc.RpcMethodHandler[Any, Any]:
    """Return a handler for the same kind of call that says no."""

    async def refuse(_: object, context: Context) -> None:
        await abort(context, error)

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
