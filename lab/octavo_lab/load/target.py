"""What can be driven: anything that takes a request and tells of its output as it comes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from octavo_lab.load.records import Answer, TargetRecord

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
