"""Bounds on the bodies of requests: their size, and the time that they take to come."""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.gateway.errors import Failure

_MOST_DISCARDED: Final = 64 << 20


class BodyLimits:
    """ASGI middleware that answers 413 and 408 for bodies that are too large or too slow."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with a body that was read whole."""
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"")
        known = int(length) if length.isdigit() and len(length) < 20 else 0
        if known > _MOST_DISCARDED or (known > self._max_bytes and b"expect" in headers):
            await self._refuse(send)
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                body = await self._read(receive)
        except TimeoutError:
            message = f"the body did not come within {self._timeout_s:g} s"
            await answer(send, Failure(408, message, "body_timeout"), {"connection": "close"})
            return
        except _TooLarge:
            await self._refuse(send)
            return
        if body is None:
            return  # The client went away.
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)

    async def _read(self, receive: Receive) -> bytes | None:
        """Return the body, or None when the client went away.

        A body that is too large is read to its end first, within bounds: most clients look for an answer
        only then, and a connection that is closed while they send shows them no answer at all.

        Raises:
            _TooLarge: it is.
        """
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            size += len(part)
            if size <= self._max_bytes:
                parts.append(part)
            more = message.get("more_body", False)
            if size > _MOST_DISCARDED or (size > self._max_bytes and not more):
                raise _TooLarge
            if not more:
                return b"".join(parts)

    async def _refuse(self, send: Send) -> None:
        message = f"the body is larger than {self._max_bytes} bytes"
        # What is left of the body would be taken for the next request.
        await answer(send, Failure(413, message, "request_too_large", retry=False), {"connection": "close"})


class _TooLarge(Exception):
    pass


async def answer(send: Send, failure: Failure, headers: dict[str, str]) -> None:
    """Send a failure as the whole answer."""
    body = failure.encoded()
    pairs = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **failure.all_headers(),
        **headers,
    }
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs.items()]
    await send({"type": "http.response.start", "status": failure.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
