"""A live request as the shell knows it: between the core and one client's outbox."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from octavo.protocol.steps import FinishReason, TokenLogprobs
from octavo.v1 import common_pb2

from scheduler_svc.admission.admission import Admitted
from scheduler_svc.api.convert import accepted_to_proto, add_logprobs, fill_finished
from scheduler_svc.core.effects import Accepted, FinishChoice, TokenDelta
from scheduler_svc.errors import ServiceError
from scheduler_svc.live.accounts import RequestRecord
from scheduler_svc.live.calls import GenerateCall, ResumedChoice
from scheduler_svc.live.choice import Choice
from scheduler_svc.live.outbox import Outbox
from scheduler_svc.text.detokenizer import PROMPT_TAIL
from scheduler_svc.text.stop_strings import StopMatcher, StopStrings

# A delta that waits for its client takes more text up to this size; then another one is begun, since
# adding to a text copies it.
_MAX_DELTA_CHARS: Final = 4096
_MAX_DELTA_TOKENS: Final = 512
_EVENT_BYTES: Final = 64
_LOGPROBS_BYTES: Final = 32


class LiveRequest:
    """A request from its admission to its end. The core knows it as `core_id`."""

    def __init__(self, call: GenerateCall, admitted: Admitted, outbox: Outbox, record: RequestRecord) -> None:
        request, model = admitted.request, admitted.model
        sampling = request.sampling
        self.core_id = request.request_id
        self.request_id = call.request_id
        self.request = request
        self.record = record
        self.ended = False
        self.on_end: Callable[[], None] | None = None
        self.arrived: Callable[[], None] = lambda: None
        """To be called when the core is given the request."""
        self._outbox = outbox
        self._return_token_ids = call.return_token_ids
        self._skip_text = call.skip_text
        self._text_of = model.detokenizer.token_bytes
        self._prompt_tokens = len(request.prompt_token_ids)
        self._admitted = admitted
        self._seed = sampling.seed or 0
        self._error: common_pb2.Error | None = None
        stops = StopStrings(sampling.stop) if sampling.stop else None
        tail = request.prompt_token_ids[-PROMPT_TAIL:]
        keep_special = call.keep_special_tokens
        needs_text = stops is not None or not call.skip_text or bool(call.resumed)
        self.choices = [
            Choice(
                index,
                model.detokenizer.stream(tail, keep_special=keep_special) if needs_text else None,
                StopMatcher(stops) if stops is not None else None,
                sampling.min_tokens or 0,
            )
            for index in range(sampling.n or 1)
        ]
        self._stop_token_ids = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            self._stop_token_ids |= model.eos_token_ids
        self._resumed = call.resumed
        self._unsent: dict[int, str] = {}

    async def resume(self) -> None:
        """Bring choices to where their client saw them last. Others get a turn after each.

        Raises:
            ServiceError: what the client says it has seen does not fit the tokens it resumes with.
        """
        for index, resumed in self._resumed.items():
            self._unsent[index] = self._resume(index, resumed)
            await asyncio.sleep(0)

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

    def over(self) -> list[int]:
        """Return the choices that are over although the core has not ended them."""
        return [choice.index for choice in self.choices if choice.over is not None and not choice.ended]

    # What the core says --------------------------------------------------------------------------

    def on_accepted(self, accepted: Accepted) -> None:
        """The core has taken the request."""
        message = accepted_to_proto(
            accepted, request_id=self.request_id, prompt_tokens=self._prompt_tokens, seed=self._seed
        )
        message.trimmed_tokens = self._admitted.trimmed_tokens
        if self._admitted.clamped_max_tokens is not None:
            message.clamped_max_tokens = self._admitted.clamped_max_tokens
        self.record.accepted(accepted)
        self._outbox.level = accepted.level
        self._outbox.accepted(self.request_id).CopyFrom(message)
        self._outbox.grow(_EVENT_BYTES)
        for index, text in self._unsent.items():
            if text:
                self._show(self.choices[index], text, (), None)

    def on_tokens(self, delta: TokenDelta, now: float, gaps: dict[float, int], *, hide_last: bool) -> bool:
        """Take new tokens of a choice; return whether a stop string has just ended it.

        Args:
            gaps: counts when the choices of this step had their last tokens before.
            hide_last: the last token is the one that stopped the choice.
        """
        choice = self.choices[delta.choice]
        if choice.over is not None:
            return False
        token_ids, logprobs = delta.token_ids, delta.logprobs
        text, used = choice.feed(token_ids, hide_last=hide_last)
        if used < len(token_ids):
            token_ids = token_ids[:used]
            logprobs = logprobs[:used] if logprobs is not None else None
        last = choice.last_token_at
        choice.last_token_at = now
        if last is None:
            self.record.first_token(now)
        else:
            gaps[last] = gaps.get(last, 0) + 1
        if text or logprobs or self._return_token_ids:
            self._show(choice, text, token_ids, logprobs)
        return choice.over is not None

    def on_finish(self, finish: FinishChoice) -> None:
        """A choice has ended."""
        choice = self.choices[finish.choice]
        text = choice.flush()
        if text:
            self._show(choice, text, (), None)
        choice.ended = True
        message = self._outbox.finished(self.request_id)
        usage = common_pb2.Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=choice.num_tokens,
            cached_tokens=finish.cached_tokens,
            trimmed_tokens=self._admitted.trimmed_tokens,
            clamped_max_tokens=self._admitted.clamped_max_tokens,
        )
        fill_finished(message, finish, usage, self._seed)
        if choice.over is not None:
            message.reason = common_pb2.FinishReason.ValueType(choice.over)
            message.ClearField("error")
            if choice.stopped_by is not None:
                message.stop = choice.stopped_by
        elif message.HasField("error") and self._error is None:
            self._error = message.error
        self._outbox.grow(_EVENT_BYTES + message.ByteSize())
        self.record.choice_ended(finish, choice.num_tokens)
        if finish.last:
            outcome = self._error.reason if self._error is not None else FinishReason(message.reason).name
            self._end(outcome, self._error, told=True)

    def fail(self, error: ServiceError) -> None:
        """The request was refused, or failed as a whole."""
        self._end(error.reason, error.to_proto(), told=False)

    # Inside --------------------------------------------------------------------------------------

    def _end(self, outcome: str, error: common_pb2.Error | None, *, told: bool) -> None:
        if self.ended:
            return
        self.ended = True
        self.record.end("SLOW_CONSUMER" if self._outbox.cut else outcome)
        self._outbox.end(self.request_id, error, told=told)
        if self.on_end is not None:
            self.on_end()

    def _show(
        self,
        choice: Choice,
        text: str,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] | None,
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
            add_logprobs(delta, logprobs, self._text_of)
            size += sum(_LOGPROBS_BYTES * (1 + len(entry.top_token_ids)) for entry in logprobs)
        outbox.grow(size)
