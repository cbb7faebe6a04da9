"""One `Session` stream: many requests of one client, and one message per step for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, replace
from typing import Final

from octavo.v1 import generation_pb2 as pb

from scheduler_svc.admission.intake import Intake, Stream
from scheduler_svc.api.parsing import Malformed
from scheduler_svc.api.rpc import Context
from scheduler_svc.driver import Driver
from scheduler_svc.errors import ServiceError
from scheduler_svc.live.accounts import RequestRecord
from scheduler_svc.live.outbox import SessionOutbox
from scheduler_svc.live.requests import LiveRequest

Part = pb.SessionRequest | pb.GenerateRequest | Malformed
Incoming = tuple[Part, ...]
"""What one message brings."""
_AT_ONCE: Final = 16
"""Requests of one message that are taken before others of the service have their turn."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """How much one session may have going on."""

    max_backlog_bytes: int
    max_requests: int
    seats: Callable[[], int]
    """Sequences that all workers together can run now."""

    shedding: Callable[[Collection[str]], bool]
    """Whether the load on one of these models leaves no room for work that can wait; on every model there
    is, when none is named."""

    def credits(self, models: Collection[str]) -> int:
        """Return how many requests a paced session may have live: enough to keep all seats taken.

        None while other work for its models is refused: what it has live goes on, and more comes later.
        """
        return 0 if self.shedding(models) else min(self.max_requests, max(16, 2 * self.seats()))


class Session:
    """The state of one stream. Everything ends with it."""

    def __init__(
        self,
        intake: Intake,
        driver: Driver,
        limits: SessionLimits,
        *,
        rpc_deadline: float | None,
        key: str | None,
    ) -> None:
        self._intake = intake
        self._driver = driver
        self._limits = limits
        self._outbox = SessionOutbox(limits.max_backlog_bytes)
        self._stream = Stream(self._outbox, "session", rpc_deadline, key)
        self._requests: dict[str, asyncio.Task[LiveRequest] | LiveRequest] = {}
        """Requests by the client's name for them; a task while they are being admitted."""
        self._models: set[str] = set()
        """Those that it has had requests for."""
        self._unused_credits = 0
        self._messages = 0
        self._reading = True

    async def run(self, incoming: AsyncIterator[Incoming], context: Context) -> None:
        """Serve the stream until the client has ended its side and everything it asked for is done.

        Raises:
            ServiceError: the client does not read.
        """
        reader = asyncio.create_task(self._read(incoming))
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
            raise
        finally:
            reader.cancel()
            for request in self._requests.values():
                self._drop(request)
            await asyncio.gather(reader, return_exceptions=True)

    def top_up(self) -> None:
        """Grant what a paced session may send beyond what it has live and unused."""
        if not self._stream.paced:
            return
        limit, quota = self._limits.credits(self._models), self._intake.most_live(self._stream)
        if quota is not None:
            limit = min(limit, quota)
        more = limit - self._unused_credits - len(self._requests)
        if more > 0:
            self._unused_credits += more
            self._outbox.grant(more)

    # The client's side ---------------------------------------------------------------------------

    async def _read(self, incoming: AsyncIterator[Incoming]) -> None:
        try:
            async for messages in incoming:
                for number, message in enumerate(messages, 1):
                    self._handle(message)
                    if number % _AT_ONCE == 0:
                        await asyncio.sleep(0)
                self._messages += 1
        finally:
            self._reading = False
            self._outbox.wake()

    def _handle(self, message: Part) -> None:
        if isinstance(message, Malformed):
            self._spend_credit()
            self._intake.open(self._stream).end(message.error.reason)
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
                    self.top_up()
            case "open":
                self._refuse("", ServiceError.invalid(("open", "must be the first message")))
            case None:
                self._refuse("", ServiceError.invalid(("message", "must be set")))

    def _generate(self, message: pb.GenerateRequest) -> None:
        in_credit = self._spend_credit()
        if message.request_id and message.request_id not in self._requests:
            no_room = self._intake.refuse_at_once(message, self._stream)
            if no_room is not None:
                self._outbox.refuse(message.request_id, no_room.to_proto())
                self.top_up()
                return
        record = self._intake.open(self._stream)
        error = self._refusal(message, in_credit=in_credit)
        if error is not None:
            record.request_id = message.request_id
            record.end(error.reason)
            self._refuse(message.request_id, error)
            return
        request_id = message.request_id
        starting = self._intake.start(message, self._stream, record, lambda: self._done(request_id))
        task = self._requests[request_id] = asyncio.create_task(starting)
        task.add_done_callback(lambda task: self._started(request_id, record, task))

    def _started(self, request_id: str, record: RequestRecord, task: asyncio.Task[LiveRequest]) -> None:
        """An admission is over: cancelled perhaps before it began, failed, or the request is live."""
        error: BaseException | None = None
        if task.cancelled():
            record.end("SLOW_CONSUMER" if self._outbox.cut else "CANCELLED")
            error = ServiceError("CANCELLED", "cancelled by the client")
        else:
            error = task.exception()
        if isinstance(error, ServiceError):
            self._refuse(request_id, error)
            self._done(request_id)
            return
        live = task.result()
        self._models.add(live.request.model)
        if not live.ended:
            self._requests[request_id] = live

    def _spend_credit(self) -> bool:
        """Take a credit for a message, whatever becomes of it; return whether it had what it needs."""
        if not self._stream.paced:
            return True
        spent = self._unused_credits > 0
        self._unused_credits -= spent
        return spent

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
        self.top_up()
        self._outbox.wake()

    def _drop(self, request: asyncio.Task[LiveRequest] | LiveRequest) -> None:
        if isinstance(request, LiveRequest):
            self._driver.cancel(request)
        elif not request.cancel() and not request.cancelled() and request.exception() is None:
            # Its admission is over, but `_started` has not run yet.
            self._driver.cancel(request.result())
