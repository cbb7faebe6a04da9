"""A gRPC port of a service: its methods, health, reflection and channelz."""

from __future__ import annotations

from asyncio import iscoroutinefunction
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final

import grpc
import grpc.aio
from grpc_channelz.v1 import channelz, channelz_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from octavo.service.address import AddressTaken, check_address
from octavo.service.server_tls import ServerTls
from octavo.service.status import Context

CHANNELZ: Final = channelz_pb2.DESCRIPTOR.services_by_name["Channelz"].full_name
# Two processes must never share a port by accident.
_OPTIONS: Final = (("grpc.so_reuseport", 0),)


class GrpcPort:
    """Opens and closes a port, and tells on it whether its services can be used."""

    def __init__(
        self,
        services: Iterable[str],
        *,
        options: Sequence[tuple[str, int]],
        interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = (),
        tls: ServerTls | None = None,
    ) -> None:
        """`services`: full names of those that reflection shows; their methods are added to `server`."""
        self._tls = tls
        self.server = grpc.aio.server(interceptors=(_LetGo(), *interceptors), options=(*options, *_OPTIONS))
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs lag
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        channelz.add_channelz_servicer(self.server)  # type: ignore[arg-type]  # the stubs lag
        names = (*services, health.SERVICE_NAME, CHANNELZ, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.server)

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port.

        Raises:
            AddressTaken: it cannot be had.
        """
        check_address(host, port)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._tls is None:
                bound = self.server.add_insecure_port(address)
            else:
                bound = self.server.add_secure_port(address, self._tls.grpc_credentials())
        except RuntimeError as error:
            raise AddressTaken(f"cannot listen on {address}: {error}") from None
        await self.server.start()
        return bound

    async def set_serving(self, services: Iterable[str], *, serving: bool) -> None:
        """Tell health checks of these services, "" for the port as a whole, whether they can be used."""
        status = health_pb2.HealthCheckResponse
        for service in services:
            await self._health.set(service, status.SERVING if serving else status.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Take no new calls; end what is still open after the grace."""
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_s)


class _LetGo(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Lets a call that ends with an error go at once, and its messages with it.

    grpc keeps the error with the call. Its traceback, and that of the error it came of, hold the frames that
    hold the call: what is in them would stay until cycles are looked for, which may take thousands of calls.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return what answers a call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        kind = f"{_KINDS[handler.request_streaming]}_{_KINDS[handler.response_streaming]}"
        method = getattr(handler, kind)
        # Health checks and the like come from grpc, and some of them are no coroutines.
        return handler._replace(**{kind: _letting_go(method)}) if iscoroutinefunction(method) else handler


_KINDS: Final = ("unary", "stream")


def _letting_go(method: Callable[[Any, Context], Awaitable[Any]]) -> Callable[[Any, Context], Awaitable[Any]]:
    async def serve(request: Any, context: Context) -> Any:
        answer = method(request, context)
        del request
        try:
            return await answer
        except grpc.aio.AbortError as error:
            error.__context__ = None
            raise error.with_traceback(None) from None

    return serve
