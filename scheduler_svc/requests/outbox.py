"""What waits to be written to one client.

The driver fills an outbox once per step and never waits for it; the stream's handler empties it as
fast as the client reads. While a client is behind, new tokens are added to the deltas that wait, so
what waits grows with the text and not with the number of steps. Past a limit the stream is cut.

A message that gRPC has taken stays in its memory until the client reads it, or is gone, also when the
stream was cut. So no message is larger than a client that reads nothing may cost.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from octavo.v1 import common_pb2
from octavo.v1 import generation_pb2 as pb

_MAX_MESSAGE_BYTES: Final = 128 * 1024
_REFUSALS_TOGETHER_S: Final = 0.002


class Outbox(ABC):
    """The part that all streams share. Made by the task that will write the stream."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._size_bytes = 0
        self._ready = asyncio.Event()
        self._awake = False
        """The writer was told that something waits."""
        self._writer = asyncio.current_task()
        self.batch = 0
        """Changes whenever what waited is taken; deltas of an earlier batch are gone."""
        self.cut = False
        """The client was too slow; the writer has been cancelled."""
        self.level: int | None = None
        """Degradation level at the last admission; None before the first."""

    def grow(self, size_bytes: int) -> None:
        """Account for output that was added; cut the stream when it is too much."""
        if not self._awake:
            self._wake()
        self._account(size_bytes)

    def _wake(self) -> None:
        self._awake = True
        self._ready.set()

    def _account(self, size_bytes: int) -> None:
        self._size_bytes += size_bytes
        if self._size_bytes > self._limit_bytes and not self.cut:
            self.cut = True
            if self._writer is not None:
                self._writer.cancel()

    async def wait(self) -> None:
        """Wait until there is something to take."""
        await self._ready.wait()

    def _taken(self, size_bytes: int, *, more: bool) -> None:
        self._size_bytes -= size_bytes
        self.batch += 1
        if not more:
            self._awake = False
            self._ready.clear()

    @abstractmethod
    def accepted(self, request_id: str) -> pb.Accepted:
        """Return a new event to fill in."""

    @abstractmethod
    def delta(self, request_id: str) -> pb.Delta:
        """Return a new event to fill in."""

    @abstractmethod
    def finished(self, request_id: str) -> pb.Finished:
        """Return a new event to fill in."""

    @abstractmethod
    def progress(self, request_id: str) -> pb.Progress:
        """Return a new event to fill in."""

    @abstractmethod
    def prompt_logprobs(self, request_id: str) -> pb.PromptLogprobs:
        """Return a new event to fill in."""

    @abstractmethod
    def embedding(self, request_id: str) -> pb.Embedding:
        """Return a new event to fill in."""

    @abstractmethod
    def end(self, request_id: str, error: common_pb2.Error | None, *, told: bool) -> None:
        """Nothing more comes for a request. `told`: a Finished event has carried the error already."""


@dataclass(frozen=True, slots=True)
class ClientStream:
    """What all requests of one gRPC call share."""

    outbox: Outbox
    transport: str
    rpc_deadline: float | None
    """In monotonic seconds."""
    api_key: str | None = field(repr=False)
    """The call's own, for the requests that bring none."""
    paced: bool = False
    """Its client sends only what it was given credits for."""


