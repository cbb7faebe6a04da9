"""What the service can take right now, asked before anything is spent on a request.

Refusals here touch no tokenizer and nothing that grows: they come from counters and the core's
current view. What passes is checked again, exactly, when it gets to the core.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from octavo.keys import Tenant
from octavo.protocol.steps import Priority
from octavo.service.memory import RETRY_S, MemoryCeiling
from octavo.v1 import generation_pb2 as pb

from scheduler_svc.config import QueueSection
from scheduler_svc.core.events import AdmissionRequest
from scheduler_svc.driver import CoreDriver
from scheduler_svc.errors import ServiceError
from scheduler_svc.fleet.models import ModelRegistry, ServedModel
from scheduler_svc.requests.messages import GenerateCall
from scheduler_svc.requests.outbox import ClientStream
from scheduler_svc.requests.tenants import TokenEstimate
from scheduler_svc.text.trimming import TrimSpec

_CHARACTERS_PER_TOKEN: Final = 4.0
"""Of a prompt, before any has been seen; then they are counted."""
_GAIN: Final = 0.05


class IncomingRequest(NamedTuple):
    """What is known of a request before its input is looked at: computed once, when it comes in.

    A tuple because it is made for each request that is refused, too.
    """

    message: pb.GenerateRequest
    stream: ClientStream
    caller: Tenant | ServiceError
    """Whose it is, or why its key is no good."""
    model: ServedModel | None
    """None when it names none that there is."""
    estimate: TokenEstimate
    prompt_tokens: int
    """About how many its prompt has as it will be computed: trimmed, where it may be."""
    input_size: int
    """Of a text in characters, of a conversation in bytes; 0 when its tokens were counted."""

    @property
    def tenant(self) -> Tenant:
        """Whose it is.

        Raises:
            ServiceError: its key is no good.
        """
        if isinstance(self.caller, ServiceError):
            raise self.caller
        return self.caller


@dataclass(frozen=True, slots=True)
class TrimLimits:
    """What a request that may be trimmed is cut down to."""

    trim: TrimSpec
    max_tokens: int | None
    """None leaves it as it is."""


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request on its way to the core: it counts towards the bounds of the queue until it is there."""

    gate: LoadGate
    model: str
    input_size: int
    tokens: int
    open: bool = True

    def close(self) -> None:
        """It has arrived, or never will. Later calls change nothing."""
        if self.open:
            self.open = False
            self.gate.add_pending(self.model, -1, -self.tokens)

    def learn(self, tokens: int) -> None:
        """Its prompt turned out to have so many tokens, trimmed ones included."""
        if self.input_size:
            self.gate.learn(self.model, self.input_size, tokens)


