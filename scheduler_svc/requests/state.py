"""The state of a live request in the shell: between the core and one client's outbox.

Its tokens become text here, choice by choice, and the text becomes events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from octavo.protocol.steps import FinishReason, TokenLogprobs
from octavo.v1 import common_pb2
from octavo.v1 import generation_pb2 as pb

from scheduler_svc.core.effects import (
    EmitEmbedding,
    EmitPromptLogprobs,
    FinishChoice,
    RequestAccepted,
    TokenDelta,
)
from scheduler_svc.core.events import NewRequest
from scheduler_svc.errors import ServiceError
from scheduler_svc.requests.accounts import RequestAccount
from scheduler_svc.requests.messages import (
    GenerateCall,
    ResumedChoice,
    accepted_to_proto,
    fill_finished,
    logprobs_with_text,
)
from scheduler_svc.requests.outbox import Outbox
from scheduler_svc.text.detokenizer import PROMPT_TAIL, Detokenizer, StopMatcher, StopStrings, TextStream

# New text is added to the delta that waits for its client, up to this size: adding copies the text, so
# past it another delta is begun.
_MAX_DELTA_CHARS: Final = 4096
_MAX_DELTA_TOKENS: Final = 512
_MAX_SCORED_TOKENS: Final = 128
"""Of a message with log probabilities of a prompt."""
_EVENT_BYTES: Final = 64
_LOGPROBS_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that is ready for the core, and what makes text of its tokens."""

    call: GenerateCall
    request: NewRequest
    detokenizer: Detokenizer
    eos_token_ids: frozenset[int]
    trimmed_tokens: int = 0
    """Prompt tokens that were cut away under load."""
    clamped_max_tokens: int | None = None
    """max_tokens in force, when it was lowered."""
    in_reasoning: bool = False
    """The prompt ends with the beginning of thoughts."""