class GenerateOutbox(Outbox):
    """Events of one request."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes)
        self._events: list[pb.GenerateEvent] = []
        self.ended = False
        self.error: common_pb2.Error | None = None

    def take(self) -> list[pb.GenerateEvent]:
        """Return what waits."""
        events, self._events = self._events, []
        self._taken(self._size_bytes, more=False)
        return events

    def accepted(self, request_id: str) -> pb.Accepted:
        """Return a new event."""
        del request_id
        return self._add().accepted

    def delta(self, request_id: str) -> pb.Delta:
        """Return a new event."""
        del request_id
        return self._add().delta

    def finished(self, request_id: str) -> pb.Finished:
        """Return a new event."""
        del request_id
        return self._add().finished

    def progress(self, request_id: str) -> pb.Progress:
        """Return a new event."""
        del request_id
        return self._add().progress

    def prompt_logprobs(self, request_id: str) -> pb.PromptLogprobs:
        """Return a new event."""
        del request_id
        return self._add().prompt_logprobs

    def embedding(self, request_id: str) -> pb.Embedding:
        """Return a new event."""
        del request_id
        return self._add().embedding

    def end(self, request_id: str, error: common_pb2.Error | None, *, told: bool) -> None:
        """The call is over once what waits is written."""
        del request_id, told
        self.ended = True
        self.error = error
        self._wake()

    def _add(self) -> pb.GenerateEvent:
        event = pb.GenerateEvent()
        self._events.append(event)
        return event


class SessionOutbox(Outbox):
    """Events of all requests of a session, in one message."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes)
        self._full: deque[tuple[pb.SessionEvent, int]] = deque()
        """Messages to which nothing is added any more, and their sizes."""
        self._full_bytes = 0
        self._message = pb.SessionEvent()
        self._timer: asyncio.TimerHandle | None = None

    def grow(self, size_bytes: int) -> None:
        """Account for output that was added; begin another message when this one is large enough."""
        super().grow(size_bytes)
        self._close_when_large()

    def refuse(self, request_id: str, error: common_pb2.Error) -> None:
        """Tell of a request that was refused at once, in one message with those of the next moment.

        Where thousands are refused a second, a message for each would cost more than the refusing.
        """
        self._add(request_id).error.CopyFrom(error)
        self._account(error.ByteSize())
        self._close_when_large()
        if not self._awake and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_REFUSALS_TOGETHER_S, self._tell_refusals)

    def _tell_refusals(self) -> None:
        self._timer = None
        self._wake()

    def _close_when_large(self) -> None:
        size_bytes = self._size_bytes - self._full_bytes
        if size_bytes > _MAX_MESSAGE_BYTES:
            self._full.append((self._message, size_bytes))
            self._full_bytes += size_bytes
            self._message = pb.SessionEvent()
            self.batch += 1

    def take(self) -> pb.SessionEvent:
        """Return the message that waits, or the first of several."""
        if self._full:
            message, size_bytes = self._full.popleft()
            self._full_bytes -= size_bytes
        else:
            message, size_bytes = self._message, self._size_bytes
            self._message = pb.SessionEvent()
        self._taken(size_bytes, more=self.pending)
        return message

    @property
    def pending(self) -> bool:
        """Whether something waits."""
        return bool(self._full) or bool(self._message.events) or self._message.credits > 0

    def grant(self, credits_: int) -> None:
        """Let the client send this many more requests."""
        self._message.credits += credits_
        self._wake()

    def wake(self) -> None:
        """Make the writer look, though nothing may have been added."""
        self._wake()

    def accepted(self, request_id: str) -> pb.Accepted:
        """Return a new event."""
        return self._add(request_id).accepted

    def delta(self, request_id: str) -> pb.Delta:
        """Return a new event."""
        event = self._message.events.add()
        event.request_id = request_id
        return event.delta

    def finished(self, request_id: str) -> pb.Finished:
        """Return a new event."""
        return self._add(request_id).finished

    def progress(self, request_id: str) -> pb.Progress:
        """Return a new event."""
        return self._add(request_id).progress

    def prompt_logprobs(self, request_id: str) -> pb.PromptLogprobs:
        """Return a new event."""
        return self._add(request_id).prompt_logprobs

    def embedding(self, request_id: str) -> pb.Embedding:
        """Return a new event."""
        return self._add(request_id).embedding

    def end(self, request_id: str, error: common_pb2.Error | None, *, told: bool) -> None:
        """Tell the client, unless it knows."""
        if error is not None and not told:
            self._add(request_id).error.CopyFrom(error)
            self.grow(error.ByteSize())
        self._wake()

    def _add(self, request_id: str) -> pb.RequestEvent:
        event = self._message.events.add()
        event.request_id = request_id
        return event
