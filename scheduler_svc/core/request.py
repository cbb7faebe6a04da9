"""Requests, their sequences, and the lifecycle of a sequence."""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field

from octavo.protocol.keys import chain
from octavo.protocol.steps import Priority, cacheable_tokens

from scheduler_svc.core.errors import IllegalTransitionError
from scheduler_svc.core.events import NewRequest


class SequenceStatus(enum.Enum):
    """Where a sequence is in its life."""

    HELD = "held"
    """A sibling that waits for its leader's prompt blocks."""
    WAITING = "waiting"
    RUNNING = "running"
    """Bound to a worker: a plan that admits it has been sent."""
    RELEASING = "releasing"
    """Taken off its worker, which may still report tokens of it."""
    FINISHED = "finished"


TRANSITIONS: dict[SequenceStatus, frozenset[SequenceStatus]] = {
    SequenceStatus.HELD: frozenset({SequenceStatus.WAITING, SequenceStatus.FINISHED}),
    SequenceStatus.WAITING: frozenset({SequenceStatus.RUNNING, SequenceStatus.FINISHED}),
    SequenceStatus.RUNNING: frozenset(
        {SequenceStatus.RELEASING, SequenceStatus.WAITING, SequenceStatus.FINISHED}
    ),
    SequenceStatus.RELEASING: frozenset({SequenceStatus.WAITING, SequenceStatus.FINISHED}),
    SequenceStatus.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Waiting:
    """What the queue and the planners note of a sequence while it waits."""

    num_tokens: int = 0
    """Tokens that it will have to prefill at most, as the queue counts it."""
    blocked_since: float | None = None
    """When it first stood at the head and did not fit."""
    deferred_until: float | None = None
    """Until then it may be deferred to a better worker; None while it never was."""
    deferred_to: dict[Sequence, int] | None = None
    """The list of a worker's deferred sequences that it is on: that worker looks at it when it plans next."""
    trust_hits: bool = True
    """False after a refusal: its cached blocks no longer count as room."""


@dataclass(slots=True, eq=False)
class Binding:
    """A sequence on a worker. `num_computed_tokens` is what the worker has confirmed (cached or computed)."""

    worker_id: str | None = None
    """None before the first binding, and once the worker has let go."""
    handle: int = 0
    admitted_step: int = 0
    num_admitted_tokens: int = 0
    """Length when it was admitted: what its prefill has to cover."""
    num_computed_tokens: int = 0
    num_planned_tokens: int = 0
    """Prefill tokens that plans in flight will add."""
    num_believed_tokens: int = 0
    """Tokens that the worker is believed to hold, until it has said so."""
    num_charged_tokens: int = 0
    """Prefill tokens that its tenant was charged ahead of their computation."""
    num_hit_blocks: int = 0
    """Its leading blocks whose keys are known to be in use."""
    admitted_at: float = 0.0
    growth_bucket: int | None = None
    """Steps congruent to this (modulo the block size) take a block; None while it prefills."""


@dataclass(slots=True, eq=False)
class SequenceHistory:
    """What a sequence has been through."""

    started_at: float | None = None
    first_token_at: float | None = None
    cached_tokens: int = 0
    """Prompt tokens found in a cache when it was first admitted."""
    num_settled_tokens: int = 0
    """Before its first token: leading tokens that its tenant has paid for or a cache had. To compute them
    again is at the service's expense."""
    preemptions: int = 0
    recoveries: int = 0


@dataclass(slots=True, eq=False)
class Deaths:
    """Workers that died under a sequence since it last proved itself."""

    count: int = 0
    alone: int = 0
    """Those that computed nothing else."""
    evidence: float = 0.0
    """That it kills them, by those that it was alone on; see `losses`."""
    last_at: float = 0.0
    proven_at_len: int = 0
    """Length at which it will have proved itself."""
    exclusive: bool = False
    """It runs beside nobody but its like."""
    max_on_trial: int = 1
    """Suspects that may run beside each other, itself included."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request. `token_ids` is prompt and output; empty while it is held."""

    request: Request
    request_id: str
    choice: int
    token_ids: array[int]
    keys: list[bytes]
    """Content keys of the full blocks of `token_ids`."""
    status: SequenceStatus = SequenceStatus.WAITING
    waiting: Waiting = field(default_factory=Waiting)
    binding: Binding = field(default_factory=Binding)
    history: SequenceHistory = field(default_factory=SequenceHistory)
    deaths: Deaths = field(default_factory=Deaths)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known."""
        return len(self.token_ids)

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return self.request.prompt_len

    @property
    def num_output_tokens(self) -> int:
        """Output tokens known, resumed ones included."""
        return len(self.token_ids) - self.request.prompt_len

    @property
    def left_to_plan(self) -> int:
        """Prefill tokens that no plan covers yet."""
        binding = self.binding
        return binding.num_admitted_tokens - binding.num_computed_tokens - binding.num_planned_tokens

    @property
    def num_tokens_before_plan(self) -> int:
        """Tokens that are computed, or believed to be cached, when what is planned has run."""
        binding = self.binding
        return max(binding.num_computed_tokens, binding.num_believed_tokens) + binding.num_planned_tokens

    @property
    def suspect(self) -> bool:
        """A worker died under it, and it has not been seen past that point since."""
        return self.deaths.count > 0

    @property
    def untried(self) -> bool:
        """No step has computed it to a token yet."""
        return self.history.first_token_at is None

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens of a waiting sequence that are still to be computed or generated, at most."""
        return self.waiting.num_tokens + self.request.max_total_tokens - len(self.token_ids)

    @property
    def num_unpaid_tokens(self) -> int:
        """Tokens to prefill that its tenant will pay for, at most; none once it has had a first token."""
        return len(self.token_ids) - self.history.num_settled_tokens if self.untried else 0

    def settle(self, num_tokens: int) -> int:
        """A worker holds so many of its leading tokens; return how many of them were not paid for."""
        owed = num_tokens - self.history.num_settled_tokens
        if owed <= 0 or not self.untried:
            return 0
        self.history.num_settled_tokens = num_tokens
        return owed

    @property
    def score_from(self) -> int | None:
        """Index of the first token of the prompt that its worker is to score; None where it need not."""
        request = self.request
        scores = request.spec.sampling.prompt_logprobs is not None and request.leader is self
        return request.num_scored if scores and request.num_scored < request.prompt_len else None

    @property
    def num_cacheable_tokens(self) -> int:
        """Leading tokens that need not be computed where they are cached; one is always computed."""
        most = cacheable_tokens(self.score_from, self.request.spec.pooling, self.num_tokens)
        return min(most, self.num_tokens - 1)

    def may_be_deferred(self, now: float) -> bool:
        """Return whether it may still be deferred to a better worker."""
        until = self.waiting.deferred_until
        return until is None or now < until

    def note_better(self, until: float) -> None:
        """A better worker was found for it: the first estimate says how long it may wait for one."""
        if self.waiting.deferred_until is None:
            self.waiting.deferred_until = until

    def end_deferral(self) -> None:
        """It is not deferred to a worker any more."""
        if self.waiting.deferred_to is not None:
            del self.waiting.deferred_to[self]
            self.waiting.deferred_to = None

    def extend_keys(self, block_size: int) -> None:
        """Add the keys of blocks that tokens have filled since."""
        start = len(self.keys) * block_size
        if len(self.token_ids) - start >= block_size:
            parent = self.keys[-1] if self.keys else self.request.spec.root_key
            self.keys += chain(parent, self.token_ids[start:], block_size)

    def transition(self, to: SequenceStatus) -> None:
        """Move to another status.

        Raises:
            IllegalTransitionError: the table has no such step; nothing is changed.
        """
        if to not in TRANSITIONS[self.status]:
            raise IllegalTransitionError(
                f"{self.request_id}/{self.choice}: {self.status.value} -> {to.value}"
            )
        request = self.request
        if self.status is SequenceStatus.HELD and request.leader is not None:
            self.token_ids = request.leader.token_ids[: request.prompt_len]
            self.token_ids.extend(request.spec.resumed.get(self.choice, ()))
        self.status = to


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a newcomer had to expect, in seconds from then."""

    wait_s: float
    """Until a worker takes it."""
    ttft_s: float
    """Until its first token."""
    wait_error_s: float
    ttft_error_s: float
    """Mean absolute errors of such predictions, lately."""


@dataclass(slots=True, eq=False)
class Request:
    """What a client asked, and what is left of it."""

    spec: NewRequest
    arrival: float
    sequences: list[Sequence] = field(default_factory=list)
    live: int = 0
    """Choices that have not ended."""
    leader: Sequence | None = None
    """The first choice that is computed, and the prompt with it. None when all had ended before."""
    started: bool = False
    """Some choice has been scheduled: the queue timeout is over."""
    got_token: bool = False
    """Some choice has produced a token: the TTFT deadline is over."""
    num_bounded: int = 0
    """Waiting choices that the queue's bounds count; together they count as one request."""
    queue_deadline: float | None = None
    """When it must have started; not before some worker has looked at it."""
    num_scored: int = 1
    """Tokens of its prompt whose log probabilities were emitted; the first one has none."""
    prediction: Prediction | None = None
    """What it was to expect when it came in."""

    @property
    def request_id(self) -> str:
        """The client's name for it."""
        return self.spec.request_id

    @property
    def priority(self) -> Priority:
        """Class of service."""
        return self.spec.priority

    @property
    def tenant(self) -> str:
        """Who pays for it."""
        return self.spec.tenant

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.spec.prompt_token_ids)

    @property
    def max_total_tokens(self) -> int:
        """Tokens that a choice can reach at most."""
        limit = self.spec.sampling.max_tokens
        return self.prompt_len + (limit if limit is not None else 0)

    def is_late(self, now: float) -> bool:
        """Return whether a deadline that it can still miss has passed."""
        spec = self.spec
        return (
            (spec.deadline is not None and now >= spec.deadline)
            or (spec.ttft_deadline is not None and now >= spec.ttft_deadline and not self.got_token)
            or (self.queue_deadline is not None and now >= self.queue_deadline and not self.started)
        )

    @classmethod
    def from_spec(cls, spec: NewRequest, now: float, block_size: int | None) -> Request:
        """Make the request and its sequences; siblings that can share the prompt's blocks are held.

        Without a block size or a root key nothing has a key. What had ended before is held until it is ended.
        """
        request = cls(spec, now, queue_deadline=spec.queue_deadline, num_scored=max(1, spec.scored_tokens))
        if not spec.root_key:
            block_size = None
        choices = spec.sampling.n or 1
        shares = block_size is not None and request.prompt_len >= block_size
        for choice in range(choices):
            if choice in spec.finished_choices or (request.leader is not None and shares):
                # Many long copies of the prompt would lie there for nothing.
                held = Sequence(request, spec.request_id, choice, array("I"), [], SequenceStatus.HELD)
                request.sequences.append(held)
                continue
            tokens = array("I", spec.prompt_token_ids)
            tokens.extend(spec.resumed.get(choice, ()))
            keys = list(spec.resumed_keys.get(choice, spec.prompt_keys)) if block_size else []
            sequence = Sequence(request, spec.request_id, choice, tokens, keys)
            if block_size is not None:
                sequence.extend_keys(block_size)
            request.sequences.append(sequence)
            request.leader = request.leader or sequence
        request.live = choices
        return request
