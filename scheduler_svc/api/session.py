"""One `Session` stream: many requests of one client, and one message per step for all of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, replace
from typing import Final, NoReturn

from octavo.service.call_guard import bearer_key
from octavo.service.status import Context
from octavo.v1 import generation_pb2 as pb

from scheduler_svc.admission.admission import Admission
from scheduler_svc.api.parsing import Malformed, SessionPart, parse_session
from scheduler_svc.api.rpc import answering, rpc_deadline
from scheduler_svc.core.overload import Level
from scheduler_svc.driver import CoreDriver
from scheduler_svc.errors import ServiceError
from scheduler_svc.fleet.models import ModelRegistry
from scheduler_svc.requests.accounts import RequestAccount
from scheduler_svc.requests.outbox import ClientStream, SessionOutbox
from scheduler_svc.requests.state import RequestState
from scheduler_svc.requests.tenants import RefusalPace, TenantState

_AT_ONCE: Final = 16
"""Requests of one message that are taken before others of the service have their turn."""
_LOOK_S: Final = 1.0
_IDLE_S: Final = 5.0
"""Without a message or a request: such a session may be receiving what never ends."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """How much one session may have going on."""

    max_backlog_bytes: int
    max_requests: int


class ClientSession:
    """The state of one stream. Everything ends with it."""

    def __init__(
        self,
        admission: Admission,
        driver: CoreDriver,
        limits: SessionLimits,
        credit_limit: Callable[[Collection[str]], int],
        *,
        rpc_deadline: float | None,
        api_key: str | None,
    ) -> None:
        self._admission = admission
        self._driver = driver
        self._limits = limits
        self._credit_limit = credit_limit
        self._outbox = SessionOutbox(limits.max_backlog_bytes)
        self._stream = ClientStream(self._outbox, "session", rpc_deadline, api_key)
        self._requests: dict[str, asyncio.Task[RequestState] | RequestState] = {}
        """Requests by the client's name for them; a task while they are being admitted."""
        self._models: set[str] = set()
        """Those that it has had requests for."""
        self._unused_credits = 0
        self._tenant: TenantState | None = None
        """Whose quotas bound its credits; None while it is not paced."""
        self._messages = 0
        self._refusals = 0
        """Of requests in the present message that are the session's own."""
        self._pace = RefusalPace()
        self._reading = True
        self._active_at = time.monotonic()
        """When there was a message or the end of a request."""
        self._writer: asyncio.Task[None] | None = None
        self._evicted_for: ServiceError | None = None

    async def run(self, incoming: AsyncIterator[bytes], context: Context) -> None:
        """Serve the stream until the client has ended its side and everything it asked for is done.

        Raises:
            ServiceError: the client does not read, or the session was evicted.
        """
        reader = asyncio.create_task(self._read(incoming))
        self._writer = asyncio.current_task()
        try:
            while self._reading or self._requests or self._outbox.pending:
                await self._outbox.wait()
                message = self._outbox.take()
                if message.events or message.credits:
                    await context.write(message)
        except asyncio.CancelledError:
            if self._outbox.cut:
                problem = f"more than {self._limits.max_backlog_bytes} bytes of output were not read"
                raise ServiceError("SLOW_CONSUMER", problem) from None
            if self._evicted_for is not None:
                raise self._evicted_for from None
            raise
        finally:
            reader.cancel()
            if self._tenant is not None:
                self._tenant.leave(self.top_up, self._unused_credits)
            for request in self._requests.values():
                self._drop(request)
            await asyncio.gather(reader, return_exceptions=True)

    def top_up(self) -> None:
        """Grant what a paced session may send beyond what it has live and unused."""
        if self._tenant is None:
            return
        more = self._credit_limit(self._models) - self._unused_credits - len(self._requests)
        quota = self._tenant.grantable(self._unused_credits)
        if quota is not None:
            more = min(more, quota)
        if more > 0:
            self._unused_credits += more
            self._tenant.credits += more
            self._outbox.grant(more)

    def evict_if_idle(self, error: ServiceError) -> None:
        """End the session with this error if nothing has been going on in it for a while."""
        idle = not self._requests and not self._outbox.pending
        if idle and time.monotonic() - self._active_at >= _IDLE_S and self._writer is not None:
            self._evicted_for = error
            self._writer.cancel()

    # The client's side ---------------------------------------------------------------------------

    async def _read(self, incoming: AsyncIterator[bytes]) -> None:
        try:
            async for data in incoming:
                self._refusals = 0
                for number, message in enumerate(await parse_session(data), 1):
                    self._handle(message)
                    if number % _AT_ONCE == 0:
                        await asyncio.sleep(0)
                self._messages += 1
                self._active_at = time.monotonic()
                # Each costs the service more than the client, who reads on when it is its turn.
                await asyncio.sleep(self._pace.pause_s(time.monotonic(), self._refusals))
        finally:
            self._reading = False
            self._outbox.wake()

    def _count_refusal(self, message: pb.GenerateRequest) -> None:
        """Count a refusal that is not for the load, unless it is of somebody whose requests others bring."""
        self._refusals += not message.HasField("api_key")

    def _handle(self, message: SessionPart | Malformed) -> None:
        if isinstance(message, Malformed):
            self._settle_credit(spent=self._spend_credit())
            self._refusals += 1
            self._admission.open(self._stream).end(message.error.reason)
            self._refuse(message.request_id, message.error)
            return
        if isinstance(message, pb.GenerateRequest):
            self._generate(message)
            return
        match message.WhichOneof("message"):
            case "generate":
                self._generate(message.generate)
            case "cancel":
                request = self._requests.get(message.cancel.request_id)
                if request is not None:
                    self._drop(request)
            case "open" if self._messages == 0:
                if message.open.paced:
                    self._stream = replace(self._stream, paced=True)
                    self._tenant = self._admission.caller(self._stream.api_key)
                    self._tenant.join(self.top_up)
                    self.top_up()
            case "open":
                self._refuse("", ServiceError.invalid(("open", "must be the first message")))
            case None:
                self._refuse("", ServiceError.invalid(("message", "must be set")))

    def _generate(self, message: pb.GenerateRequest) -> None:
        in_credit = self._spend_credit()
        incoming = self._admission.receive(message, self._stream)
        if message.request_id and message.request_id not in self._requests:
            no_room = self._admission.refuse_at_once(incoming)
            if no_room is not None:
                self._settle_credit(spent=in_credit)
                if no_room.reason == "QUOTA_EXCEEDED":
                    self._count_refusal(message)
                self._outbox.refuse(message.request_id, no_room.to_proto())
                self.top_up()
                return
        account = self._admission.open(self._stream)
        error = self._refusal(message, in_credit=in_credit)
        if error is not None:
            self._settle_credit(spent=in_credit)
            account.request_id = message.request_id
            account.end(error.reason)
            self._count_refusal(message)
            self._refuse(message.request_id, error)
            return
        request_id = message.request_id
        starting = self._admission.start(incoming, account, lambda: self._done(request_id))
        task = self._requests[request_id] = asyncio.create_task(starting)
        task.add_done_callback(lambda task: self._started(request_id, account, task))

    def _started(self, request_id: str, account: RequestAccount, task: asyncio.Task[RequestState]) -> None:
        """An admission is over: cancelled perhaps before it began, failed, or the request is live."""
        self._settle_credit(spent=True)
        error: BaseException | None = None
        if task.cancelled():
            account.end("SLOW_CONSUMER" if self._outbox.cut else "CANCELLED")
            error = ServiceError("CANCELLED", "cancelled by the client")
        else:
            error = task.exception()
        if isinstance(error, ServiceError):
            self._refuse(request_id, error)
            self._done(request_id)
            return
        state = task.result()
        self._models.add(state.request.model)
        if not state.ended:
            self._requests[request_id] = state

    def _spend_credit(self) -> bool:
        """Take a credit for a message, whatever becomes of it; return whether it had what it needs."""
        if not self._stream.paced:
            return True
        spent = self._unused_credits > 0
        self._unused_credits -= spent
        return spent

    def _settle_credit(self, *, spent: bool) -> None:
        """A request is counted by its tenant now, or was refused: its credit stands for nothing any more."""
        if self._tenant is not None:
            self._tenant.credits -= spent

    def _refusal(self, message: pb.GenerateRequest, *, in_credit: bool) -> ServiceError | None:
        """Return why a request cannot be taken into this session, if so."""
        if not message.request_id:
            return ServiceError.invalid(("request_id", "must be set in a session"))
        if message.request_id in self._requests:
            return ServiceError(
                "DUPLICATE_REQUEST_ID",
                f"request {message.request_id!r} is live already",
                violations=[("request_id", "must be unique among the live requests")],
            )
        if len(self._requests) >= self._limits.max_requests:
            limit = self._limits.max_requests
            return ServiceError("SESSION_FULL", f"the session has {limit} live requests", retry_after_s=1.0)
        if not in_credit:
            return ServiceError("CREDITS_EXCEEDED", "the session was granted no more requests")
        return None

    # Ends ----------------------------------------------------------------------------------------

    def _refuse(self, request_id: str, error: ServiceError) -> None:
        self._outbox.end(request_id, error.to_proto(), told=False)
        self.top_up()

    def _done(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self._active_at = time.monotonic()
        self.top_up()
        self._outbox.wake()

    def _drop(self, request: asyncio.Task[RequestState] | RequestState) -> None:
        if isinstance(request, RequestState):
            self._driver.cancel(request)
        elif not request.cancel() and not request.cancelled() and request.exception() is None:
            # Its admission is over, but `_started` has not run yet.
            self._driver.cancel(request.result())


class SessionService:
    """Makes a `ClientSession` of each stream, and tells paced ones when there is more room."""

    def __init__(
        self, admission: Admission, driver: CoreDriver, models: ModelRegistry, limits: SessionLimits
    ) -> None:
        self._admission = admission
        self._driver = driver
        self._models = models
        self._limits = limits
        self._sessions: set[ClientSession] = set()

    @answering
    async def session(self, incoming: AsyncIterator[bytes], context: Context) -> None:
        """Serve one stream."""
        now = time.monotonic()
        session = ClientSession(
            self._admission,
            self._driver,
            self._limits,
            self._credit_limit,
            rpc_deadline=rpc_deadline(context, now),
            api_key=bearer_key(context.invocation_metadata()),
        )
        self._sessions.add(session)
        try:
            await session.run(incoming, context)
        finally:
            self._sessions.discard(session)

    async def run(self) -> NoReturn:
        """While memory is at its ceiling, end the sessions in which nothing goes on.

        gRPC keeps what has come of a message until it is whole, and in an open session one may come at any
        time: so many that never end would keep everybody out for good.
        """
        while True:
            await asyncio.sleep(_LOOK_S)
            if (error := self._admission.no_memory()) is not None:
                for session in tuple(self._sessions):
                    session.evict_if_idle(error)

    def top_up(self) -> None:
        """Grant paced sessions what the workers of the moment can take."""
        for session in self._sessions:
            session.top_up()

    def _credit_limit(self, models: Collection[str]) -> int:
        """Return how many requests a paced session may have live: enough to keep all workers busy.

        None while other work for its models is refused: what it has live goes on, and more comes later.
        """
        if self._sheds_batch(models):
            return 0
        return min(self._limits.max_requests, max(16, 2 * self._driver.max_running))

    def _sheds_batch(self, models: Collection[str]) -> bool:
        """Return whether one of these models, or every one there is, sheds the batch class."""
        level_of = self._driver.level_of
        if models:
            return max(level_of(model) for model in models) >= Level.SHED_BATCH
        return min((level_of(model.id) for model in self._models), default=Level.NORMAL) >= Level.SHED_BATCH
