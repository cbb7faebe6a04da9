"""What can be driven: anything that takes a request and tells of its output as it comes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

from octavo_lab.load.records import Outcome, TargetRecord

Turn = Mapping[str, str]
"""One message of a conversation: `role` and `content`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request to send. `prompt` is text, token ids, or the messages of a conversation."""

    prompt: str | Sequence[int] | Sequence[Turn]
    prompt_tokens: int
    output_tokens: int
    kind: str = ""
    """Class of traffic or length bucket, for the record."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further options, by the names of `octavo.types.GenerateOptions`: priority, deadline, may_trim..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """How a request ended; fields as in `RequestRecord`."""

    outcome: Outcome = Outcome.OK
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    queue_s: float | None = None
    preemptions: int | None = None
    reason: str = ""


class Sink(Protocol):
    """Takes note of output."""

    def chunk(self) -> None:
        """A message with output has come, now."""


class LoadTarget(Protocol):
    """A service under test, for as long as an `async with` lasts."""

    @property
    def record(self) -> TargetRecord:
        """What is driven; complete once it is entered."""

    async def ask(self, request: PlannedRequest, sink: Sink) -> Answer:
        """Send a request and follow it to its end.

        What the service does wrong is an outcome, not an exception. Cancelling cancels the request.
        """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
