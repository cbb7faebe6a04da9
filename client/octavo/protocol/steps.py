"""Plans and reports as records, shared by the scheduler's core and the worker's engine.

Field meanings are those of `protos/octavo/v1/worker.proto`; `convert.py` holds the conversions.
This module imports nothing beyond the standard library, so the pure parts of both services may use it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from octavo.sampling import SamplingParams

PROTOCOL_VERSION = 1
KEY_BYTES = 16
DIGEST_MASK = 2**64 - 1


class Priority(enum.IntEnum):
    """Class of service; lower is served first."""

    INTERACTIVE = 1
    STANDARD = 2
    BATCH = 3


class FinishReason(enum.IntEnum):
    """Why a choice ended."""

    UNKNOWN = 0
    """For a reason that only a later version knows. Clients show it; nobody sends it."""
    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    DEADLINE = 4
    ERROR = 5

    @classmethod
    def _missing_(cls, value: object) -> FinishReason | None:
        return cls.UNKNOWN if isinstance(value, int) else None

    @property
    def is_complete(self) -> bool:
        """Whether the output has come to its own end; with every other known reason goes an error."""
        return self in {FinishReason.STOP, FinishReason.LENGTH}


class Pooling(enum.IntEnum):
    """How the hidden states of a text become one vector of length 1."""

    LAST = 1
    MEAN = 2


class StepStatus(enum.IntEnum):
    """What became of a step."""

    OK = 1
    FAILED = 2
    SKIPPED = 3


class StallReason(enum.IntEnum):
    """Why a sequence sat out a step although it was planned."""

    NO_BLOCK = 1
    PROMOTING = 2
    COMPILING = 3


class RefuseReason(enum.IntEnum):
    """Why a worker did not take a sequence."""

    NO_BLOCKS = 1
    MAX_NUM_SEQS = 2
    NO_CONTIGUOUS_RUN = 3
    DRAINING = 4
    UNSUPPORTED = 5


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape of a worker's KV memory."""

    block_size: int
    num_blocks: int
    num_host_blocks: int = 0
    block_bytes: int = 0
    """In all ranks of the worker's host together."""
    paged: bool = True
    pin_budget_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Admit:
    """A sequence for a worker to take; `keys` are those of the full blocks of `token_ids`."""

    handle: int
    token_ids: Seq[int]
    prompt_len: int
    sampling: SamplingParams
    choice: int = 0
    keys: tuple[bytes, ...] = ()
    reserve_tokens: int | None = None
    hold_after_finish: bool = False
    priority: Priority = Priority.STANDARD
    adapter: str | None = None
    score_from: int | None = None
    """Log probabilities are wanted of the prompt's tokens from this index on."""
    pooling: Pooling | None = None
    """The vector of the tokens is wanted."""


def cacheable_tokens(score_from: int | None, pooling: Pooling | None, num_tokens: int) -> int:
    """Return how many leading tokens need not be computed where their KV is cached."""
    if score_from is not None:
        return score_from - 1
    return 0 if pooling is Pooling.MEAN else num_tokens


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do in one step, as a delta: complete sequences decode unless they are in `skip`."""

    step: int
    admit: tuple[Admit, ...] = ()
    prefill: tuple[tuple[int, int], ...] = ()
    """(handle, tokens to compute at most)."""
    skip: tuple[int, ...] = ()
    seal: tuple[tuple[int, int, bytes], ...] = ()
    """(handle, index in the block table, key)."""
    release: tuple[int, ...] = ()
    resume_after: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position of an output or a prompt, best alternatives first.

    The first token of a prompt follows nothing: it has rank 0, and no log probability.
    """

    token_id: int
    logprob: float
    rank: int
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    token_bytes: bytes = b""
    """The token's text, which may be a part of a character. A worker knows no text and leaves it empty."""
    top_token_bytes: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence that ended in this step."""

    handle: int
    reason: FinishReason
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """A sequence that the worker did not take."""

    handle: int
    reason: RefuseReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Admitted:
    """A sequence that the worker took, and the tokens whose KV it found."""

    handle: int
    cached_tokens: int = 0
    host_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TierCopies:
    """Copies between device and host tier since start, and what a block costs lately (microseconds)."""

    out_blocks: int = 0
    in_blocks: int = 0
    skipped_blocks: int = 0
    """Not copied, because to compute them again was cheaper."""
    out_us_per_block: float = 0.0
    in_us_per_block: float = 0.0


@dataclass(frozen=True, slots=True)
class PoolReport:
    """Blocks after the step's frees; free + evictable + active is the pool's size."""

    free: int
    evictable: int
    active: int
    pinned: int = 0
    host_free: int = 0
    largest_free_run: int = 0
    unused_slots: int = 0
    step_active: int = 0
    """Active while the step ran: with what it finished, which is free now."""
    step_unused_slots: int = 0
    """Of these, token slots that held nothing when it had run."""
    hit_tokens: int = 0
    miss_tokens: int = 0
    host_hit_tokens: int = 0
    copies: TierCopies | None = None
    """None without a host tier."""


@dataclass(frozen=True, slots=True)
class KeyEvents:
    """What became of cached keys; to be applied in the order demoted, evicted, promoted, stored."""

    stored: tuple[bytes, ...] = ()
    demoted: tuple[bytes, ...] = ()
    promoted: tuple[bytes, ...] = ()
    evicted: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Where a step's time went (microseconds) and what it computed."""

    execute_us: int = 0
    bubble_us: int = 0
    overhead_us: int = 0
    copy_us: int = 0
    num_decodes: int = 0
    num_prefill_tokens: int = 0
    context_tokens: int = 0


GRAMMAR_ERROR = "GRAMMAR"
"""Kind of the error of a sequence whose constraint is at fault, not the step."""


@dataclass(frozen=True, slots=True)
class StepError:
    """An error in a step, with its culprits when they are known."""

    handles: tuple[int, ...]
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Report:
    """What came of one plan.

    `token_handles`, `first_positions` and (when not empty) `token_counts` run in parallel;
    `token_ids` is their flat concatenation. Empty counts mean one token each.
    """

    step: int
    status: StepStatus
    pool: PoolReport
    live_count: int
    digest: int
    token_handles: Seq[int] = ()
    token_counts: Seq[int] = ()
    first_positions: Seq[int] = ()
    token_ids: Seq[int] = ()
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[int, tuple[TokenLogprobs, ...]]] = field(default_factory=dict)
    """By handle: index in the prompt of the first, and log probabilities from there on."""
    embeddings: dict[int, tuple[float, ...]] = field(default_factory=dict)
    finished: tuple[Finished, ...] = ()
    stalled: tuple[tuple[int, StallReason], ...] = ()
    refused: tuple[Refused, ...] = ()
    admitted: tuple[Admitted, ...] = ()
    released: tuple[int, ...] = ()
    prefilled: tuple[tuple[int, int], ...] = ()
    """(handle, prompt tokens computed in this step)."""
    key_events: KeyEvents = KeyEvents()
    timing: StepTiming = StepTiming()
    errors: tuple[StepError, ...] = ()
    simulated: bool = False
    """The runner made the tokens and the times up."""


def digest_of(lengths: dict[int, int]) -> int:
    """Return the audit digest over handle -> tokens known: sum of handle * length, modulo 2^64.

    Linear in the length, so that both sides keep it by one addition per new token.
    """
    return sum(handle * length for handle, length in lengths.items()) & DIGEST_MASK
