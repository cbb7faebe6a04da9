"""What the two faces of the client share: connections, transports, request ids."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from octavo._sdk import requests
from octavo._sdk.call import Call
from octavo._sdk.channel import Connection, Endpoints
from octavo._sdk.session import Patience, Transport
from octavo.errors import ClientClosedError
from octavo.service.tasks import all_or_none
from octavo.types import GenerateResult
from octavo.v1 import generation_pb2 as pb

_T = TypeVar("_T")


class Core:
    """One client. Bound to the event loop that uses it first."""

    def __init__(self, endpoints: Endpoints, patience: Patience) -> None:
        self.endpoints = endpoints
        self._patience = patience
        self._transports: dict[bool, Transport] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._prefix = secrets.token_hex(5)
        self._numbers = itertools.count(1)

    def transport(self, *, paced: bool = False) -> Transport:
        """Return the transport; `paced` is the one that keeps to the service's credits."""
        self._bind()
        if paced not in self._transports:
            self._transports[paced] = Transport(self.endpoints, self._patience, paced=paced)
        return self._transports[paced]

    def prepare(self, request: pb.GenerateRequest) -> pb.GenerateRequest:
        """Name the request, and refuse it when it is too large."""
        if not request.request_id:
            request.request_id = f"{self._prefix}-{next(self._numbers)}"
        requests.check_size(request)
        return request

    async def run(self, request: pb.GenerateRequest) -> GenerateResult:
        """Return the outcome of a request. Cancelling the task cancels it."""
        transport = self.transport()
        ended = asyncio.Event()
        call = Call(self.prepare(request), ended.set)
        transport.submit(call)
        try:
            await ended.wait()
        finally:
            transport.cancel(call)
        return call.result()

    async def run_all(self, requests: Iterable[pb.GenerateRequest]) -> list[GenerateResult]:
        """Return the outcomes of several; the first that fails ends the others."""
        return await all_or_none(self.run(request) for request in requests)

    async def unary(self, call: Callable[[Connection], Awaitable[_T]]) -> _T:
        """Return the answer to a call that may safely be made again."""
        self._bind()
        return await self.endpoints.unary(call, self._patience.connect_s)

    async def serving(self) -> bool:
        """Return whether a scheduler takes requests; see `Endpoints.serving`."""
        self._bind()
        return await self.endpoints.serving(self._patience.connect_s)

    async def once(self, endpoint: str | None, call: Callable[[Connection], Awaitable[_T]]) -> _T:
        """Return the answer to a call that is for one scheduler; see `Endpoints.once`."""
        self._bind()
        return await self.endpoints.once(endpoint, call)

    async def close(self) -> None:
        """Cancel what runs and close the connections."""
        self._closed = True
        transports, self._transports = self._transports, {}
        for transport in transports.values():
            await transport.close()
        await self.endpoints.close()

    def abandon(self) -> None:
        """Close from wherever the collector runs."""
        if not self._closed:
            self._closed = True
            for transport in self._transports.values():
                transport.abandon()

    def _bind(self) -> None:
        loop = asyncio.get_running_loop()
        if self._closed:
            raise ClientClosedError("the client is closed")
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise ClientClosedError("the client belongs to another event loop; make one client per loop")
