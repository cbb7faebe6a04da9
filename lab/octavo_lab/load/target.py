"""What can be driven: anything that takes a request and tells of its output as it comes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from octavo_lab.load.records import Answer, TargetRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request to send."""

    prompt: str | Sequence[int] | Sequence[Mapping[str, str]]
    """Text, token ids, or the messages of a conversation, each with `role` and `content`."""
    prompt_tokens: int
    output_tokens: int
    kind: str = ""
    """Class of traffic or length bucket, for the record."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further options, by the names of `octavo.types.GenerateOptions`: priority, deadline, may_trim..."""

    @property
    def form(self) -> Literal["text", "tokens", "messages"]:
        """What the prompt is."""
        if not self.prompt or isinstance(self.prompt, str):
            return "text"
        return "tokens" if isinstance(self.prompt[0], int) else "messages"


class Sink(Protocol):
    """Takes note of output."""

    def chunk(self) -> None:
        """A message with output has come, now."""


class LoadTarget(Protocol):
    """A service under test, ready to be asked."""

    @property
    def record(self) -> TargetRecord:
        """What is driven."""

    async def ask(self, request: PlannedRequest, sink: Sink) -> Answer:
        """Send a request and follow it to its end.

        What the service does wrong is an outcome, not an exception. Cancelling cancels the request.
        """
