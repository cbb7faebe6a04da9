"""What a run of the load generator leaves: plain records, with a JSON form that loses nothing.

All times are seconds since the run began, on the generator's monotonic clock, unless the name says otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Final, Literal

from pydantic import PlainSerializer, TypeAdapter, ValidationError

Seconds = Annotated[float, PlainSerializer(lambda value: round(value, 6))]
"""A time of which JSON keeps microseconds."""


class Outcome(StrEnum):
    """How a request ended, as its client saw it."""

    OK = "ok"
    TIMEOUT = "timeout"
    """A deadline or timeout passed: the service's, or the generator's own."""
    REFUSED = "refused"
    """Turned away for load, before any output."""
    OOM = "oom"
    """The device had no memory left for it."""
    ERROR = "error"
    """Anything else that went wrong, the connection included."""
    ABANDONED = "abandoned"
    """Cut off by the generator itself: the drain was over, or the run was interrupted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """One request as the plan has it."""

    number: int
    """Position in the plan, from 0."""
    planned_s: Seconds
    """When it was to be sent. In a closed loop: when its slot became free."""
    prompt_tokens: int
    output_tokens: int
    """Tokens that it asks for."""
    kind: str = ""
    """Class of traffic or length bucket, in the words of whoever made the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """How a request ended, as the service says; None: it did not say."""

    outcome: Outcome = Outcome.OK
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens that the service took from its cache."""
    queue_s: float | None = None
    """Wait in the queue."""
    preemptions: int | None = None
    reason: str = ""
    """The word of the service (or of the generator) for an outcome that is not `ok`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMeasurement(Answer):
    """One request: what was offered and what happened.

    Latencies count from the planned time, so that a request that the generator sent late is not flattered
    (no coordinated omission); `lateness_s` says how late it was.
    """

    offered: Offered
    sent_s: Seconds
    ended_s: Seconds
    chunk_times_s: tuple[Seconds, ...] = ()
    """When each message with output came. One message may bring several tokens."""
    output_tokens: int = 0
    """As the service counted them, or, when it did not say, as many as messages with output came."""

    @property
    def lateness_s(self) -> float:
        """How much later than planned it was sent."""
        return self.sent_s - self.offered.planned_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return self.chunk_times_s[0] - self.offered.planned_s if self.chunk_times_s else None

    @property
    def e2e_s(self) -> float:
        """Time to the end."""
        return self.ended_s - self.offered.planned_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None with fewer than two tokens."""
        if self.output_tokens < 2 or not self.chunk_times_s:
            return None
        return (self.chunk_times_s[-1] - self.chunk_times_s[0]) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Inter-token latencies: the time between each message with output and the one before."""
        return tuple(later - earlier for earlier, later in itertools.pairwise(self.chunk_times_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRecord:
    """What was driven."""

    kind: str
    """`octavo`, `openai-completions` or `openai-chat`."""
    address: str
    model: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    """What else is known: versions, settings, the command that started it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficRecord:
    """What was sent at it."""

    dataset: str
    """In words: where lengths and prompts come from, and how they were scaled."""
    arrivals: str
    """In words: the process, with its parameters."""
    seed: int
    offered_rate_per_s: float | None = None
    """Requests per second that the process offers on average; None in a closed loop."""
    concurrency: int | None = None
    """Requests under way at a time in a closed loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorRecord:
    """What the generator itself was worth in this run."""

    late_sends: int
    """Requests that were sent more than LATE_S after their time."""
    max_lateness_s: float
    cpu_s: float
    """CPU time of the generator's process during the run, all threads."""


LATE_S: Final = 0.010
"""A send later than this is counted as late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run: one target, one traffic, from the first request to the end of the drain."""

    target: TargetRecord
    traffic: TrafficRecord
    started_at: str
    """Wall clock, UTC, ISO 8601."""
    warm_up_s: Seconds
    """Requests planned before this are sent and not measured."""
    until_s: Seconds
    """End of the window: requests are planned until here. What comes later is drain. The window of a closed
    loop without a duration ends with the last answer."""
    ended_s: Seconds
    """When the last request had ended."""
    generator: GeneratorRecord
    requests: tuple[RequestMeasurement, ...]
    """By number. Those that were never sent (after an interrupt) are not among them."""
    interrupted: bool = False
    name: str = ""
    """Of the system under test, for tables that set runs side by side."""
    format: Literal[1] = 1
    """Version of the JSON form."""

    @property
    def measured(self) -> tuple[RequestMeasurement, ...]:
        """Requests of the window."""
        return tuple(one for one in self.requests if self.in_window(one.offered.planned_s))

    def in_window(self, at_s: float) -> bool:
        """Return whether a time is within the window."""
        return self.warm_up_s <= at_s <= self.until_s

    @property
    def window_s(self) -> float:
        """Length of the window."""
        return self.until_s - self.warm_up_s


_ADAPTER: Final = TypeAdapter(RunRecord)


def to_json(run: RunRecord) -> dict[str, Any]:
    """Return the JSON form; times are rounded to microseconds."""
    form: dict[str, Any] = _ADAPTER.dump_python(run, mode="json", exclude_none=True)
    return form


def from_json(record: Mapping[str, Any]) -> RunRecord:
    """Return the record of a JSON form.

    Raises:
        ValueError: it is none, or of another version.
    """
    try:
        return _ADAPTER.validate_python(record)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"not a record of a run in format 1: {first['loc']}: {first['msg']}") from error
