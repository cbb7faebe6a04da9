"""The way in for bodies: whoever may not, and whatever is too much, is refused before it costs anything."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.gateway.config import GatewayServerSection
from octavo.gateway.errors import Failure, GatewayError, busy, send_failure
from octavo.gateway.json_bounds import JsonScale, TooDeep, TooHeavy
from octavo.gateway.key_check import KeyCheck
from octavo.gateway.metrics import Metrics
from octavo.gateway.routes import WITH_BODY, Route
from octavo.gateway.translate import bearer_key
from octavo.protocol.bounds import short
from octavo.service.memory import MemoryCeiling

MOST_DISCARDED: Final = 64 << 20
"""Of a body that was refused: most clients look for an answer only when they have sent theirs."""
_MAX_DETOKENIZE: Final = 4 << 20
_OTHER_UNICODE: Final = (b"\xff\xfe", b"\xfe\xff")


class Budget:
    """Bytes of bodies that have come and are not parsed yet, of all peers and of each."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: Counter[str] = Counter()

    def take(self, peer: str, size: int) -> Failure | None:
        """Count bytes of a peer; return why there is no room for them, if so. One has half of it at most."""
        if self._held.total() + size > self._max_bytes:
            return busy(503, "the gateway receives as much as it can hold", "gateway_full")
        if self._held[peer] + size > self._max_bytes // 2:
            return busy(429, "this address sends too many bodies at once", "too_many_bodies")
        self._held[peer] += size
        return None

    def give_back(self, peer: str, size: int) -> None:
        """They are parsed, or dropped."""
        self._held[peer] -= size
        if not self._held[peer]:
            del self._held[peer]


class Bodies:
    """ASGI middleware that passes requests on with bodies which were read whole and are not too much."""

    def __init__(
        self,
        app: ASGIApp,
        settings: GatewayServerSection,
        keys: KeyCheck,
        ceiling: MemoryCeiling,
        metrics: Metrics,
    ) -> None:
        self._app = app
        self._max_bytes = settings.max_body_bytes
        self._timeout_s = settings.read_timeout_s
        self._budget = Budget(settings.max_receiving_bytes)
        self._keys = keys
        self._ceiling = ceiling
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request at its headers, or while its body comes; else pass it on."""
        route = WITH_BODY.get(scope["path"]) if scope["type"] == "http" else None
        if route is None or scope["method"] != "POST":
            refusal = await self._may_look(scope) if scope["type"] == "http" else None
            if refusal is None:
                await self._app(scope, receive, send)
            else:
                await self._refuse(send, route, refusal)
            return
        headers, peer = Headers(scope=scope), (scope["client"] or ("",))[0]
        max_bytes = self._max_bytes
        if route.handler == "detokenize":
            max_bytes = min(max_bytes, _MAX_DETOKENIZE)
        try:
            await self._check(headers, max_bytes)
            body = await self._read(receive, max_bytes, peer)
        except GatewayError as error:
            await self._refuse(send, route, error.failure)
            return
        if body is not None:
            await self._app(scope, _replay(body, receive), send)

    async def _may_look(self, scope: Scope) -> Failure | None:
        """Return why a request without a body is refused, None when it is not."""
        path = scope["path"]
        if path == "/health" or path.startswith("/v1/models"):
            # A probe has no key, and of models the scheduler tells only whom it may.
            return None
        try:
            key = bearer_key(Headers(scope=scope))
        except GatewayError as error:
            return error.failure
        return await self._keys.refusal_to_look(key, figures=path == "/metrics")

    async def _check(self, headers: Headers, max_bytes: int) -> None:
        """Refuse by what the headers say.

        Raises:
            GatewayError: with the reason.
        """
        length = headers.get("content-length", "")
        known = int(length) if length.isdecimal() and len(length) < 20 else 0
        # Who waits to be told to go on sends no body after a refusal, and what comes next is not one.
        closing = _CLOSE if "expect" in headers or known > MOST_DISCARDED else {}
        try:
            refusal = await self._keys.refusal(bearer_key(headers))
        except GatewayError as error:
            refusal = error.failure
        coding = headers.get("content-encoding", "identity")
        if refusal is not None:
            raise GatewayError(refusal.with_headers(closing))
        if self._ceiling.is_reached():
            full = busy(503, "the gateway has as much memory as it may", "memory_ceiling")
            raise GatewayError(full.with_headers(closing))
        if coding.lower() != "identity":
            name, code = "content-encoding", "unsupported_media_type"
            message = f"{name}: must be identity, got {short(coding)!r}"
            raise GatewayError(Failure(415, message, code, name, retry=False, headers=closing))
        if known > max_bytes:
            raise GatewayError(_too_large(max_bytes, closing))

    async def _read(self, receive: Receive, max_bytes: int, peer: str) -> bytes | None:
        """Return a body, or None when the client went away.

        Raises:
            GatewayError: it is too large, too slow, too much, or there is no room for it.
        """
        body, scale, more = bytearray(), JsonScale(), True
        try:
            async with asyncio.timeout(self._timeout_s):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    piece, more = message.get("body", b""), message.get("more_body", False)
                    if len(body) + len(piece) > max_bytes:
                        raise GatewayError(_too_large(max_bytes))
                    if (refusal := self._budget.take(peer, len(piece))) is not None:
                        raise GatewayError(refusal)
                    body += piece
                    scale.add(piece)
        except TimeoutError:
            problem = f"the body did not come within {self._timeout_s:g} s"
            raise GatewayError(Failure(408, problem, "body_timeout", headers=_CLOSE)) from None
        except TooDeep as error:
            raise GatewayError(Failure(400, str(error), "invalid_request", retry=False)) from None
        except TooHeavy as error:
            raise GatewayError(Failure(413, str(error), "request_too_large", retry=False)) from None
        finally:
            self._budget.give_back(peer, len(body))
        if body.startswith(_OTHER_UNICODE) or b"\0" in body[:4]:
            raise GatewayError(Failure(400, "the body must be JSON in UTF-8", "invalid_request", retry=False))
        return bytes(body)

    async def _refuse(self, send: Send, route: Route | None, failure: Failure) -> None:
        handler = route.handler if route is not None else "unknown"
        self._metrics.requests.labels(handler, str(failure.status)).inc()
        await send_failure(send, failure, anthropic=route is not None and route.anthropic)


_CLOSE: Final = {"connection": "close"}


def _too_large(max_bytes: int, headers: Mapping[str, str] = MappingProxyType({})) -> Failure:
    message = f"the body is larger than {max_bytes} bytes"
    return Failure(413, message, "request_too_large", retry=False, headers=headers)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body first."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    return replay