@dataclass(slots=True)
class HeldOutput:
    """Output of a choice that waits until there is enough of it for a delta."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class ChoiceState:
    """Text of one choice, as far as it has come."""

    index: int
    text: TextStream | None
    """None when nobody needs text."""
    stops: StopMatcher | None
    min_tokens: int
    num_tokens: int = 0
    """Output tokens that count: none past a stop string."""
    over: FinishReason | None = None
    """It is over for a reason that the core does not know: a stop string, or it had ended before the
    request came here. What the core still says of it is not shown."""
    last_token_at: float | None = None
    held: HeldOutput = field(default_factory=HeldOutput)
    delta: pb.Delta | None = None
    """The event that waits in the outbox, while `batch` is the outbox's."""
    batch: int = -1

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended it."""
        return self.stops.stopped_by if self.stops is not None else None

    def feed(self, token_ids: Sequence[int], *, hide_last: bool = False) -> tuple[str, int]:
        """Return the text to show and how many of the tokens count.

        `hide_last`: the last token is the one that stopped the choice; it counts but is no text.
        """
        shown = token_ids[:-1] if hide_last else token_ids
        if self.text is None:
            text = ""
        elif self.stops is None:
            text = self.text.feed(shown)
        else:
            text, used = self._feed_until_stop(self.text, self.stops, shown)
            if self.over is not None:
                return text, used
        self.num_tokens += len(token_ids)
        return text, len(token_ids)

    def flush(self) -> str:
        """Return the text that is left at the end."""
        if self.text is None or self.over is not None:
            return ""
        text = self.text.flush()
        if self.stops is None:
            return text
        text = self.stops.feed(text)
        if self.stops.stopped_by is not None:
            self.over = FinishReason.STOP
            return text
        return text + self.stops.flush()

    def _feed_until_stop(
        self, stream: TextStream, stops: StopMatcher, token_ids: Sequence[int]
    ) -> tuple[str, int]:
        parts = []
        for used, token_id in enumerate(token_ids, start=1):
            text = stream.feed((token_id,))
            # As stop tokens, stop strings do not count before `min_tokens`.
            parts.append(stops.feed(text) if self.num_tokens + used > self.min_tokens else text)
            if stops.stopped_by is not None:
                self.over = FinishReason.STOP
                self.num_tokens += used
                return "".join(parts), used
        return "".join(parts), len(token_ids)


class RequestState:
    """A request from its admission to its end. The core knows it as `core_id`."""

    def __init__(self, prepared: PreparedRequest, outbox: Outbox, account: RequestAccount) -> None:
        call, request = prepared.call, prepared.request
        sampling = request.sampling
        self.core_id = request.request_id
        self.request_id = call.request_id
        self.request = request
        self.account = account
        self.ended = False
        self.ended_at: float | None = None
        """Monotonic seconds."""
        self.on_end: Callable[[], None] | None = None
        self.on_submit: Callable[[], None] = lambda: None
        """To be called when the core is given the request."""
        self._resumed = call.resumed
        self._trimmed_tokens = prepared.trimmed_tokens
        self._clamped_max_tokens = prepared.clamped_max_tokens
        self._in_reasoning = prepared.in_reasoning
        self._outbox = outbox
        self._return_token_ids = call.return_token_ids
        self._skip_text = call.skip_text
        # What is held is no part of the outbox yet, which is bounded.
        self._stream_interval = min(call.stream_interval, _MAX_DELTA_TOKENS)
        self._silent = call.is_silent
        self._missing = self._num_to_read(call)
        self._text_of = prepared.detokenizer.token_bytes
        self._prompt_tokens = len(request.prompt_token_ids)
        self._seed = sampling.seed or 0
        self._error: common_pb2.Error | None = None
        self._moved: ServiceError | None = None
        stops = StopStrings(sampling.stop) if sampling.stop else None
        tail = request.prompt_token_ids[-PROMPT_TAIL:]
        keep_special = call.keep_special_tokens
        needs_text = (stops is not None or not call.skip_text or bool(call.resumed)) and not self._silent
        self.choices = [
            ChoiceState(
                index,
                prepared.detokenizer.stream(tail, keep_special=keep_special) if needs_text else None,
                StopMatcher(stops, shows_stop=bool(sampling.include_stop_str_in_output))
                if stops is not None
                else None,
                sampling.min_tokens or 0,
            )
            for index in range(sampling.n or 1)
        ]
        for index in call.finished_choices:
            self.choices[index].over = FinishReason.STOP
        self._stop_token_ids = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            self._stop_token_ids |= prepared.eos_token_ids
        self._unsent: dict[int, str] = {}

    def _num_to_read(self, call: GenerateCall) -> int:
        """Return how much is to be read off the prompt: log probabilities to come, or one vector."""
        if call.pooling is not None:
            return 1
        scores = self.request.sampling.prompt_logprobs is not None and len(call.finished_choices) < (
            self.request.sampling.n or 1
        )
        return max(0, len(self.request.prompt_token_ids) - max(1, call.scored_tokens)) if scores else 0

    async def resume(self) -> None:
        """Bring choices to where their client saw them last. Others get a turn after each.

        Raises:
            ServiceError: what the client says it has seen does not fit the tokens it resumes with.
        """
        for index, resumed in self._resumed.items():
            self._unsent[index] = self._resume(index, resumed)
            await asyncio.sleep(0)
        over = {choice.index for choice in self.choices if choice.over is not None}
        if over:
            # Nothing of them is left to compute, and nothing to account for.
            request = self.request
            self.request = replace(
                request,
                finished_choices=frozenset(over),
                resumed={index: had for index, had in request.resumed.items() if index not in over},
                resumed_keys={index: had for index, had in request.resumed_keys.items() if index not in over},
            )

    def _resume(self, index: int, resumed: ResumedChoice) -> str:
        """Bring a choice to where its client saw it last; return the text that it has not seen."""
        choice = self.choices[index]
        stopped = resumed.token_ids[-1] in self._stop_token_ids
        text, _ = choice.feed(resumed.token_ids, hide_last=stopped)
        if choice.over is None:
            if stopped:
                choice.over = FinishReason.STOP
            elif choice.num_tokens == self.request.sampling.max_tokens:
                text += choice.flush()
                choice.over = choice.over or FinishReason.LENGTH
        data = text.encode()
        field = f"resume[{index}].shown_bytes"
        if self._skip_text:
            return ""
        if resumed.shown_bytes > len(data):
            raise ServiceError.invalid(
                (field, f"the tokens make {len(data)} bytes of text, got {resumed.shown_bytes}")
            )
        try:
            return data[resumed.shown_bytes :].decode()
        except UnicodeDecodeError:
            raise ServiceError.invalid((field, "ends inside a character")) from None

    # What the core says --------------------------------------------------------------------------

    def on_accepted(self, accepted: RequestAccepted) -> None:
        """The core has taken the request."""
        message = accepted_to_proto(
            accepted, request_id=self.request_id, prompt_tokens=self._prompt_tokens, seed=self._seed
        )
        message.trimmed_tokens = self._trimmed_tokens
        message.in_reasoning = self._in_reasoning
        if self._clamped_max_tokens is not None:
            message.clamped_max_tokens = self._clamped_max_tokens
        self.account.accepted(accepted)
        self._outbox.level = accepted.level
        self._outbox.accepted(self.request_id).CopyFrom(message)
        self._outbox.grow(_EVENT_BYTES)
        request = self.request
        if request.sampling.prompt_logprobs is not None and not request.scored_tokens:
            self._show_prompt_logprobs(0, (TokenLogprobs(request.prompt_token_ids[0], 0.0, 0),))
        for index, text in self._unsent.items():
            if text:
                self._show(self.choices[index], text, (), None)

    def on_prompt_logprobs(self, scored: EmitPromptLogprobs) -> None:
        """More of the prompt is scored: what was not told yet, in order."""
        self._missing -= len(scored.logprobs)
        for start in range(0, len(scored.logprobs), _MAX_SCORED_TOKENS):
            part = scored.logprobs[start : start + _MAX_SCORED_TOKENS]
            self._show_prompt_logprobs(scored.first_position + start, part)

    def on_embedding(self, embedding: EmitEmbedding) -> None:
        """The vector of the prompt has come."""
        self._missing = 0
        self._outbox.embedding(self.request_id).values.extend(embedding.values)
        self._outbox.grow(_EVENT_BYTES + 4 * len(embedding.values))

    def on_tokens(self, delta: TokenDelta, now: float, gaps: dict[float, int], *, hide_last: bool) -> bool:
        """Take new tokens of a choice; return whether a stop string has just ended it.

        Args:
            gaps: counts when the choices of this step had their last tokens before.
            hide_last: the last token is the one that stopped the choice.
        """
        choice = self.choices[delta.choice]
        if choice.over is not None:
            return False
        if self._silent:
            self.account.first_token(now)
            return False
        token_ids, logprobs = delta.token_ids, delta.logprobs
        text, used = choice.feed(token_ids, hide_last=hide_last)
        if used < len(token_ids):
            token_ids = token_ids[:used]
            logprobs = logprobs[:used] if logprobs is not None else None
        last = choice.last_token_at
        choice.last_token_at = now
        if last is None:
            self.account.first_token(now)
        else:
            gaps[last] = gaps.get(last, 0) + 1
        if self._stream_interval > 1 and last is not None:
            self._hold(choice, text, token_ids, logprobs)
        elif text or logprobs or self._return_token_ids:
            self._show(choice, text, token_ids, logprobs)
        return choice.over is not None

    def on_finish(self, finish: FinishChoice) -> None:
        """A choice has ended."""
        choice = self.choices[finish.choice]
        if self._moved is not None and finish.reason is FinishReason.CANCELLED and choice.over is None:
            # Text that is held back is shown where the choice goes on.
            self.account.choice_ended(finish, choice.num_tokens)
            if finish.last:
                self.fail(self._moved)
            return
        if choice.held.token_ids:
            self._let_go(choice)
        text = choice.flush()
        if text:
            self._show(choice, text, (), None)
        message = self._outbox.finished(self.request_id)
        usage = common_pb2.Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=choice.num_tokens,
            cached_tokens=finish.cached_tokens,
            trimmed_tokens=self._trimmed_tokens,
            clamped_max_tokens=self._clamped_max_tokens,
        )
        fill_finished(message, finish, usage, self._seed)
        if self._missing and finish.error is None and finish.reason.is_complete:
            error = ServiceError("UNSUPPORTED", "the worker did not read the prompt as it was asked to")
            message.reason, choice.over = common_pb2.FINISH_REASON_ERROR, None
            message.error.CopyFrom(error.to_proto())
        if choice.over is not None:
            message.reason = common_pb2.FinishReason.ValueType(choice.over)
            message.ClearField("error")
            if choice.stopped_by is not None:
                message.stop = choice.stopped_by
        elif message.HasField("error") and self._error is None:
            self._error = message.error
        self._outbox.grow(_EVENT_BYTES + message.ByteSize())
        if finish.choice not in self.request.finished_choices:
            self.account.choice_ended(finish, choice.num_tokens)
        if finish.last:
            outcome = self._error.reason if self._error is not None else FinishReason(message.reason).name
            self._end(outcome, self._error, told=True)

    def move(self, error: ServiceError) -> None:
        """The request is about to be cancelled; its client is to be told this, and goes on elsewhere."""
        self._moved = error

    def tell_wait(self, waited_s: float, left_s: float | None) -> None:
        """There is no worker for the request; in `left_s` it fails, if it ever does."""
        progress = self._outbox.progress(self.request_id)
        progress.reason = pb.WAIT_REASON_NO_WORKER
        progress.waited_ms = round(waited_s * 1000)
        if left_s is not None:
            progress.left_ms = round(left_s * 1000)
        self._outbox.grow(_EVENT_BYTES)

    def fail(self, error: ServiceError) -> None:
        """The request was refused, or failed as a whole."""
        self._end(error.reason, error.to_proto(), told=False)

    # Inside --------------------------------------------------------------------------------------

    def _end(self, outcome: str, error: common_pb2.Error | None, *, told: bool) -> None:
        if self.ended:
            return
        self.ended = True
        self.ended_at = self.account.now()
        self.account.end("SLOW_CONSUMER" if self._outbox.cut else outcome)
        self._outbox.end(self.request_id, error, told=told)
        if self.on_end is not None:
            self.on_end()

    def _show_prompt_logprobs(self, first: int, logprobs: Sequence[TokenLogprobs]) -> None:
        event = self._outbox.prompt_logprobs(self.request_id)
        event.first_position = first
        event.tokens.extend(logprobs_with_text(logprobs, self._text_of))
        self._outbox.grow(_EVENT_BYTES + _size_of(logprobs))

    def _hold(
        self,
        choice: ChoiceState,
        text: str,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] | None,
    ) -> None:
        """Keep output until there is enough of it."""
        held = choice.held
        held.text.append(text)
        held.token_ids += token_ids
        held.logprobs += logprobs or ()
        if len(held.token_ids) >= self._stream_interval:
            self._let_go(choice)

    def _let_go(self, choice: ChoiceState) -> None:
        held, choice.held = choice.held, HeldOutput()
        text = "".join(held.text)
        if text or held.logprobs or self._return_token_ids:
            self._show(choice, text, held.token_ids, held.logprobs or None)

    def _show(
        self,
        choice: ChoiceState,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None,
    ) -> None:
        """Put output into the outbox, into the delta that waits there if there is one."""
        if self._skip_text:
            text = ""
        outbox = self._outbox
        delta = choice.delta
        size = len(text)
        if (
            choice.batch != outbox.batch
            or delta is None
            or len(delta.text) + size > _MAX_DELTA_CHARS
            or len(delta.token_ids) > _MAX_DELTA_TOKENS
            or len(delta.logprobs) > _MAX_DELTA_TOKENS
        ):
            delta = choice.delta = outbox.delta(self.request_id)
            choice.batch = outbox.batch
            delta.choice = choice.index
            delta.text = text
            size += _EVENT_BYTES
        elif text:
            delta.text += text
        if token_ids and self._return_token_ids:
            delta.token_ids.extend(token_ids)
            size += 4 * len(token_ids)
        if logprobs:
            delta.logprobs.extend(logprobs_with_text(logprobs, self._text_of))
            size += _size_of(logprobs)
        outbox.grow(size)


def _size_of(logprobs: Sequence[TokenLogprobs]) -> int:
    return sum(_LOGPROBS_BYTES * (1 + len(entry.top_token_ids)) for entry in logprobs)
