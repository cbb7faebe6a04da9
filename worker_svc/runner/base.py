"""The interface of a model runner, and what the engine and a runner say to each other."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from octavo.protocol.steps import Pooling, Priority, TokenLogprobs
from octavo.sampling import SamplingParams

from worker_svc.grammar.guide import Guide, late_of
from worker_svc.models.text import ModelText


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What a loaded model says of itself; the source of `WorkerDescription`.

    A runner that is given what the files say fills in what concerns the weights.
    """

    model_id: str
    """Its first name."""
    revision: str
    text: ModelText
    runner: str
    dtype: str = ""
    kv_dtype: str = ""
    vocab_size: int = 0
    max_model_len: int = 0
    kv_bytes_per_token: int = 0
    """In one rank."""
    aliases: tuple[str, ...] = ()
    """Further names."""
    adapters: tuple[str, ...] = ()
    device: str = "cpu"
    num_ranks: int = 1
    """Processes of one host that share the model, each with its part of every block."""


@dataclass(slots=True)
class SequenceData:
    """Tokens, progress and blocks of one sequence.

    One invariant drives everything: `num_computed_tokens` catches up with `len(token_ids)`. A
    sequence whose lag is one token and whose prefill is done decodes; KV of token i lives in slot
    i % block_size of block `block_table[i // block_size]`.
    """

    handle: int
    token_ids: list[int]
    prompt_len: int
    sampling: SamplingParams
    choice: int = 0
    priority: Priority = Priority.STANDARD
    adapter: str | None = None
    score_from: int | None = None
    """Log probabilities are wanted of the prompt's tokens from this index on."""
    pooling: Pooling | None = None
    """The vector of the tokens is wanted."""
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    pooled: list[float] | None = None
    """What of its vector is computed, before it is given a length of 1."""
    prefill_done: bool = False
    hold_after_finish: bool = False
    held: bool = False
    """Finished but kept: its row is still computed and its output thrown away."""
    guide: Guide | None = None
    """What holds its output to a grammar."""

    @property
    def num_output_tokens(self) -> int:
        """Tokens after the prompt, those it was resumed with included."""
        return len(self.token_ids) - self.prompt_len


@dataclass(slots=True)
class Row:
    """One sequence's share of a step: compute tokens [start, start + num_tokens) of it.

    `start` is `sequence.num_computed_tokens`. With `sample`, the last of them yields the next token.
    The runner must change neither the row nor the sequence. The engine uses the rows of decodes
    again in the next step, so a row is good until `execute` returns.
    """

    sequence: SequenceData
    start: int
    num_tokens: int
    sample: bool

    @property
    def scored(self) -> range:
        """Indices of prompt tokens whose log probabilities this row yields, from the token before each."""
        sequence = self.sequence
        if sequence.score_from is None:
            return range(0)
        end = min(self.start + self.num_tokens + 1, sequence.prompt_len)
        return range(max(sequence.score_from, self.start + 1), end)

    @property
    def pooled(self) -> Pooling | None:
        """How its hidden states go into the vector of its sequence; None where they do not."""
        pooling = self.sequence.pooling
        return pooling if self.sample or pooling is Pooling.MEAN else None


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One packed batch. Rows come in the order in which the sequences were admitted.

    After a failed step `added` and `removed` may name again what the runner has seen in it, and
    `removed` may name handles that it has never seen.
    """

    rows: tuple[Row, ...]
    added: tuple[SequenceData, ...] = ()
    """Sequences that the runner has not seen before."""
    removed: tuple[int, ...] = ()
    """Handles that the runner may forget; applied before `added`."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled tokens of the rows with `sample`, by handle, and what else was asked for."""

    token_ids: dict[int, int]
    logprobs: dict[int, TokenLogprobs]
    unguided: frozenset[int] = frozenset()
    """Decodes without a token, since it was not known in time what their grammars allow."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """Of the tokens that are `scored` by a row."""
    pooled: dict[int, list[float]] = field(default_factory=dict)
    """Of rows that are `pooled`: the sum of the hidden states of their tokens, after the last norm, or that
    of the last token."""

    def update(self, other: StepResult) -> None:
        """Add what came of other rows, but for what was `unguided`."""
        self.token_ids.update(other.token_ids)
        self.logprobs.update(other.logprobs)
        self.prompt_logprobs.update(other.prompt_logprobs)
        self.pooled.update(other.pooled)


def guided_rows(rows: Iterable[Row]) -> tuple[dict[int, Guide], frozenset[int]]:
    """Wait a little for the masks of a computed step.

    Returns:
        The guides of the rows that sample under a grammar, by handle, and the handles of those whose mask
        is still not there: they must get no token in this step.
    """
    sampling = [row.sequence for row in rows if row.sample]
    guides = {seq.handle: seq.guide for seq in sampling if seq.guide is not None and not seq.held}
    if not guides:
        return {}, frozenset()
    late = late_of(list(guides.values()), alone=len(guides) == len(sampling))
    unguided = frozenset(handle for handle, is_late in zip(guides, late, strict=True) if is_late)
    return {handle: guide for handle, guide in guides.items() if handle not in unguided}, unguided


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A copy of one block between device and host pool."""

    device_block: int
    host_block: int


class CopyTicket(Protocol):
    """A copy under way."""

    def done(self) -> bool:
        """Return whether the data has arrived."""

    def elapsed_s(self) -> float:
        """Return how long the copy took, the wait for somebody to ask left out; only once it is done.

        This is what the engine holds against the time to compute the tokens again.
        """


class ModelRunner(Protocol):
    """A loaded model over the KV memory of a block pool. Called from one thread."""

    @property
    def info(self) -> LoadedModel:
        """The model's description; valid once the runner is loaded."""

    def available_kv_bytes(self, utilization: float) -> int:
        """Return the bytes that KV blocks may take; profiles the device where there is one."""

    def allocate(self, num_blocks: int, block_size: int, num_host_blocks: int) -> None:
        """Make the KV memory. Raises MemoryError when it does not fit."""

    def supports(self, sampling: SamplingParams) -> str | None:
        """Return what of `sampling` this runner cannot do, or None."""

    def execute(self, batch: StepBatch) -> StepResult:
        """Compute one step.

        Raises:
            StepOutOfMemory: the device is out of memory; nothing was advanced.
            StepFailed: the step failed; culprits are named when they are known.
            DeviceLost: the process cannot go on.
        """

    def copy_to_host(self, copies: Seq[BlockCopy]) -> None:
        """Copy blocks out; on return the device blocks may be overwritten."""

    def copy_to_device(self, copies: Seq[BlockCopy]) -> CopyTicket:
        """Start to copy blocks in; steps may run meanwhile, but not on these blocks."""

    def close(self) -> None:
        """Give everything back."""
