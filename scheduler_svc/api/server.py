"""The gRPC face of the scheduler: methods, health, reflection, channelz, and the options of the port."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc
from grpc_health.v1 import health
from octavo.protocol.bounds import MAX_MESSAGE_BYTES
from octavo.service.call_guard import CallGuard, CallRefused, Identify, Metadata
from octavo.service.grpc_port import GrpcPort
from octavo.service.places import Places
from octavo.service.server_tls import ServerTls
from octavo.service.status import Context
from octavo.v1 import generation_pb2, operations_pb2

from scheduler_svc.admission.access import GENERATION, OPERATIONS, Access
from scheduler_svc.api.generation import GenerationService
from scheduler_svc.api.operations import PinService, StatusService
from scheduler_svc.api.parsing import Parser
from scheduler_svc.api.session import SessionService
from scheduler_svc.errors import ServiceError

_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),
    # A dead client is found within half a minute; an idle one may stay connected for ever.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Clients may ping as often as once a second, whether or not anything is going on.
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    # Of one connection; a client waits with what goes beyond it.
    ("grpc.max_concurrent_streams", 2048),
    # Calls that came and that no handler has taken yet: beyond the first, gRPC ends some without a word.
    ("grpc.server.max_pending_requests", 16_384),
    ("grpc.server.max_pending_requests_hard_limit", 32_768),
    # A connection on which nobody says a word of HTTP/2.
    ("grpc.server_handshake_timeout_ms", 10_000),
)
_OPERATOR_CALLS: Final = 256
_HEALTH_CALLS: Final = 512
_OTHER_CALLS: Final = 32
"""Of reflection and channelz."""


@dataclass(frozen=True, slots=True)
class Services:
    """Everything that the port serves."""

    generation: GenerationService
    sessions: SessionService
    status: StatusService
    pins: PinService


class SchedulerServer:
    """The port."""

    def __init__(
        self, services: Services, max_streams: int, access: Access, tls: ServerTls | None = None
    ) -> None:
        places = {
            GENERATION: Places(max_streams, share=3),
            OPERATIONS: Places(_OPERATOR_CALLS, share=3),
            health.SERVICE_NAME: Places(_HEALTH_CALLS, share=1 / 3),
        }
        guard = CallGuard(_identify_by(access), places, Places(_OTHER_CALLS, share=1 / 3))
        self._port = GrpcPort(
            (GENERATION, OPERATIONS),
            options=_OPTIONS,
            interceptors=(guard,),
            tls=tls,
        )
        self._port.server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(GENERATION, _generation_methods(services)),
                grpc.method_handlers_generic_handler(OPERATIONS, _operations_methods(services)),
            )
        )

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port.

        Raises:
            AddressTaken: it cannot be had.
        """
        await self.set_serving(serving=False)
        await self._port.set_serving((OPERATIONS,), serving=True)
        return await self._port.start(host, port)

    async def set_serving(self, *, serving: bool) -> None:
        """Tell health checks whether requests can be served: there is a worker, and no drain.

        `octavo.v1.Operations` is served for as long as the process lives, so that one can also ask
        whether it does.
        """
        await self._port.set_serving(("", GENERATION), serving=serving)

    async def stop(self, grace_s: float) -> None:
        """Stop listening; end what is still open after the grace."""
        await self._port.stop(grace_s)


def _identify_by(access: Access) -> Identify:
    """Return how the guard of the port learns whose a call is: the tenant's, where there are keys."""

    def identify(method: str, metadata: Metadata | None, _: Context) -> str | None:
        try:
            return access.authorize(method, metadata)
        except ServiceError as error:
            raise CallRefused(error.to_proto()) from None

    return identify


def _generation_methods(services: Services) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
    pb, generation = generation_pb2, services.generation
    return {
        "Generate": grpc.unary_stream_rpc_method_handler(
            generation.generate, Parser(pb.GenerateRequest), pb.GenerateEvent.SerializeToString
        ),
        "Session": grpc.stream_stream_rpc_method_handler(
            services.sessions.session, None, pb.SessionEvent.SerializeToString
        ),
        "Tokenize": grpc.unary_unary_rpc_method_handler(generation.tokenize, Parser(pb.TokenizeRequest)),
        "Detokenize": _unary(generation.detokenize, pb.DetokenizeRequest, pb.DetokenizeResponse),
        "ListModels": _unary(generation.list_models, pb.ListModelsRequest, pb.ListModelsResponse),
    }


def _operations_methods(services: Services) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
    pb, status, pins = operations_pb2, services.status, services.pins
    return {
        "GetStatus": _unary(status.get_status, pb.GetStatusRequest, pb.GetStatusResponse),
        "GetUsage": _unary(status.get_usage, pb.GetUsageRequest, pb.GetUsageResponse),
        "WatchStatus": grpc.unary_stream_rpc_method_handler(
            status.watch_status, Parser(pb.WatchStatusRequest), pb.WatchStatusResponse.SerializeToString
        ),
        "Drain": _unary(status.drain, pb.DrainRequest, pb.DrainResponse),
        "AuditWorkers": _unary(status.audit_workers, pb.AuditWorkersRequest, pb.AuditWorkersResponse),
        "SetFaults": _unary(status.set_faults, pb.SetFaultsRequest, pb.SetFaultsResponse),
        "PinPrefix": _unary(pins.pin_prefix, pb.PinPrefixRequest, pb.PinPrefixResponse),
        "UnpinPrefix": _unary(pins.unpin_prefix, pb.UnpinPrefixRequest, pb.UnpinPrefixResponse),
    }


def _unary(
    method: Callable[..., Any], request: type[Any], response: type[Any]
) -> grpc.RpcMethodHandler[Any, Any]:
    return grpc.unary_unary_rpc_method_handler(method, Parser(request), response.SerializeToString)
