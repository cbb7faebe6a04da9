"""Many requests on one `Session` stream, which may break and be made again without anybody noticing.

A `Call` holds all that is known of one request, so that it can be submitted again with what it has
already generated. A `SessionStream` is one life of the connection. The `Transport` gives calls to the present
stream and takes back those whose stream was lost. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import copy
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import grpc
import grpc.aio

from octavo._sdk import answers
from octavo._sdk.call import GRACE_S, Call
from octavo._sdk.channel import Connection, Endpoints, from_rpc, stands_still
from octavo.errors import (
    AccessDeniedError,
    ClientClosedError,
    DeadlineExceededError,
    ErrorInfo,
    InternalError,
    InvalidRequestError,
    OctavoError,
    RequestCancelledError,
    UnavailableError,
)
from octavo.v1 import common_pb2
from octavo.v1 import generation_pb2 as pb

_FIRST_DELAY_S: Final = 0.05
_MAX_DELAY_S: Final = 1.0
# The loss of a stream older than this is a new trouble, not more of the last one.
_SETTLED_S: Final = 5.0
# A scheduler that says nothing for this long while requests run on it is asked whether it stands still.
_SILENT_S: Final = 1.0
# If so, the others are asked this often whether one of them serves by now, so many times; then it, once more.
_LOOK_AGAIN_S: Final = 0.25
_LOOKS: Final = 4
# Requests that are sent in one message have this many bytes at most, unless one alone has more.
_TOGETHER_BYTES: Final = 1 << 18
# A stream that ends with one of these may be made again.
_RETRYABLE: Final = frozenset(
    {
        grpc.StatusCode.OK,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.ABORTED,
    }
)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to try: until the first connection stands, and to get a lost one back. Seconds."""

    connect_s: float
    reconnect_s: float


