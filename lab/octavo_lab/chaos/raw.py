"""A client of plain `Generate` that goes on after a lost stream, as docs/other-languages.md tells it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Final, cast

import grpc
import grpc.aio
from octavo.v1 import common_pb2
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as pb_grpc

OPTIONS: Final = (
    *(("grpc.keepalive_time_ms", 2_000), ("grpc.keepalive_timeout_ms", 3_000)),
    *(("grpc.http2.ping_timeout_ms", 3_000), ("grpc.http2.bdp_probe", 0)),
)
_PAUSE_S: Final = (0.1, 1.0)
"""Between two tries, at first and at most."""
_ENOUGH_S: Final = 5.0
"""To wait for a scheduler that says nothing at all, before the next is tried."""
_LOST: Final = tuple(grpc.StatusCode[name] for name in ("CANCELLED", "INTERNAL", "UNKNOWN", "ABORTED"))
"""What gRPC makes of a broken transport, besides UNAVAILABLE."""
OnDelta = Callable[[int, Sequence[int], str], None]


class GenerateFailed(Exception):
    """A request ended with an error."""


class Resumption:
    """One request: what has come, and what to send so that the rest comes and nothing twice."""

    def __init__(self, request: pb.GenerateRequest, on_delta: OnDelta) -> None:
        self._request = request
        self._on_delta = on_delta
        self._accepted: pb.Accepted | None = None
        self._choices = [pb.ResumedChoice(choice=index) for index in range(max(1, request.sampling.n))]
        self._finished: set[int] = set()

    @property
    def done(self) -> bool:
        """Whether every choice has its end."""
        return len(self._finished) == len(self._choices)

    def to_send(self) -> pb.GenerateRequest:
        """Return the request as asked, and, once it was accepted, what goes on from there."""
        request = pb.GenerateRequest()
        request.CopyFrom(self._request)
        if self._accepted is not None:
            request.sampling.seed = self._accepted.seed
            request.accepted_as.prompt_tokens = self._accepted.prompt_tokens
            if self._accepted.HasField("clamped_max_tokens"):
                request.accepted_as.clamped_max_tokens = self._accepted.clamped_max_tokens
            request.resume.extend(choice for choice in self._choices if choice.token_ids)
        return request

    def take(self, event: pb.GenerateEvent) -> None:
        """Take in an event; GenerateFailed: it is a bad end."""
        match event.WhichOneof("event"):
            case "accepted" if self._accepted is None:
                self._accepted = event.accepted
            case "delta" if event.delta.choice not in self._finished:
                delta, choice = event.delta, self._choices[event.delta.choice]
                choice.token_ids.extend(delta.token_ids)
                choice.shown_bytes += len(delta.text.encode())
                self._on_delta(delta.choice, delta.token_ids, delta.text)
            case "finished":
                if event.finished.HasField("error"):
                    raise GenerateFailed(f"{event.finished.error.message} [{event.finished.error.reason}]")
                self._finished.add(event.finished.choice)
            case _:
                pass


def may_go_on(code: grpc.StatusCode, reason: str) -> bool:
    """Return whether a request that ended so may be sent again; `reason` is the service's own, if any."""
    return code is grpc.StatusCode.UNAVAILABLE or (code in _LOST and not reason)


async def generate(endpoints: Sequence[str], request: pb.GenerateRequest, on_delta: OnDelta) -> int:
    """Run a request to its end, whatever becomes of schedulers; return how often it was refused for load.

    Raises:
        GenerateFailed: it ended with an error.
    """
    state, refused, pause_s = Resumption(request, on_delta), 0, _PAUSE_S[0]
    for endpoint in itertools.cycle(endpoints):
        async with grpc.aio.insecure_channel(endpoint, options=OPTIONS) as channel:
            stub = cast("pb_grpc.GenerationAsyncStub", pb_grpc.GenerationStub(channel))
            call = stub.Generate(state.to_send())
            try:
                async with asyncio.timeout(_ENOUGH_S) as limit:
                    async for event in call:
                        limit.reschedule(None)
                        state.take(event)
                        pause_s = _PAUSE_S[0]
                if state.done:
                    return refused
            except TimeoutError:
                call.cancel()
            except grpc.aio.AioRpcError as error:
                told = _told(error)
                if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    refused += 1
                    pause_s = max(pause_s, told.retry_delay_ms / 1000)
                elif not may_go_on(error.code(), told.reason):
                    raise GenerateFailed(f"{error.details()} [{told.reason or error.code().name}]") from None
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_S[1])
    raise AssertionError("a cycle has no end")


def _told(error: grpc.aio.AioRpcError) -> common_pb2.Error:
    """Return what the service says of an error, if it was the service."""
    trailers = cast("Sequence[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    value = dict(trailers).get("octavo-error-bin", b"")
    return common_pb2.Error.FromString(value) if isinstance(value, bytes) else common_pb2.Error()