class LoadGate:
    """Refuses what there is no room for, and says how far the rest may go."""

    def __init__(
        self, models: ModelRegistry, driver: CoreDriver, ceiling: MemoryCeiling, settings: QueueSection
    ) -> None:
        self._models = models
        self._ceiling = ceiling
        self._driver = driver
        self.queue_timeout_s = settings.timeout_s
        self._pending: dict[str, tuple[int, int]] = {}
        """Requests and tokens on their way to the core, by model."""
        self._characters_per_token: dict[str, float] = {}

    def receive(
        self, message: pb.GenerateRequest, stream: ClientStream, caller: Tenant | ServiceError
    ) -> IncomingRequest:
        """Return what can be known of a request at once."""
        model = self._models.peek(message.model)
        match message.WhichOneof("input"):
            case "tokens":
                size, tokens = 0, len(message.tokens.ids)
            case "text":
                size = len(message.text)
                tokens = self._estimate(size, model)
            case _:
                size = message.chat.ByteSize()
                tokens = self._estimate(size, model)
        sampling = message.sampling
        output = sampling.max_tokens if sampling.HasField("max_tokens") else None
        resumed = sum(len(choice.token_ids) for choice in message.resume)
        text_bytes = (size or 4 * tokens) + constraint_bytes(message)
        return IncomingRequest(
            message,
            stream,
            caller,
            model,
            TokenEstimate(tokens, output, max(1, sampling.n), resumed, text_bytes),
            self._trimmed(tokens, message, model),
            size,
        )

    def no_memory(self) -> ServiceError | None:
        """Return why nothing at all can be taken now, if so: what is here already needs the rest."""
        if not self._ceiling.is_reached():
            return None
        limit = self._ceiling.max_rss_bytes
        return ServiceError(
            "MEMORY_FULL",
            f"the scheduler's memory is at its ceiling of {limit >> 20} MiB",
            retry_after_s=RETRY_S,
            metadata={"max_rss_bytes": str(limit)},
        )

    def refusal(self, incoming: IncomingRequest, now: float) -> ServiceError | None:
        """Return why a request is refused for load, if so. One that is wrong in itself is let through."""
        model = incoming.model
        terms = incoming.message.terms
        try:
            priority = Priority(terms.priority or Priority.STANDARD)
        except ValueError:
            return None
        if model is None or (incoming.stream.paced and priority is Priority.BATCH):
            return None
        timeout_s = self.queue_timeout_s[priority]
        if terms.HasField("queue_timeout_ms"):
            timeout_s = terms.queue_timeout_ms / 1000
        requests, tokens = self._pending.get(model.id, (0, 0))
        ask = AdmissionRequest(
            priority=priority,
            tenant=incoming.tenant.name,
            prompt_tokens=incoming.prompt_tokens,
            may_shed=terms.may_shed,
            queue_deadline=now + timeout_s if timeout_s is not None else None,
            ttft_deadline=now + terms.ttft_deadline_ms / 1000 if terms.HasField("ttft_deadline_ms") else None,
            deadline=now + terms.deadline_ms / 1000 if terms.HasField("deadline_ms") else None,
            pending_requests=requests,
            pending_tokens=tokens,
        )
        error = self._driver.refusal_for_load(model.id, ask)
        return ServiceError.from_core(error) if error is not None else None

    def enter(self, incoming: IncomingRequest) -> PendingRequest:
        """Count a request that is about to be tokenized."""
        model = incoming.model
        if model is None:
            return PendingRequest(self, "", 0, 0, open=False)
        self.add_pending(model.id, 1, incoming.prompt_tokens)
        return PendingRequest(self, model.id, incoming.input_size, incoming.prompt_tokens)

    def add_pending(self, model: str, requests: int, tokens: int) -> None:
        """Change how much is on its way to the core."""
        had_requests, had_tokens = self._pending.get(model, (0, 0))
        self._pending[model] = had_requests + requests, had_tokens + tokens

    def limits(self, call: GenerateCall, model: ServedModel) -> TrimLimits | None:
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
        return TrimLimits(trim, max_tokens)

    def learn(self, model: str, input_size: int, tokens: int) -> None:
        """A prompt of this size has so many tokens."""
        ratio = input_size / max(1, tokens)
        known = self._characters_per_token.get(model, ratio)
        self._characters_per_token[model] = known + _GAIN * (ratio - known)

    def _estimate(self, input_size: int, model: ServedModel | None) -> int:
        known = self._characters_per_token.get(model.id) if model is not None else None
        return 1 + int(input_size / (known or _CHARACTERS_PER_TOKEN))

    def _trimmed(self, tokens: int, message: pb.GenerateRequest, model: ServedModel | None) -> int:
        """Return about how many tokens of a prompt will be computed."""
        if model is None or not message.terms.may_trim:
            return tokens
        if message.HasField("accepted_as"):
            return min(tokens, message.accepted_as.prompt_tokens)
        caps = self._driver.caps(model.id)
        return min(tokens, caps.prompt_tokens) if caps is not None else tokens


def constraint_bytes(message: pb.GenerateRequest) -> int:
    """Return the size of what a worker has to compile for a request; it counts as text for a tokenizer."""
    return message.sampling.structured.ByteSize()
