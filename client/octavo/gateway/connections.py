"""Connections of clients: how many, how long without a request, and how much in its headers.

uvicorn bounds none of this. What is refused here is told why, as every other refusal is: a connection that
is closed without a word looks like a fault of the network.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from enum import Enum, auto
from http import HTTPStatus
from typing import Any, Final, cast

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from octavo.gateway.bodies import MOST_DISCARDED
from octavo.gateway.errors import Failure, busy, send_failure
from octavo.gateway.responses import ABORT

MAX_HEAD_BYTES: Final = 32 << 10
"""Of a request line and headers, and of whatever comes between two pieces of a body."""
MAX_PIPELINED: Final = 16
"""Requests that a client sends before the answer to the first. Those after them stay unanswered."""
RESERVED: Final = 64
"""Places beyond the most connections, where only these paths are answered."""
OPEN_PATHS: Final = frozenset({"/health", "/metrics"})
_LINGER_S: Final = 1.0
"""Between an answer and the end of its connection: what the client still sends would destroy the answer."""


class Place(Enum):
    """What a connection gets."""

    FULL = auto()
    RESERVED = auto()
    NONE = auto()


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Longest times, in seconds."""

    head_s: float
    """From a connection, or the first byte of a request, to the end of its headers."""
    body_s: float
    write_s: float
    """Without the client taking anything of what waits for it."""

    @property
    def check_every_s(self) -> float:
        """How often a connection is looked at."""
        return min(5.0, self.head_s / 4, self.body_s / 4, self.write_s / 4)


