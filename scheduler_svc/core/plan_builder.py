"""A plan in the making: what one step of a worker takes in, computes, skips and gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from octavo.protocol.steps import KEY_BYTES, Admit, Plan

from scheduler_svc.core.effects import LogEvent
from scheduler_svc.core.pipeline import InFlight
from scheduler_svc.core.request import Sequence, SequenceStatus
from scheduler_svc.core.sharing import Shares
from scheduler_svc.core.steptime import chunk_pairs
from scheduler_svc.core.worker import WorkerState

MAX_ADMIT_BYTES: Final = 16 << 20
"""What admissions of one plan may take on the wire. The one that passes it still goes, the next one waits."""
_TOKEN_BYTES: Final = 4


@dataclass(slots=True)
class PlanBuilder:
    """Collects the plan of `step`; binds, moves and charges sequences as it goes."""

    worker: WorkerState
    step: int
    budget: int
    """Tokens that may still be computed in this step."""
    available: int
    """Blocks that may still be taken in this step; those that it releases come later."""
    admits: list[Admit] = field(default_factory=list)
    admit_bytes: int = 0
    """About what these take on the wire."""
    admitted: list[Sequence] = field(default_factory=list)
    turns: set[Sequence] = field(default_factory=set)
    """Waiting sequences whose start would be a turn of their class."""
    num_deferred: int = 0
    """Waiting sequences that are left to better workers."""
    prefill: dict[int, int] = field(default_factory=dict)
    """Tokens to compute, by handle."""
    shares: Shares = field(default_factory=lambda: Shares(0))
    """How the prompts share the budget."""
    skip: list[int] = field(default_factory=list)
    released: list[Sequence] = field(default_factory=list)
    blocks: int = 0
    shared_keys: set[bytes] = field(default_factory=set)
    blocks_coming: int = 0
    """Blocks that its releases give back."""
    decodes: int = 0
    prefill_tokens: int = 0
    prefill_pairs: float = 0.0
    events: list[LogEvent] = field(default_factory=list)
    """What is worth a log line: preemptions."""

    @classmethod
    def for_next_step(cls, worker: WorkerState) -> PlanBuilder:
        """Return an empty plan for the worker's next step."""
        return cls(worker, worker.pipeline.next_step, worker.token_budget, worker.available_blocks())

    def take_blocks(self, blocks: int) -> None:
        """Reserve blocks for this step."""
        self.blocks += blocks
        self.available -= blocks

    def skip_decodes(self) -> None:
        """Let all decodes sit this step out."""
        for handle, sequence in self.worker.decoding.items():
            self.skip.append(handle)
            self.worker.blocks.delay_growth(sequence)
        self.decodes = 0

    def compute(self, sequence: Sequence, tokens: int) -> None:
        """Add prefill tokens of an admitted sequence."""
        handle = sequence.binding.handle
        self.prefill[handle] = self.prefill.get(handle, 0) + tokens
        self.prefill_pairs += chunk_pairs(tokens, sequence.num_tokens_before_plan)
        sequence.binding.num_planned_tokens += tokens
        self.prefill_tokens += tokens
        self.budget -= tokens

    def take_in(
        self,
        sequence: Sequence,
        now: float,
        *,
        reserve_tokens: int | None = None,
        hold_after_finish: bool = False,
    ) -> None:
        """Bind a waiting sequence to the worker from this step on."""
        sequence.transition(SequenceStatus.RUNNING)
        self.worker.admit(sequence, self.step, now)
        if sequence.history.started_at is None:
            sequence.history.started_at = now
        sequence.request.started = True
        spec = sequence.request.spec
        self.admit_bytes += self._bytes_of(sequence)
        self.admits.append(
            Admit(
                handle=sequence.binding.handle,
                token_ids=tuple(sequence.token_ids),
                prompt_len=sequence.prompt_len,
                sampling=spec.sampling,
                choice=sequence.choice,
                keys=tuple(sequence.keys),
                reserve_tokens=reserve_tokens,
                hold_after_finish=hold_after_finish,
                priority=spec.priority,
                adapter=spec.adapter,
                score_from=sequence.score_from,
                pooling=spec.pooling,
            )
        )
        self.admitted.append(sequence)

    def _bytes_of(self, sequence: Sequence) -> int:
        """Return about what an admission takes; what it shares with the one before is not sent again."""
        if self.admitted and self.admitted[-1].request is sequence.request:
            return (sequence.num_tokens - sequence.prompt_len) * _TOKEN_BYTES
        size = sequence.num_tokens * _TOKEN_BYTES + KEY_BYTES * len(sequence.keys)
        return size + sequence.request.spec.sampling.size_bytes

    def release(self, sequence: Sequence) -> int:
        """Take a sequence off the worker in this step; return the blocks that this gives back."""
        blocks = self.worker.blocks.freed_by(sequence)
        self.worker.stop(sequence)
        self.released.append(sequence)
        self.blocks_coming += blocks
        return blocks

    def finish(self, now: float) -> InFlight:
        """Return the plan, entered into the worker's books."""
        worker, pipeline = self.worker, self.worker.pipeline
        plan = Plan(
            step=self.step,
            admit=tuple(self.admits),
            prefill=tuple(self.prefill.items()),
            skip=tuple(self.skip),
            seal=tuple(pipeline.pending_seals),
            release=tuple(sequence.binding.handle for sequence in self.released),
            resume_after=pipeline.resume_after,
        )
        flight = InFlight(
            plan=plan,
            sent_at=now,
            blocks=self.blocks,
            shared_keys=self.shared_keys,
            blocks_coming=self.blocks_coming,
            decodes=self.decodes,
            prefill_tokens=self.prefill_tokens,
            prefill_pairs=self.prefill_pairs,
            admitted=self.admitted,
        )
        worker.blocks.coming += flight.blocks_coming
        pipeline.resume_after = None
        pipeline.pending_seals.clear()
        pipeline.in_flight.append(flight)
        pipeline.next_step = self.step + 1
        return flight
