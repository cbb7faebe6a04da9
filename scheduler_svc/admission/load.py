"""What the service can take right now, asked before anything is spent on a request.

Refusals here touch no tokenizer and nothing that grows: they come from counters and the core's
current view. What passes is checked again, exactly, when it gets to the core.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from octavo.protocol.steps import Priority
from octavo.v1 import generation_pb2 as pb

from scheduler_svc.config import SchedulerSettings
from scheduler_svc.core.admission import Ask
from scheduler_svc.errors import ServiceError
from scheduler_svc.fleet.models import Model, ModelRegistry
from scheduler_svc.live.calls import GenerateCall
from scheduler_svc.text.trimming import TrimSpec

if TYPE_CHECKING:
    from scheduler_svc.driver import Driver

_BYTES_PER_TOKEN: Final = 4.0
"""Of a prompt, before any has been seen; then they are counted."""
_GAIN: Final = 0.05


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request that may be trimmed is cut down to."""

    trim: TrimSpec
    max_tokens: int | None
    """None leaves it as it is."""


@dataclass(slots=True, eq=False)
class Pending:
    """A request on its way to the core: it counts towards the bounds of the queue until it is there."""

    gate: LoadGate
    model: str
    num_bytes: int
    """Of the message; 0 when its tokens were counted and not estimated."""
    tokens: int
    open: bool = True

    def close(self) -> None:
        """It has arrived, or never will. Later calls change nothing."""
        if self.open:
            self.open = False
            counts = self.gate.pending[self.model]
            counts[0] -= 1
            counts[1] -= self.tokens

    def learn(self, tokens: int) -> None:
        """Its prompt turned out to have so many tokens, trimmed ones included."""
        if self.num_bytes:
            self.gate.learn(self.model, self.num_bytes, tokens)


class LoadGate:
    """Refuses what there is no room for, and says how far the rest may go."""

    def __init__(self, models: ModelRegistry, driver: Driver, settings: SchedulerSettings) -> None:
        self._models = models
        self._driver = driver
        self.queue_timeout_s = {
            Priority.INTERACTIVE: settings.queue_timeout_interactive_s,
            Priority.STANDARD: settings.queue_timeout_standard_s,
            Priority.BATCH: settings.queue_timeout_batch_s,
        }
        self.pending: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
        """Requests and tokens on their way to the core, by model."""
        self._bytes_per_token: dict[str, float] = {}

    def refusal(
        self, message: pb.GenerateRequest, now: float, *, tenant: str, paced: bool
    ) -> ServiceError | None:
        """Return why a request is refused for load, if so. One that is wrong in itself is let through."""
        model = self._models.peek(message.model)
        if model is None or paced:
            return None
        terms = message.terms
        try:
            priority = Priority(terms.priority or Priority.STANDARD)
        except ValueError:
            return None
        timeout_s = self.queue_timeout_s[priority]
        if terms.HasField("queue_timeout_ms"):
            timeout_s = terms.queue_timeout_ms / 1000
        requests, tokens = self.pending[model.id]
        ask = Ask(
            priority=priority,
            tenant=tenant,
            prompt_tokens=self.estimate(message, model),
            may_shed=terms.may_shed,
            queue_deadline=now + timeout_s if timeout_s is not None else None,
            ttft_deadline=now + terms.ttft_deadline_ms / 1000 if terms.HasField("ttft_deadline_ms") else None,
            deadline=now + terms.deadline_ms / 1000 if terms.HasField("deadline_ms") else None,
            pending_requests=requests,
            pending_tokens=tokens,
        )
        error = self._driver.refusal_for_load(model.id, ask)
        return ServiceError.from_core(error) if error is not None else None

    def estimate(self, message: pb.GenerateRequest, model: Model) -> int:
        """Return about how many tokens a prompt has, as it will be computed."""
        if message.WhichOneof("input") == "tokens":
            tokens = len(message.tokens.ids)
        else:
            tokens = int(message.ByteSize() / self._bytes_per_token.get(model.id, _BYTES_PER_TOKEN))
        if not message.terms.may_trim:
            return tokens
        if message.HasField("accepted_as"):
            return min(tokens, message.accepted_as.prompt_tokens)
        caps = self._driver.caps(model.id)
        return min(tokens, caps.prompt_tokens) if caps is not None else tokens

    def enter(self, message: pb.GenerateRequest) -> Pending:
        """Count a request that is about to be tokenized."""
        model = self._models.peek(message.model)
        if model is None:
            return Pending(self, "", 0, 0, open=False)
        tokens = self.estimate(message, model)
        counts = self.pending[model.id]
        counts[0] += 1
        counts[1] += tokens
        exact = message.WhichOneof("input") == "tokens"
        return Pending(self, model.id, 0 if exact else message.ByteSize(), tokens)

    def limits(self, call: GenerateCall, model: Model) -> Limits | None:
        """Return what a request is to be cut down to, if its client allows that and the load demands it.

        One that was accepted before gets what it got then: its tokens go on from the prompt it had.
        """
        terms = call.terms
        if not terms.may_trim:
            return None
        before = call.accepted_as
        if before is not None:
            prompt_tokens, max_tokens = before.prompt_tokens, before.max_tokens
        elif not call.resumed and (caps := self._driver.caps(model.id)) is not None:
            prompt_tokens, max_tokens = caps.prompt_tokens, caps.max_tokens
        else:
            return None
        trim = TrimSpec(prompt_tokens, terms.keep_head_tokens, terms.keep_tail_tokens)
        return Limits(trim, max_tokens)

    def learn(self, model: str, num_bytes: int, tokens: int) -> None:
        """A prompt of so many bytes has so many tokens."""
        ratio = num_bytes / max(1, tokens)
        known = self._bytes_per_token.get(model, ratio)
        self._bytes_per_token[model] = known + _GAIN * (ratio - known)