class Connections:
    """Gives connections their places, and counts those of all clients and of each address."""

    def __init__(self, most: int, timeouts: Timeouts) -> None:
        self.timeouts = timeouts
        self._most = most
        self._taken: Counter[Place] = Counter()
        self._of_peer: Counter[str] = Counter()

    def enter(self, peer: str) -> tuple[Place, Failure | None]:
        """Give a connection its place; with the reason where that is not a full one."""
        refusal = None
        if self._taken[Place.FULL] >= self._most:
            refusal = busy(503, "the gateway has as many connections as it may", "gateway_full")
        elif self._of_peer[peer] >= max(1, self._most // 2):
            refusal = busy(429, "this address has as many connections as it may", "too_many_connections")
        place = Place.FULL
        if refusal is not None:
            place = Place.RESERVED if self._taken[Place.RESERVED] < RESERVED else Place.NONE
        self._taken[place] += 1
        self._of_peer[peer] += place is Place.FULL
        return place, refusal

    def leave(self, peer: str, place: Place) -> None:
        """A connection has ended."""
        self._taken[place] -= 1
        self._of_peer[peer] -= place is Place.FULL
        if not self._of_peer[peer]:
            del self._of_peer[peer]


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol within the bounds above.

    It also lets the application drop a connection that nobody reads: closing one in the usual way waits until
    what was written has been read.
    """

    def __init__(
        self,
        connections: Connections,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._connections = connections
        self._place = Place.FULL
        self._peer = ""
        self._timer: asyncio.TimerHandle | None = None
        self._due: float | None = None
        """When the headers that are to come must be there; None while none are."""
        self._receiving = False
        """Between the first byte of a request and the last of its body."""
        self._discard_until: float | None = None
        self._discarded_bytes = 0
        self._unseen_bytes = 0
        """That came since the last piece of a body."""
        self._head_bytes = 0
        self._unread: tuple[int, float] = 0, 0.0
        """What waits for the client to read it, and since when it is as much."""
        self._fault: Failure | None = None
        self._deaf = False
        """The connection is about to end, and nothing that comes is looked at."""

    # The connection ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Give it a place."""
        super().connection_made(cast("asyncio.Transport", transport))
        self._peer = self.client[0] if self.client is not None else ""
        self._place, refusal = self._connections.enter(self._peer)
        self._due = self.loop.time() + self._connections.timeouts.head_s
        self._timer = self.loop.call_later(self._connections.timeouts.check_every_s, self._check)
        if refusal is not None:
            self.app = cast("Any", _OnlyOpenPaths(self.app, refusal))
            if self._place is Place.NONE:
                self._end(refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        """Free its place."""
        super().connection_lost(exc)
        self._connections.leave(self._peer, self._place)
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Take bytes in, unless they are too many for what they are."""
        if self._deaf:
            return
        if self._due is None and not self._receiving and (self.cycle is None or self.cycle.response_complete):
            self._due = self.loop.time() + self._connections.timeouts.head_s
        self._unseen_bytes += len(data)
        super().data_received(data)
        if self._unseen_bytes > MAX_HEAD_BYTES and not self._deaf:
            self._fault = _HEAD_TOO_LARGE
            self.send_400_response(_HEAD_TOO_LARGE.message)

    def _check(self) -> None:
        """End a connection whose client is too slow at something."""
        now, timeouts = self.loop.time(), self._connections.timeouts
        self._timer = self.loop.call_later(timeouts.check_every_s, self._check)
        size = self.transport.get_write_buffer_size()
        if size == 0 or size != self._unread[0]:
            self._unread = size, now
        elif now - self._unread[1] >= timeouts.write_s:
            self.transport.abort()
            return
        if self._due is not None and now >= self._due and not self._deaf:
            if self._receiving:
                self._end(_HEAD_TIMEOUT)
            else:
                self.transport.close()
        elif self._receiving and self.cycle is not None and self.cycle.response_complete:
            if self._discard_until is None:
                self._discard_until = now + timeouts.body_s
            elif now >= self._discard_until:
                self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, or too much of it; what was asked before is answered."""
        if self.pipeline:
            self.pipeline[0][0].keep_alive = False
            self._deaf = True
        elif self.cycle is None or self.cycle.response_complete:
            self._end(self._fault or Failure(400, msg, "invalid_http", retry=False))
        elif self._receiving and not self.cycle.response_started:
            # Who waits for the body is told that there will be none.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self._end(self._fault or Failure(400, msg, "invalid_http", retry=False))
        else:
            self.cycle.keep_alive = False
            self._deaf = True

    def _end(self, failure: Failure) -> None:
        """Say why, and end the connection when the client has had time to read it."""
        self._deaf = True
        self._due = None
        body = failure.encoded()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            **failure.all_headers(),
        }
        lines = [f"HTTP/1.1 {failure.status} {HTTPStatus(failure.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.transport.write("\r\n".join((*lines, "", "")).encode("latin-1") + body)
        self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.abort)

    # Requests ------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self._receiving = True
        self._head_bytes = self._discarded_bytes = 0
        self._discard_until = None
        self._due = self.loop.time() + self._connections.timeouts.head_s
        # ASGI leaves what an extension holds to its server.
        self.scope["extensions"] = cast("dict[str, dict[object, object]]", {ABORT: self.transport.abort})

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header in, or what follows a body as one."""
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > MAX_HEAD_BYTES:
            self._fault = _HEAD_TOO_LARGE
            raise ValueError(_HEAD_TOO_LARGE.message)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start to answer, or put the request behind those that are not answered yet."""
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many requests at once on one connection")
        self._due = None
        self._unseen_bytes = 0
        super().on_headers_complete()
        # What is not asked for yet stays with the system: whoever may send nothing shall not fill our memory.
        if self.parser.get_method() == b"POST" and not self.cycle.response_complete:
            self.flow.pause_reading()

    def on_body(self, body: bytes) -> None:
        """Take a piece of a body in, or drop it after a refusal."""
        self._unseen_bytes = 0
        if self.cycle.response_complete:
            self._discarded_bytes += len(body)
            if self._discarded_bytes > MOST_DISCARDED:
                self.transport.abort()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request has come whole."""
        self._receiving = False
        self._unseen_bytes = 0
        super().on_message_complete()
        if self.cycle.response_complete and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )


_HEAD_TOO_LARGE: Final = Failure(
    431, f"the headers have more than {MAX_HEAD_BYTES} bytes", "headers_too_large", retry=False
)
_HEAD_TIMEOUT: Final = Failure(408, "the headers did not come in time", "headers_timeout")


class _OnlyOpenPaths:
    """What answers on a reserved place."""

    def __init__(self, app: ASGIApp, refusal: Failure) -> None:
        self._app = app
        self._refusal = refusal.with_headers({"connection": "close"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
        else:
            await send_failure(send, self._refusal)