class SessionStream:
    """One `Session` call. Reports to its transport what arrives, and its own end exactly once."""

    def __init__(
        self,
        connection: Connection,
        on_message: Callable[[SessionStream, pb.SessionEvent], None],
        on_lost: Callable[[SessionStream, grpc.StatusCode, OctavoError], None],
    ) -> None:
        self.connection = connection
        self.calls: dict[str, Call] = {}
        self.leaving: dict[str, int] = {}
        """Requests cancelled here, and how many ends the server has still to tell of each."""
        self.credits = 0
        self._loop = asyncio.get_running_loop()
        self.opened_at = self.heard_at = self._loop.time()
        """`heard_at` is when anything came, or was first to be expected."""
        self.listener: asyncio.Task[None] | None = None
        """Watches for silence while requests run."""
        self._on_message = on_message
        self._on_lost = on_lost
        self._outbox: deque[pb.SessionRequest | pb.GenerateRequest] = deque()
        self._filled = asyncio.Event()
        self._closing = False
        self._rpc = connection.generation.Session(None, metadata=connection.metadata)
        self._tasks = (asyncio.create_task(self._read()), asyncio.create_task(self._write()))

    def post(self, message: pb.SessionRequest | pb.GenerateRequest) -> None:
        """Send when those before are sent."""
        self._outbox.append(message)
        self._filled.set()

    def submit(self, call: Call, now: float) -> None:
        """Send a request, or what is left of it to do."""
        if not self.calls:
            self.heard_at = now
        self.calls[call.request_id] = call
        self.post(call.to_send(now))

    def cancel(self, call: Call) -> None:
        """Let go of a request that was sent. Its id is free when the server has told the end of it."""
        del self.calls[call.request_id]
        self.leaving[call.request_id] = call.ends_to_come
        self.post(pb.SessionRequest(cancel=pb.CancelRequest(request_id=call.request_id)))

    def forget(self, event: pb.RequestEvent) -> None:
        """Take in what the server says of a request that was cancelled here."""
        kind = event.WhichOneof("event")
        if kind == "finished":
            self.leaving[event.request_id] -= 1
        if kind == "error" or self.leaving[event.request_id] < 1:
            del self.leaving[event.request_id]

    async def close(self) -> None:
        """End the call and its connection."""
        self._closing = True
        self._rpc.cancel()
        tasks = [*self._tasks, *([self.listener] if self.listener is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.connection.close()

    async def _read(self) -> None:
        code = grpc.StatusCode.DATA_LOSS
        error: OctavoError = InternalError("an event of the service could not be read")
        try:
            while isinstance(message := await self._rpc.read(), pb.SessionEvent):
                self.heard_at = self._loop.time()
                self._on_message(self, message)
            code, error = grpc.StatusCode.OK, UnavailableError("the scheduler ended the stream")
        except grpc.aio.AioRpcError as rpc_error:
            code, error = rpc_error.code(), from_rpc(rpc_error)
        finally:
            if not self._closing:
                self._on_lost(self, code, error)

    async def _write(self) -> None:
        # A write on a stream that is gone raises; the reader tells how it ended.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await self._filled.wait()
                self._filled.clear()
                while self._outbox:
                    await self._rpc.write(next_message(self._outbox))


def next_message(outbox: deque[pb.SessionRequest | pb.GenerateRequest]) -> pb.SessionRequest:
    """Take the next message out; requests that wait to be written at the same time go together."""
    first = outbox.popleft()
    if isinstance(first, pb.SessionRequest):
        return first
    together, size_bytes = [first], first.ByteSize()
    while outbox and isinstance(another := outbox[0], pb.GenerateRequest):
        size_bytes += another.ByteSize()
        if size_bytes > _TOGETHER_BYTES:
            break
        together.append(another)
        outbox.popleft()
    if len(together) == 1:
        return pb.SessionRequest(generate=first)
    return pb.SessionRequest(generate_many=pb.GenerateRequests(requests=together))


class Transport:
    """All requests of one client in one class of pacing."""

    def __init__(self, endpoints: Endpoints, patience: Patience, *, paced: bool = False) -> None:
        self._endpoints = endpoints
        self._patience = patience
        self._paced = paced
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, Call] = {}
        self._stream: SessionStream | None = None
        self._retiring: set[SessionStream] = set()
        self._connector: asyncio.Task[None] | None = None
        self._closers: set[asyncio.Task[None]] = set()
        self._connected_before = False
        self._trouble_since: float | None = None
        self._delay_s = _FIRST_DELAY_S
        self._last_task: asyncio.Task[None] | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._closed = False
        self._pid = os.getpid()

    def submit(self, call: Call) -> None:
        """Start a request. Its end comes to the call, whatever happens."""
        if self._closed:
            call.fail(ClientClosedError("the client is closed"))
            return
        if self._is_live(call.request_id):
            problem = "a live request of this client has it already"
            call.fail(InvalidRequestError.of_fields(("request_id", problem), reason="DUPLICATE_REQUEST_ID"))
            return
        # One of a batch waits for credit first, which is the service's time and not its own.
        if not self._paced:
            self._begin(call)
        self._waiting[call.request_id] = call
        self._flush()

    def _begin(self, call: Call) -> None:
        call.begin(self._loop.time())
        if call.timer is None:
            self._watch(call)

    def _watch(self, call: Call) -> None:
        """End a request when the service has not kept to its bounds, and has not said so either."""
        due_at = call.due_at()
        if due_at is None:
            call.timer = None
        elif due_at + GRACE_S <= self._loop.time():
            self.cancel(call, _overdue())
        else:
            call.timer = self._loop.call_at(due_at + GRACE_S, self._watch, call)

    def cancel(self, call: Call, error: OctavoError | None = None) -> None:
        """End a request with an error, here and on the server."""
        if call.done:
            return
        if self._waiting.get(call.request_id) is call:
            del self._waiting[call.request_id]
        for stream in self._streams():
            if stream.calls.get(call.request_id) is call:
                stream.cancel(call)
                self._retire_if_empty(stream)
        call.fail(error or RequestCancelledError("the request was cancelled by its caller"))

    async def close(self) -> None:
        """Cancel all requests and close the connections."""
        self._closed = True
        if self._pause is not None:
            self._pause.cancel()
        if self._connector is not None:
            self._connector.cancel()
            await asyncio.gather(self._connector, return_exceptions=True)
        streams = list(self._streams())
        self._stream = None
        self._retiring.clear()
        calls = [*self._waiting.values(), *(call for stream in streams for call in stream.calls.values())]
        self._waiting.clear()
        await asyncio.gather(*(stream.close() for stream in streams), *self._closers)
        for call in calls:
            call.fail(ClientClosedError("the client was closed while the request ran"))

    def post(self, function: Callable[..., object], *args: object) -> None:
        """Call a function on the loop, from any thread; in a forked child, or too late, do nothing."""
        if os.getpid() == self._pid:
            with suppress(RuntimeError):  # The loop is closed: all that ran on it has ended.
                self._loop.call_soon_threadsafe(function, *args)

    def abandon(self) -> None:
        """Close without anybody waiting for it, from any thread."""
        self.post(self._abandon)

    def _abandon(self) -> None:
        self._last_task = asyncio.create_task(self.close())

    def _is_live(self, request_id: str) -> bool:
        return request_id in self._waiting or any(request_id in stream.calls for stream in self._streams())

    def _streams(self) -> list[SessionStream]:
        return [*self._retiring, *([self._stream] if self._stream is not None else [])]

    def _flush(self) -> None:
        """Send what waits, as far as there is a stream and credit."""
        if self._stream is None:
            if self._waiting and self._connector is None and not self._closed:
                self._connector = asyncio.create_task(self._connect())
            return
        now = self._loop.time()
        for request_id in list(self._waiting):
            if request_id in self._stream.leaving:
                continue
            if self._paced:
                if self._stream.credits < 1 or self._pause is not None:
                    return
                self._stream.credits -= 1
            call = self._waiting.pop(request_id)
            if self._paced:
                self._begin(call)
            self._stream.submit(call, now)
        if len(self._endpoints) > 1 and self._stream.calls:
            self._listen_to(self._stream)

    def _listen_to(self, stream: SessionStream) -> None:
        """Watch a stream with requests, if nobody does yet."""
        if stream.listener is None or stream.listener.done():
            stream.listener = asyncio.create_task(self._listen(stream))

    async def _listen(self, stream: SessionStream) -> None:
        """While requests run on a stream, leave it when its scheduler stands still and another one serves.

        A connection to a process that stands still does not break, and the keepalive takes seconds. What is
        slow is not left: it answers. What stands still is not left either until the others have its workers.
        """
        endpoint = stream.connection.endpoint
        while stream.calls:
            heard_at = stream.heard_at
            if (left_s := heard_at + _SILENT_S - self._loop.time()) > 0:
                await asyncio.sleep(left_s)
                continue
            if not await stands_still(stream.connection):
                stream.heard_at = self._loop.time()
                continue
            for _ in range(_LOOKS):
                serves = await self._endpoints.another_serves(endpoint)
                if stream.heard_at != heard_at:
                    break
                if serves:
                    error = UnavailableError(f"{endpoint} stands still")
                    self._on_lost(stream, grpc.StatusCode.UNAVAILABLE, error)
                    return
                await asyncio.sleep(_LOOK_AGAIN_S)

    def _pause_for(self, delay_s: float) -> None:
        """Send nothing for a while: a batch waits for its tenant's quota instead of failing on it."""
        if self._pause is None:
            self._pause = self._loop.call_later(delay_s, self._go_on)

    def _go_on(self) -> None:
        self._pause = None
        self._flush()

    async def _connect(self) -> None:
        try:
            while self._waiting and self._stream is None:
                if self._trouble_since is not None:
                    await asyncio.sleep(self._delay_s)
                    self._delay_s = min(self._delay_s * 2, _MAX_DELAY_S)
                began_at = self._loop.time()
                try:
                    connection = await self._endpoints.dial()
                except UnavailableError as error:
                    self._trouble_since = began_at if self._trouble_since is None else self._trouble_since
                    self._give_up_if_late(error)
                    continue
                self._connected_before = True
                self._stream = SessionStream(connection, self._on_message, self._on_lost)
                if self._paced:
                    self._stream.post(pb.SessionRequest(open=pb.OpenSession(paced=True)))
        finally:
            self._connector = None
        self._flush()

    def _on_message(self, stream: SessionStream, message: pb.SessionEvent) -> None:
        calls = stream.calls
        has_output = False
        for event in message.events:
            if event.request_id in stream.leaving:
                stream.forget(event)
                continue
            call = calls.get(event.request_id)
            if call is None:
                continue
            if (
                self._paced
                and event.error.reason == "QUOTA_EXCEEDED"
                and event.error.HasField("retry_delay_ms")
            ):
                self._waiting[call.request_id] = calls.pop(call.request_id)
                call.put_back()
                self._pause_for(event.error.retry_delay_ms / 1000)
                continue
            if self._may_try_elsewhere(call, event.error):
                self._waiting[call.request_id] = calls.pop(call.request_id)
                self._move_away(stream, call, answers.error_info(event.error))
                continue
            try:
                call.apply(event)
            except Exception as error:  # noqa: BLE001 - told to the one whose event it is
                self.cancel(call, InternalError(f"an event of the service could not be read: {error!r}"))
                calls.pop(call.request_id, None)
                continue
            has_output = has_output or event.HasField("delta")
            if call.done:
                del calls[call.request_id]
        # What a scheduler that was left still sends says nothing of whether there is another one.
        if has_output and stream is self._stream:
            self._calm()
        stream.credits += message.credits
        self._retire_if_empty(stream)
        self._flush()

    def _on_lost(self, stream: SessionStream, code: grpc.StatusCode, error: OctavoError) -> None:
        orphans = list(stream.calls.values())
        stream.calls = {}
        if self._stream is stream:
            self._stream = None
        self._retiring.discard(stream)
        self._discard(stream)
        self._waiting = {call.request_id: call for call in orphans} | self._waiting
        if code not in _RETRYABLE:
            self._fail_waiting(error)
            return
        self._endpoints.demote(stream.connection.endpoint)
        if not self._waiting:
            self._calm()
        self._calm_if_settled(stream)
        if self._waiting:
            self._give_up_if_late(error)
        self._flush()

    def _may_try_elsewhere(self, call: Call, error: common_pb2.Error) -> bool:
        """Return whether an error is no reason to fail: the next scheduler, or this one soon, may take it.

        A scheduler that drains is about to be replaced. One without a worker says when to ask again if it
        expects any, as it does when it has just been started; or another one has its workers. A new request
        that has no other way to go need not wait for what nobody expects.
        """
        if error.reason == "NO_WORKER":
            expected = error.HasField("retry_delay_ms")
            return expected or call.accepted is not None or len(self._endpoints) > 1
        return error.reason == "DRAINING"

    def _move_away(self, stream: SessionStream, call: Call, info: ErrorInfo) -> None:
        """Leave a scheduler to those of our requests that run there; this one goes on elsewhere.

        Where it says which scheduler has the workers, that one is asked next, if it is one of ours.
        """
        if self._stream is stream:
            self._stream = None
            self._retiring.add(stream)
            self._calm_if_settled(stream)
            if not self._endpoints.prefer(info.metadata.get("endpoint", "")):
                self._endpoints.demote(stream.connection.endpoint)
            if len(self._endpoints) == 1:
                self._delay_s = min(max(self._delay_s, info.retry_after_s or 0.0), _MAX_DELAY_S)
        error = UnavailableError(info.message, info)
        now = self._loop.time()
        if call.trouble_since is None:
            call.trouble_since = now
        elif now - call.trouble_since >= self._limit_s:
            del self._waiting[call.request_id]
            call.fail(error)
        self._give_up_if_late(error)

    def _retire_if_empty(self, stream: SessionStream) -> None:
        if stream in self._retiring and not stream.calls:
            self._retiring.remove(stream)
            self._discard(stream)

    def _discard(self, stream: SessionStream) -> None:
        task = asyncio.create_task(stream.close())
        self._closers.add(task)
        task.add_done_callback(self._closers.discard)

    def _calm_if_settled(self, stream: SessionStream) -> None:
        if self._loop.time() - stream.opened_at > _SETTLED_S:
            self._calm()

    def _calm(self) -> None:
        """The next trouble is a new one."""
        self._trouble_since = None
        self._delay_s = _FIRST_DELAY_S

    def _give_up_if_late(self, error: OctavoError) -> None:
        now = self._loop.time()
        if self._trouble_since is None:
            self._trouble_since = now
        if now - self._trouble_since < self._limit_s:
            return
        info = ErrorInfo(error.reason, error.message, retry_after_s=error.retry_after_s)
        self._fail_waiting(UnavailableError(error.message, info))

    @property
    def _limit_s(self) -> float:
        """How long trouble may last."""
        return self._patience.reconnect_s if self._connected_before else self._patience.connect_s

    def _fail_waiting(self, error: OctavoError) -> None:
        calls, self._waiting = list(self._waiting.values()), {}
        self._calm()
        for call in calls:
            call.fail(_of_connection(error) if call.has_key else copy.copy(error))


def _of_connection(error: OctavoError) -> OctavoError:
    """Return the error of a request with a key of its own, whose connection failed: the keys are two."""
    if not isinstance(error, AccessDeniedError):
        return copy.copy(error)
    message = f"the connection's own key was refused, not that of the request: {error.message}"
    return UnavailableError(message, ErrorInfo("FORWARDING_KEY_REFUSED", message, 14))


def _overdue() -> DeadlineExceededError:
    return DeadlineExceededError("the deadline passed, and the service did not answer in time to say where")
