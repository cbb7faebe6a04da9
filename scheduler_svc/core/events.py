"""What the shell tells the core."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from octavo.protocol.steps import Geometry, Pooling, PoolReport, Priority
from octavo.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """A validated request. Times are absolute, in monotonic seconds."""

    request_id: str
    model: str
    prompt_token_ids: Seq[int]
    sampling: SamplingParams
    """Fully resolved: n, seed and max_tokens are set."""
    priority: Priority = Priority.STANDARD
    tenant: str = "anonymous"
    prompt_keys: tuple[bytes, ...] = ()
    """Content keys of the prompt's full blocks; empty without prefix caching."""
    root_key: bytes = b""
    queue_deadline: float | None = None
    ttft_deadline: float | None = None
    deadline: float | None = None
    resumed: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Tokens already generated, by choice."""
    resumed_keys: Mapping[int, tuple[bytes, ...]] = field(default_factory=dict)
    """Content keys of the full blocks of prompt and resumed tokens, by choice; they follow from the tokens,
    so the core computes those that are not here."""
    finished_choices: frozenset[int] = frozenset()
    """Choices that had ended before it came here: they end at once, and are not computed."""
    paced: bool = False
    """From a client that is paced by credits: never refused for queue depth."""
    adapter: str | None = None
    """LoRA adapter to apply; only workers that have it can run the request."""
    may_shed: bool = False
    """It may be refused before others under load."""
    order: int = 0
    """Within its class; lower goes first."""
    scored_tokens: int = 0
    """Tokens of the prompt whose log probabilities its client has."""
    pooling: Pooling | None = None
    """The vector of the prompt is wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRequest:
    """What is known of a newcomer: by estimate before its prompt is tokenized, exactly after."""

    priority: Priority = Priority.STANDARD
    tenant: str = ""
    prompt_tokens: int = 0
    todo_tokens: int = 0
    """Of these, what has to be computed; 0 before that is known."""
    output_tokens: int = 1
    """Tokens that it generates at least."""
    max_tokens: int = 0
    """Tokens that it generates at most; 0 before that is known."""
    may_shed: bool = False
    paced: bool = False
    order: int = 0
    queue_deadline: float | None = None
    ttft_deadline: float | None = None
    deadline: float | None = None
    pending_requests: int = 0
    pending_tokens: int = 0
    """What is on its way to the queue ahead of it."""

    @classmethod
    def of(cls, spec: NewRequest, cached_tokens: int) -> AdmissionRequest:
        """Return what a tokenized request asks for."""
        prompt, sampling = len(spec.prompt_token_ids), spec.sampling
        resumed = max(map(len, spec.resumed.values()), default=0)
        certain = sampling.max_tokens if sampling.ignore_eos and not sampling.stop else sampling.min_tokens
        return cls(
            priority=spec.priority,
            tenant=spec.tenant,
            prompt_tokens=prompt,
            todo_tokens=max(1, prompt + resumed - cached_tokens),
            output_tokens=max(1, (certain or 1) - resumed),
            max_tokens=sampling.max_tokens or 0,
            may_shed=spec.may_shed,
            paced=spec.paced,
            order=spec.order,
            queue_deadline=spec.queue_deadline,
            ttft_deadline=spec.ttft_deadline,
            deadline=spec.deadline,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """A worker that has just welcomed the scheduler: no sequences, perhaps a warm cache."""

    worker_id: str
    incarnation: str
    model: str
    geometry: Geometry
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    pool: PoolReport
    device_keys: tuple[bytes, ...] = ()
    host_keys: tuple[bytes, ...] = ()
    adapters: tuple[str, ...] = ()
    """LoRA adapters that it can apply."""
    draining: bool = False
    """It takes nothing new."""
    devices: int = 1
    """GPUs that it computes on together; 1 where it has none."""
