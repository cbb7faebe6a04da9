"""One request as the client knows it: what it asked, what has come, how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Literal

from octavo._sdk import answers
from octavo.errors import ErrorInfo, OctavoError, error_of
from octavo.protocol.steps import FinishReason, TokenLogprobs
from octavo.types import Accepted, Choice, Delta, GenerateResult, Progress
from octavo.v1 import generation_pb2 as pb

_Bound = Literal["queue_timeout_ms", "ttft_deadline_ms", "deadline_ms"]
_BOUNDS: Final[tuple[_Bound, ...]] = ("queue_timeout_ms", "ttft_deadline_ms", "deadline_ms")
_FAILURES: Final = {
    FinishReason.CANCELLED: ErrorInfo("CANCELLED", "the request was cancelled", 1),
    FinishReason.DEADLINE: ErrorInfo(
        "DEADLINE_RUNNING", "the deadline passed while the request was running", 4
    ),
    FinishReason.ERROR: ErrorInfo("INTERNAL", "the request failed", 13),
}
"""What the reasons mean that are no good ends, where no error says more."""
GRACE_S: Final = 2.0
"""Beyond its deadline a request gets this long for the service to say in which phase it passed."""


class _Output:
    """Output of one choice. Grows on the event loop; `take` may run on another thread."""

    __slots__ = ("_arrived", "_taken", "finished", "logprobs", "text", "token_ids")

    def __init__(self) -> None:
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finished: Choice | None = None
        # Lengths of the three lists. One assignment publishes a delta as a whole.
        self._arrived = self._taken = (0, 0, 0)

    def add(self, delta: pb.Delta) -> None:
        if delta.text:
            self.text.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs:
            self.logprobs.extend(answers.logprobs(delta.logprobs))
        self._arrived = (len(self.text), len(self.token_ids), len(self.logprobs))

    def take(self, choice: int) -> Delta | None:
        """Return what came since the last time, or None."""
        arrived, taken = self._arrived, self._taken
        if arrived == taken:
            return None
        self._taken = arrived
        (text, token, logprob), (text_end, token_end, logprob_end) = taken, arrived
        return Delta(
            choice,
            "".join(self.text[text:text_end]),
            tuple(self.token_ids[token:token_end]),
            tuple(self.logprobs[logprob:logprob_end]),
        )

    def choice(self, index: int) -> Choice:
        """Return the choice as it ended, or as far as it got."""
        if self.finished is not None:
            return self.finished
        return Choice(index, "".join(self.text), tuple(self.token_ids), None, logprobs=tuple(self.logprobs))


class Call:
    """A request on its way to exactly one end: a result or an error.

    `on_change` runs on the event loop at the end and, with `live`, also when output has come.
    """

    __slots__ = (
        "_bounds",
        "_ended",
        "_fresh",
        "_live",
        "_on_change",
        "_outputs",
        "_request",
        "accepted",
        "done",
        "embedding",
        "ends_to_come",
        "error",
        "no_worker_s",
        "prompt_logprobs",
        "request_id",
        "timer",
        "trouble_since",
    )

    def __init__(
        self, request: pb.GenerateRequest, on_change: Callable[[], None], *, live: bool = False
    ) -> None:
        self.request_id = request.request_id
        self.accepted: Accepted | None = None
        self.prompt_logprobs: list[TokenLogprobs] = []
        """As far as they have come; whole before the first output."""
        self.embedding: tuple[float, ...] = ()
        self.ends_to_come = 0
        """Choices of which the server that has it will still tell the end."""
        self.done = False
        self.error: OctavoError | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.trouble_since: float | None = None
        """When it was first sent elsewhere without any output since."""
        self.no_worker_s = 0.0
        """For how long it has waited for a worker to be there, as last told."""
        self._bounds: dict[_Bound, float] = {}
        self._request = request
        self._outputs = [_Output() for _ in range(max(1, request.sampling.n))]
        self._on_change = on_change
        self._live = live
        self._fresh = False
        self._ended: list[Choice] = []

    @property
    def has_key(self) -> bool:
        """Whether it goes under a key of its own (or on purpose under none), not that of the connection."""
        return self._request.HasField("api_key")

    def begin(self, now: float) -> None:
        """Let the time run that the terms allow; it runs from the first call on."""
        if not self._bounds:
            terms = self._request.terms
            self._bounds = {
                name: now + getattr(terms, name) / 1000 for name in _BOUNDS if terms.HasField(name)
            }

    def put_back(self) -> None:
        """The service has refused it for now: its time runs anew from when it is sent again."""
        if self.accepted is None:
            self._bounds = {}

    def due_at(self) -> float | None:
        """Return when the service must have answered at the latest, by the bounds still to be met."""
        met: set[_Bound] = {"queue_timeout_ms"} if self.accepted is not None else set()
        if self._has_tokens():
            met |= {"queue_timeout_ms", "ttft_deadline_ms"}
        return min((at for name, at in self._bounds.items() if name not in met), default=None)

    def _has_tokens(self) -> bool:
        return any(output.token_ids for output in self._outputs)

    def to_send(self, now: float) -> pb.GenerateRequest:
        """Return the request, or what is left of it after the output so far and the time gone by."""
        self.ends_to_come = len(self._outputs)
        request = self._request
        if self.accepted is None and not self._bounds:
            return request
        rest = pb.GenerateRequest()
        rest.CopyFrom(request)
        for name, at in self._bounds.items():
            if name != "queue_timeout_ms":
                setattr(rest.terms, name, max(1, round((at - now) * 1000)))
            # One that has begun, or was not turned away in time, may wait for as long as it said again.
            elif not self._has_tokens() and (self.accepted is None or now < at):
                rest.terms.queue_timeout_ms = max(0, round((at - now) * 1000))
        if self.accepted is not None:
            rest.sampling.seed = self.accepted.seed
            rest.accepted_as.prompt_tokens = self.accepted.prompt_tokens
            if self.accepted.clamped_max_tokens is not None:
                rest.accepted_as.clamped_max_tokens = self.accepted.clamped_max_tokens
        rest.scored_tokens = len(self.prompt_logprobs)
        for index, output in enumerate(self._outputs):
            if output.finished is not None:
                rest.resume.add(choice=index, finished=True)
            elif output.token_ids:
                rest.resume.add(
                    choice=index,
                    token_ids=output.token_ids,
                    shown_bytes=len("".join(output.text).encode()),
                )
        if self._has_tokens():
            rest.terms.ClearField("ttft_deadline_ms")
        return rest

    def apply(self, event: pb.RequestEvent) -> None:
        """Take in what happened on the server."""
        match event.WhichOneof("event"):
            case "delta":
                delta = event.delta
                output = self._outputs[delta.choice]
                # A choice that had ended before the stream was lost is not told twice.
                if output.finished is None:
                    self.trouble_since, self.no_worker_s = None, 0.0
                    output.add(delta)
                    self._fresh = True
                    if self._live:
                        self._on_change()
            case "finished":
                self._finish_choice(event.finished)
            case "accepted":
                if self.accepted is None:
                    self.accepted = answers.accepted(event.accepted)
                if self._live:
                    self._on_change()
            case "prompt_logprobs":
                self._add_prompt_logprobs(event.prompt_logprobs)
            case "embedding":
                self.embedding = tuple(event.embedding.values)
            case "progress":
                self.no_worker_s = event.progress.waited_ms / 1000
            case "error":
                self.fail(error_of(answers.error_info(event.error)))
            case None:
                pass  # Of a kind that this version does not know.

    def _add_prompt_logprobs(self, scored: pb.PromptLogprobs) -> None:
        self.trouble_since, self.no_worker_s = None, 0.0
        known = len(self.prompt_logprobs) - scored.first_position
        self.prompt_logprobs += answers.logprobs(scored.tokens)[max(0, known) :]

    def _finish_choice(self, finished: pb.Finished) -> None:
        self.ends_to_come -= 1
        output = self._outputs[finished.choice]
        if output.finished is not None:
            return
        stopped_by = finished.WhichOneof("stopped_by")
        output.finished = Choice(
            finished.choice,
            "".join(output.text),
            tuple(output.token_ids),
            FinishReason(finished.reason),
            getattr(finished, stopped_by) if stopped_by else None,
            tuple(output.logprobs),
            answers.usage(finished.usage),
            answers.timings(finished.timings),
        )
        self._ended.append(output.finished)
        if self.error is None:
            self.error = _error_of(finished)
        if all(output.finished for output in self._outputs):
            self._end()
        elif self._live:
            self._on_change()

    def fail(self, error: OctavoError) -> None:
        """End without a result; nothing happens when it has ended already."""
        if not self.done:
            self.error = error
            self._end()

    def _end(self) -> None:
        self.done = True
        if self.timer is not None:
            self.timer.cancel()
        if self.error is not None and (self.accepted is not None or self._has_tokens()):
            self.error.partial = self._result()
        self._on_change()

    def take(self) -> Delta | None:
        """Return output that was not taken yet, or None. May run on another thread."""
        if not self._fresh:
            return None
        self._fresh = False
        for index, output in enumerate(self._outputs):
            delta = output.take(index)
            if delta is not None:
                # Never set to False after reading: output may have come on the loop in between.
                if len(self._outputs) > 1:
                    self._fresh = True
                return delta
        return None

    def take_progress(self) -> Progress:
        """Return all that was not taken yet. Runs on the event loop."""
        deltas = []
        if self._fresh:
            self._fresh = False
            for index, output in enumerate(self._outputs):
                delta = output.take(index)
                if delta is not None:
                    deltas.append(delta)
        ended, self._ended = self._ended, []
        return Progress(tuple(deltas), tuple(ended))

    def result(self) -> GenerateResult:
        """Return the outcome of a request that is done; raises the error it ended with."""
        if self.error is not None:
            raise self.error
        return self._result()

    def _result(self) -> GenerateResult:
        return GenerateResult(
            self.request_id,
            tuple(output.choice(index) for index, output in enumerate(self._outputs)),
            None if self.accepted is None else self.accepted.seed,
            None if self.accepted is None else self.accepted.level,
            self.accepted is not None and self.accepted.in_reasoning,
            prompt_logprobs=tuple(self.prompt_logprobs),
            embedding=self.embedding,
        )


def _error_of(finished: pb.Finished) -> OctavoError | None:
    """Return the error with which a choice ended, if it did not end well."""
    reason = FinishReason(finished.reason)
    if reason is not FinishReason.CANCELLED and finished.HasField("error"):
        return error_of(answers.error_info(finished.error))
    known = _FAILURES.get(reason)
    return error_of(known) if known is not None else None
