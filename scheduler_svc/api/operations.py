"""The service of operators, `octavo.v1.Operations`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, Final, TypeVar
from urllib.parse import unquote

import grpc
import structlog
from octavo.keys import Role
from octavo.protocol.convert import keys_from_proto
from octavo.service.call_guard import bearer_key
from octavo.service.status import Context
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import operations_pb2, worker_pb2

from scheduler_svc.admission.access import OPERATIONS, Access
from scheduler_svc.admission.admission import InputProcessor
from scheduler_svc.api.parsing import Malformed, accept
from scheduler_svc.api.rpc import answering
from scheduler_svc.api.status import StatusCollector
from scheduler_svc.driver import CoreDriver
from scheduler_svc.errors import ServiceError
from scheduler_svc.fleet.models import ModelRegistry
from scheduler_svc.fleet.pins import Pin, PinnableWorker, PinRegistry
from scheduler_svc.fleet.worker_link import WorkerLink
from scheduler_svc.fleet.workers import Fleet
from scheduler_svc.text.tokenization import EncodeChat, EncodeText, KeySpec, TakeTokens

_MIN_INTERVAL_MS: Final = 100
_WATCH: Final = f"/{OPERATIONS}/WatchStatus"
_TRACED: Final = ("worker_id", "grace_ms", "model", "name", "tenant")
"""Fields of requests that the trace of an operation holds; none of them is a prompt."""
_R = TypeVar("_R")
_log = structlog.get_logger()


def operating(
    method: Callable[[Any, Any, Context], Awaitable[_R]],
) -> Callable[[Any, Any, Context], Awaitable[_R]]:
    """Make a method that changes or checks something refuse whom it is not for, and leave a trace."""

    @answering
    @wraps(method)
    async def wrapper(self: Any, request: Any, context: Context) -> _R:
        outcome = "FAILED"
        try:
            self._access.check_peer(context.peer())
            answer = await method(self, request, context)
            outcome = "OK"
        except ServiceError as error:
            outcome = error.reason
            raise
        finally:
            _log.info(
                "operator_action",
                action=method.__name__,
                key=self._access.id_of(bearer_key(context.invocation_metadata())),
                peer=unquote(context.peer()),
                outcome=outcome,
                **{name: value for name in _TRACED if (value := getattr(request, name, None))},
            )
        return answer

    return wrapper


class StatusService:
    """GetStatus, WatchStatus, GetUsage, Drain, SetFaults and AuditWorkers."""

    def __init__(
        self,
        board: StatusCollector,
        fleet: Fleet,
        driver: CoreDriver,
        *,
        begin_drain: Callable[[float | None], None],
        access: Access,
        faults_enabled: bool,
    ) -> None:
        self._board = board
        self._fleet = fleet
        self._driver = driver
        self._begin_drain = begin_drain
        self._access = access
        self._faults_enabled = faults_enabled

    @answering
    async def get_status(
        self, request: operations_pb2.GetStatusRequest | Malformed, _: Context
    ) -> operations_pb2.GetStatusResponse:
        """Return the status of the moment."""
        request = accept(request)
        status = self._board.status()
        if request.history:
            status.history.extend(self._board.history.since(0.0))
        return operations_pb2.GetStatusResponse(status=status)

    @answering
    async def watch_status(
        self, request: operations_pb2.WatchStatusRequest | Malformed, context: Context
    ) -> None:
        """Send the status again and again until the client has seen enough."""
        request = accept(request)
        interval_ms = request.interval_ms if request.HasField("interval_ms") else 1000
        if interval_ms < _MIN_INTERVAL_MS:
            raise ServiceError.invalid(
                ("interval_ms", f"must be at least {_MIN_INTERVAL_MS}, got {interval_ms}")
            )
        seen_until = 0.0 if request.history else math.inf
        while True:
            # The key may have been revoked since.
            self._access.authorize(_WATCH, context.invocation_metadata())
            status = self._board.status()
            status.history.extend(self._board.history.since(seen_until))
            if status.history:
                seen_until = status.history[-1].uptime_s
            await context.write(operations_pb2.WatchStatusResponse(status=status))
            await asyncio.sleep(interval_ms / 1000)

    @answering
    async def get_usage(
        self, request: operations_pb2.GetUsageRequest | Malformed, _: Context
    ) -> operations_pb2.GetUsageResponse:
        """Return who has used the devices, minute by minute."""
        request = accept(request)
        return self._board.usage.since(request.since_s if request.HasField("since_s") else math.inf)

    @operating
    async def drain(
        self, request: operations_pb2.DrainRequest | Malformed, _: Context
    ) -> operations_pb2.DrainResponse:
        """Stop admitting to one worker, or to the scheduler as a whole, which then ends."""
        request = accept(request)
        snapshot = self._driver.snapshot()
        workers = snapshot.workers
        if request.HasField("worker_id"):
            link = _known(self._fleet, request.worker_id)
            if request.HasField("grace_ms"):
                raise ServiceError.invalid(("grace_ms", "is for the whole scheduler, not with worker_id"))
            link.drain()
            workers = tuple(worker for worker in workers if worker.worker_id == request.worker_id)
        else:
            self._begin_drain(request.grace_ms / 1000 if request.HasField("grace_ms") else None)
        return operations_pb2.DrainResponse(
            running=sum(worker.running for worker in workers),
            waiting=sum(queue.waiting for queue in snapshot.queues),
        )

    @operating
    async def set_faults(
        self, request: operations_pb2.SetFaultsRequest | Malformed, _: Context
    ) -> operations_pb2.SetFaultsResponse:
        """Replace the faults of one worker, or of all."""
        request = accept(request)
        if not self._faults_enabled:
            raise ServiceError("FAULTS_DISABLED", "fault injection was not enabled at start (enable_faults)")
        links = _links(self._fleet, request.worker_id if request.HasField("worker_id") else None)
        forwarded = worker_pb2.InjectFaultsRequest(faults=request.faults)
        try:
            await asyncio.gather(*(link.inject_faults(forwarded) for link in links))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                raise ServiceError.invalid(("faults", f"a worker refuses: {error.details()}")) from None
            raise ServiceError("FAULTS_DISABLED", f"a worker refuses: {error.details()}") from None
        return operations_pb2.SetFaultsResponse()

    @operating
    async def audit_workers(
        self, request: operations_pb2.AuditWorkersRequest | Malformed, _: Context
    ) -> operations_pb2.AuditWorkersResponse:
        """Have one worker, or all, verify their books."""
        request = accept(request)
        links = _links(self._fleet, request.worker_id if request.HasField("worker_id") else None)
        audits = await asyncio.gather(*(link.audit() for link in links))
        return operations_pb2.AuditWorkersResponse(audits=sorted(audits, key=lambda audit: audit.worker_id))


class PinService:
    """PinPrefix and UnpinPrefix."""

    def __init__(
        self,
        pins: PinRegistry,
        fleet: Fleet,
        models: ModelRegistry,
        inputs: InputProcessor,
        access: Access,
    ) -> None:
        self._pins = pins
        self._fleet = fleet
        self._models = models
        self._inputs = inputs
        self._access = access

    @operating
    async def pin_prefix(
        self, request: operations_pb2.PinPrefixRequest | Malformed, context: Context
    ) -> operations_pb2.PinPrefixResponse:
        """Keep the full blocks of a prefix on the device."""
        request = accept(request)
        target = self._models.find(request.model)
        model = target.model
        if not request.name:
            raise ServiceError.invalid(("name", "must be set"))
        tenant = self._access.authenticate(bearer_key(context.invocation_metadata()), Role.OPERATOR)
        if request.HasField("tenant"):
            named = self._access.tenant_named(request.tenant)
            if named is None:
                raise ServiceError.invalid(("tenant", "must name a tenant of the key file"))
            tenant = named
        root = self._inputs.root_key(target, tenant.name, request.cache_salt)
        keys = KeySpec(root, model.block_size)
        job: EncodeText | EncodeChat | TakeTokens
        longest = model.max_model_len
        match request.WhichOneof("input"):
            case "text":
                job = EncodeText(model.text_key, longest, request.text, keys=keys)
            case "system_prompt":
                chat = pb.Chat(add_generation_prompt=False)
                chat.messages.add(role="system", content=request.system_prompt)
                job = EncodeChat(model.text_key, longest, chat.SerializeToString(), keys)
            case "tokens":
                job = TakeTokens(model.text_key, longest, request.tokens.SerializeToString(), keys)
            case "chat":
                chat = request.chat
                if not chat.HasField("add_generation_prompt"):
                    # A header of the assistant's turn at the end would differ from how conversations go on.
                    chat.add_generation_prompt = False
                job = EncodeChat(model.text_key, longest, chat.SerializeToString(), keys)
            case _:
                raise ServiceError.invalid(
                    ("input", "one of text, tokens, chat and system_prompt must be set")
                )
        encoded = await self._inputs.encode(job, request.ByteSize())
        pin = Pin(model.id, request.name, tuple(dict.fromkeys(keys_from_proto(encoded.keys))))
        tokens = len(encoded.token_ids) // 4
        if not pin.keys:
            field = str(request.WhichOneof("input"))
            raise ServiceError.invalid(
                (field, f"has {tokens} tokens, less than a block of {model.block_size}")
            )
        placement = self._pins.put(pin, self._attached())
        return operations_pb2.PinPrefixResponse(
            tokens=tokens,
            blocks=len(pin.keys),
            workers=len(placement.workers),
            without_room=placement.without_room,
        )

    @operating
    async def unpin_prefix(
        self, request: operations_pb2.UnpinPrefixRequest | Malformed, _: Context
    ) -> operations_pb2.UnpinPrefixResponse:
        """Let a prefix go."""
        request = accept(request)
        model = self._models.find(request.model).model
        pin = self._pins.remove(model.id, request.name, self._attached())
        return operations_pb2.UnpinPrefixResponse(blocks=len(pin.keys))

    def _attached(self) -> list[PinnableWorker]:
        return [link for link in self._fleet if link.attached]


def _links(fleet: Fleet, worker_id: str | None) -> list[WorkerLink]:
    """Return the link to one worker, or to all that are attached."""
    return [link for link in fleet if link.attached] if worker_id is None else [_known(fleet, worker_id)]


def _known(fleet: Fleet, worker_id: str) -> WorkerLink:
    link = fleet.find(worker_id)
    if link is None or not link.attached:
        raise ServiceError("UNKNOWN_WORKER", f"no worker {worker_id!r} is attached")
    return link
