"""Answers whose output comes from the service while a client waits, reads, or goes away.

A client that disconnects cancels its request at once. One that does not read is bounded: what it has
not read is merged, and when nothing of it has been taken for a while it is cut off.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Final, Protocol

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.aio import AsyncStream
from octavo.errors import OctavoError
from octavo.gateway.errors import LEVEL_HEADER, Failure, GatewayError, failure_of
from octavo.gateway.metrics import Observation
from octavo.gateway.writers import WholeWriter, Writer
from octavo.service.tasks import all_or_none
from octavo.types import Accepted, GenerateResult, Usage

_log = structlog.get_logger()

ABORT: Final = "octavo.abort"
"""Extension of the ASGI scope: a function that drops the connection with what waits to be read."""
CLIENT_CLOSED: Final = 499
"""Status in logs and metrics of a client that went away."""
_SSE: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would hold events back.
}
_JSON: Final = {"content-type": "application/json"}


class SlowClient(Exception):
    """The client has read nothing for too long."""


class Ask(Protocol):
    """One prompt, ready to be sent. Both methods raise OctavoError for what is wrong with it."""

    def stream(self) -> AsyncStream:
        """Start it; the output comes as it is made."""

    async def whole(self) -> GenerateResult:
        """Return the whole output."""


@dataclass(slots=True)
class Job:
    """A request of HTTP: a request of the service for each prompt, and the writer of the answer."""

    asks: Sequence[Ask]
    writer: WholeWriter
    num_choices: int
    """Of each prompt."""
    observation: Observation
    write_timeout_s: float
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Parameters that have other names than usual, by path in the proto."""
    fields: dict[str, object] = field(default_factory=dict)
    """For the log."""


class JobResponse(Response, ABC):
    """Runs a job against its client's disconnection."""

    def __init__(self, job: Job, headers: Mapping[str, str]) -> None:
        super().__init__()
        self._job = job
        self._own_headers = headers
        self._started = False
        self._complete = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; never raises for what a client or the service does."""
        serving = asyncio.current_task()
        gone = False

        async def watch() -> None:
            nonlocal gone
            while (await receive())["type"] != "http.disconnect":
                pass
            if serving is not None and not self._complete:
                gone = True
                serving.cancel()

        watcher = asyncio.create_task(watch())
        status = 500  # Unless it comes to something else: a fault of ours, told by who calls this.
        try:
            try:
                await self._run(send)
                status = 200
            except OctavoError as error:
                if error.reason == "FORWARDING_KEY_REFUSED":
                    self._job.observation.own_key_refused(error.message)
                status = await self._fail(failure_of(error, self._job.renamed), send)
            except GatewayError as error:
                status = await self._fail(error.failure, send)
        except asyncio.CancelledError:
            status = CLIENT_CLOSED
            if not gone:
                raise
            if serving is not None:
                serving.uncancel()
        except SlowClient:
            status = CLIENT_CLOSED
            self._job.observation.slow()
            abort = scope.get("extensions", {}).get(ABORT)
            if abort is not None:
                abort()
        finally:
            watcher.cancel()
            self._job.observation.end(status)
            self._log(status)

    def _log(self, status: int) -> None:
        observation = self._job.observation
        _log.info("request", status=status, **observation.fields(), **self._job.fields)

    async def _fail(self, failure: Failure, send: Send) -> int:
        if self._started:
            # The status line is gone.
            self._job.fields["failed"] = failure.code
            await self._write(send, self._job.writer.failed(failure), more=False)
        else:
            body = self._job.writer.refusal(failure)
            headers = {**_JSON, "content-length": str(len(body)), **failure.all_headers()}
            await self._begin(send, failure.status, headers)
            await self._write(send, body, more=False)
        return failure.status

    @abstractmethod
    async def _run(self, send: Send) -> None:
        """Write the answer.

        Raises:
            OctavoError: the request was refused or failed.
            SlowClient: the client does not read.
        """

    async def _begin(self, send: Send, status: int, headers: Mapping[str, str]) -> None:
        self._started = True
        pairs = {**self._own_headers, **headers}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})

    async def _write(self, send: Send, body: bytes, *, more: bool) -> None:
        """Write; waits while the client is behind, for as long as it may be."""
        self._complete = not more
        try:
            async with asyncio.timeout(self._job.write_timeout_s):
                await send({"type": "http.response.body", "body": body, "more_body": more})
        except TimeoutError:
            raise SlowClient from None


class WholeResponse(JobResponse):
    """The whole answer at once."""

    async def _run(self, send: Send) -> None:
        job = self._job
        results = await all_or_none(ask.whole() for ask in job.asks)
        usages = [result.usage for result in results]
        job.observation.whole(results)
        body = job.writer.whole(results)
        headers = {**_JSON, "content-length": str(len(body)), **degradation_headers(usages)}
        await self._begin(send, 200, headers | level_header(result.level for result in results))
        await self._write(send, body, more=False)


class EventResponse(JobResponse):
    """The answer as it comes, as server-sent events.

    The status is sent with the first token, so that what goes wrong before has a status of its own.
    """

    async def _run(self, send: Send) -> None:
        job = self._job
        async with AsyncExitStack() as stack:
            streams = [await stack.enter_async_context(ask.stream()) for ask in job.asks]
            if len(streams) == 1:
                await self._pump(streams, 0, send)
            else:
                await all_or_none(self._pump(streams, number, send) for number in range(len(streams)))
            usages = [stream.result.usage for stream in streams]
        job.observation.used(usages)
        await self._write(send, self._writer.end(usages), more=False)

    @property
    def _writer(self) -> Writer:
        assert isinstance(self._job.writer, Writer)
        return self._job.writer

    async def _pump(self, streams: Sequence[AsyncStream], number: int, send: Send) -> None:
        """Write what comes of one prompt, all of a step at once."""
        job, stream, writer = self._job, streams[number], self._writer
        first_choice, began = number * job.num_choices, False
        while (progress := await stream.progress()) is not None:
            if not self._started:
                told = [each.accepted for each in streams if each.accepted is not None]
                headers = {**_SSE, **degradation_headers(told), **level_header(each.level for each in told)}
                await self._begin(send, 200, headers)
            if not began:
                began = True
                choices = range(first_choice, first_choice + job.num_choices)
                writer.scored(choices, stream.prompt_logprobs)
            job.observation.output(progress.deltas)
            accepted = stream.accepted
            prompt_tokens = accepted.prompt_tokens if accepted is not None else 0
            in_reasoning = accepted is not None and accepted.in_reasoning
            events = writer.events(progress, first_choice, prompt_tokens, in_reasoning=in_reasoning)
            if events:
                await self._write(send, events, more=True)


def level_header(levels: Iterable[int | None]) -> dict[str, str]:
    """Return the header that tells the service's level when it took the prompts, the highest of them."""
    known = [level for level in levels if level is not None]
    return {LEVEL_HEADER: str(max(known))} if known else {}


def degradation_headers(usages: Sequence[Usage | Accepted]) -> dict[str, str]:
    """Return headers that tell what was taken from a request under load."""
    headers = {}
    trimmed = sum(usage.trimmed_tokens for usage in usages)
    if trimmed:
        headers["x-octavo-trimmed-tokens"] = str(trimmed)
    clamped = [usage.clamped_max_tokens for usage in usages if usage.clamped_max_tokens is not None]
    if clamped:
        headers["x-octavo-max-tokens"] = str(min(clamped))
    return headers
