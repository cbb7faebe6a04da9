"""The gRPC face of the worker."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import grpc
import grpc.aio
import structlog
from grpc_health.v1 import health
from octavo.protocol.convert import ProtocolError
from octavo.protocol.transport import SERVER_OPTIONS
from octavo.service.call_guard import CallGuard
from octavo.service.grpc_port import GrpcPort
from octavo.service.places import Places
from octavo.service.server_tls import ServerTls
from octavo.service.status import Context, abort
from octavo.v1 import worker_pb2, worker_pb2_grpc

from worker_svc.api.convert import fault_from_proto
from worker_svc.api.door import Door
from worker_svc.api.messages import MAX_HELLO_BYTES, UnparsedMessages, scheduler_message
from worker_svc.api.session import HELLO_TIMEOUT_S, SchedulerSession, Sessions
from worker_svc.api.status import Refusal, malformed
from worker_svc.engine.faults import Faults

SERVICE = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name
LOADING_WAIT_S: Final = 10.0
"""How long `Describe` waits for the model; a scheduler waits a little longer for its answer."""
_CALLS: Final = 256
_HEALTH_CALLS: Final = 512
_OTHER_CALLS: Final = 32
"""Of reflection and channelz."""
_EXPECTED = {
    "LOADING",
    "SCHEDULER_ATTACHED",
    "RESERVED",
    "TAKEN_OVER",
    "STALE_EPOCH",
    "SUPERSEDED",
    "DRAINING",
}
"""Refusals in the ordinary course: a standby meets them every second."""
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Business:
    """What the service needs to serve; it has none while the model loads."""

    description: worker_pb2.WorkerDescription
    sessions: Sessions
    faults: Faults | None
    """None unless fault injection was enabled."""


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """`octavo.v1.Worker`: parses, refuses, and leaves the rest to the session."""

    def __init__(self) -> None:
        self._business: Business | None = None
        self._decided = asyncio.Event()
        """Set once it is known whether there will be any business."""

    def open(self, business: Business) -> None:
        """Begin to serve."""
        self._business = business
        self._decided.set()

    def close(self) -> None:
        """Let nobody wait any more for the model to be loaded."""
        self._decided.set()

    def _open_business(self) -> Business:
        if self._business is None:
            raise Refusal(grpc.StatusCode.UNAVAILABLE, "LOADING", "the model is being loaded")
        return self._business

    async def Describe(
        self, request: worker_pb2.DescribeRequest, context: Context
    ) -> worker_pb2.WorkerDescription:
        """Say what this worker is; whoever asks while the model loads gets the answer once it has."""
        del request
        with suppress(TimeoutError):
            async with asyncio.timeout(LOADING_WAIT_S):
                await self._decided.wait()
        try:
            return self._open_business().description
        except Refusal as refusal:
            await abort(context, refusal.to_proto())

    async def Attach(  # type: ignore[override] # reads and writes through the context
        self, request_iterator: object, context: Context
    ) -> None:
        """Serve a scheduler for as long as its stream lives."""
        del request_iterator
        session: SchedulerSession | None = None
        sessions: Sessions | None = None
        try:
            sessions = self._open_business().sessions
            session = sessions.open(await _read_hello(context))
            await session.run(context)
        except Refusal as refusal:
            level = logging.DEBUG if refusal.reason in _EXPECTED else logging.WARNING
            log.log(
                level,
                "session_refused",
                reason=refusal.reason,
                problem=refusal.message,
                peer=context.peer(),
            )
            await abort(context, refusal.to_proto())
        finally:
            if sessions is not None and session is not None:
                sessions.close(session)

    async def InjectFaults(
        self, request: worker_pb2.InjectFaultsRequest, context: Context
    ) -> worker_pb2.InjectFaultsResponse:
        """Replace the faults in force."""
        try:
            faults = self._open_business().faults
            if faults is None:
                message = "this worker was started without --enable-faults"
                raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, "FAULTS_DISABLED", message)
            try:
                faults.set([fault_from_proto(fault) for fault in request.faults])
            except ProtocolError as error:
                raise malformed(error) from None
            log.warning("faults_injected", kinds=[fault.kind for fault in request.faults])
            return worker_pb2.InjectFaultsResponse()
        except Refusal as refusal:
            await abort(context, refusal.to_proto())

    async def Audit(self, request: worker_pb2.AuditRequest, context: Context) -> worker_pb2.AuditResponse:
        """Verify all books at the next step boundary; the worker goes on whatever is found."""
        try:
            found = await self._open_business().sessions.audit()
        except Refusal as refusal:
            await abort(context, refusal.to_proto())
        return worker_pb2.AuditResponse(
            violation=found.violation, blocks=found.num_blocks, check_ms=found.check_s * 1000
        )


async def _read_hello(context: Context) -> worker_pb2.Hello:
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            raw = await context.read()
    except TimeoutError:
        raise Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, "NO_HELLO", "no Hello came") from None
    message = scheduler_message(raw, MAX_HELLO_BYTES) if isinstance(raw, bytes) else None
    if message is None or message.WhichOneof("message") != "hello":
        raise Refusal(
            grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE", "the first message must be Hello"
        )
    return message.hello


class WorkerServer:
    """The port."""

    def __init__(
        self, service: WorkerService, door: Door | None = None, tls: ServerTls | None = None
    ) -> None:
        """`door` says who may come in; None is whoever reaches the port."""
        places = {SERVICE: Places(_CALLS, share=3), health.SERVICE_NAME: Places(_HEALTH_CALLS, share=1 / 3)}
        guard = CallGuard((door or Door()).identify, places, Places(_OTHER_CALLS, share=1 / 3))
        self._port = GrpcPort(
            (SERVICE,), options=SERVER_OPTIONS, interceptors=(guard, UnparsedMessages(SERVICE)), tls=tls
        )
        worker_pb2_grpc.add_WorkerServicer_to_server(service, self._port.server)

    async def start(self, host: str, port: int) -> int:
        """Listen, not yet serving, and return the port.

        Raises:
            AddressTaken: it cannot be had.
        """
        await self.set_serving(serving=False)
        return await self._port.start(host, port)

    async def set_serving(self, *, serving: bool) -> None:
        """Publish through the health service whether work is taken."""
        await self._port.set_serving(("", SERVICE), serving=serving)

    async def stop(self, grace_s: float) -> None:
        """Take no new calls and end those that run, after the grace time at the latest."""
        await self._port.stop(grace_s)
