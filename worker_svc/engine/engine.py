"""The engine: applies plans, runs steps, makes reports. No I/O, no clock of its own, one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Final

from octavo.protocol.steps import (
    Admit,
    Admitted,
    Plan,
    PoolReport,
    Priority,
    Refused,
    RefuseReason,
    Report,
    StallReason,
    StepStatus,
    cacheable_tokens,
)

from worker_svc.engine.faults import FaultKind, Faults
from worker_svc.engine.kv_offload import KvOffload
from worker_svc.engine.sequences import RunningSequences, SequenceState, new_state
from worker_svc.engine.step import CurrentStep, StepClock, StepOutcome, execute
from worker_svc.errors import DeviceLost, InvalidSettings, NotFinite
from worker_svc.grammar.guide import Grammars, Output
from worker_svc.kv.contiguous import ContiguousMemory
from worker_svc.kv.errors import OutOfBlocks
from worker_svc.kv.memory import NO_STEP, KvMemory, PinOutcome, Placement, StepUse
from worker_svc.kv.paged import PagedMemory
from worker_svc.kv.pool import BlockPool
from worker_svc.runner.base import ModelRunner, Row, StepBatch

_MOST_SCORES: Final = 1 << 14
"""Log probabilities of one prompt in one step, with those of the best tokens: about 512 KiB on their way."""
_WRONG_IN_A_ROW: Final = 16
"""So many sequences in a row that compute no numbers, and none that does, are the device's fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits of a worker and the shape of its KV memory."""

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    num_host_blocks: int = 0
    paged: bool = True
    pin_budget_blocks: int = 0
    first_block_id: int = 0
    """Blocks below it belong to the runner."""
    promote_blocks_per_step: int = 64
    """Copies from the host tier that are started in one step, at most."""
    check_integrity: bool = False
    """Audit all books after every step."""

    def __post_init__(self) -> None:
        usable = (self.num_blocks - self.pin_budget_blocks) * self.block_size
        if usable < self.max_model_len:
            raise InvalidSettings(
                f"({self.num_blocks} blocks - {self.pin_budget_blocks} for pins) x {self.block_size} tokens "
                f"= {usable}, but one sequence may need {self.max_model_len}"
            )


class WorkerEngine:
    """Runs the sequences of one scheduler, one plan at a time.

    `run_step` is `begin` (what to compute), the runner, and `finish` (what came of it). Each handle
    that is admitted ends in exactly one of finished and released. Everything is called from one
    thread, between steps.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        faults: Faults | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self._runner = runner
        self._grammars = grammars
        self._config = config
        self._faults = Faults() if faults is None else faults
        self._eos_token_ids = frozenset(config.eos_token_ids)
        self.memory = _memory_of(config)
        self._running = RunningSequences(self.memory, config.block_size)
        self._offload = KvOffload(runner, self.memory, config.promote_blocks_per_step)
        self._step = CurrentStep(0)
        self._step_use = NO_STEP
        self._cancelled: list[int] = []
        self._cancelled_early: set[int] = set()
        """Cancelled before the plan that admits them was applied."""
        self._last_handle = 0
        self._failed_step: int | None = None
        self._num_not_finite = 0
        """Sequences in a row, up to now, that computed something else than numbers."""

    @property
    def num_live(self) -> int:
        """Sequences that live, finished ones that are held included."""
        return len(self._running.states)

    @property
    def digest(self) -> int:
        """Sum of handle * length over the live sequences, modulo 2^64."""
        return self._running.digest

    def cancel(self, handles: Iterable[int]) -> None:
        """Drop sequences at the next step boundary, those that a plan on its way will admit included."""
        self._cancelled.extend(handles)

    def pin(self, name: str, keys: Seq[bytes]) -> PinOutcome:
        """Keep a prefix on the device, in place of what was pinned under this name."""
        return self.memory.pin(name, keys)

    def unpin(self, name: str) -> int:
        """End a pin; return how many blocks it held alone."""
        return self.memory.unpin(name)

    def drop_all(self) -> None:
        """Drop all sequences and pins and keep the cache; handles and steps start anew.

        A scheduler that attaches sends the pins that it knows before its first plan.
        """
        self._running.drop_all()
        self.memory.unpin_all()
        self.memory.drop_abandoned()
        self._step_use = NO_STEP
        self._cancelled.clear()
        self._cancelled_early.clear()
        self._last_handle = 0
        self._failed_step = None

    def take_cached_keys(self) -> tuple[list[bytes], list[bytes]]:
        """Return the keys on the device and in the host tier; later key events build on these."""
        self.memory.take_key_events()
        return self.memory.cached_keys()

    def pool_report(self) -> PoolReport:
        """Return the pool's figures of now."""
        return self.memory.report(self._running.unused_slots, self._step_use)

    def check_integrity(self) -> None:
        """Verify every invariant from scratch.

        Raises:
            IntegrityError: names the invariant that is broken.
        """
        self._running.check_integrity()

    def run_step(self, plan: Plan, clock: Callable[[], float]) -> Report:
        """Do what a plan says and report.

        Raises:
            DeviceLost: the process cannot go on.
        """
        times = StepClock(clock)
        self._offload.poll()
        batch = self.begin(plan)
        outcome = StepOutcome()
        if batch is not None:
            began = clock()
            self._offload.perform(clock)
            copied = clock()
            outcome = execute(self._runner, batch)
            self._judge_device(outcome)
            times.execute_s = clock() - copied
            times.copy_s = copied - began
        report = self.finish(outcome, times)
        if self._config.check_integrity:
            self.check_integrity()
        return report

    def _judge_device(self, outcome: StepOutcome) -> None:
        """Give up a device that computes no numbers for anybody: then it is no sequence's fault."""
        if outcome.token_ids:
            self._num_not_finite = 0
        self._num_not_finite += sum(len(e.handles) for e in outcome.errors if e.kind == NotFinite.reason)
        if self._num_not_finite >= _WRONG_IN_A_ROW and not outcome.token_ids:
            raise DeviceLost(
                f"{self._num_not_finite} sequences in a row computed something else than numbers"
            )

    def begin(self, plan: Plan) -> StepBatch | None:
        """Apply a plan up to the point where the runner computes; None when the plan is skipped."""
        step = self._step = CurrentStep(plan.step)
        self._release(plan.release, step)
        if self._failed_step is not None:
            if plan.resume_after != self._failed_step:
                step.status = StepStatus.SKIPPED
                self._skip_admits(plan.admit)
                return None
            self._failed_step = None
        self._running.finish_loads()
        self._running.take_seals(plan.seal)
        self._hand_out_blocks(plan, step)
        self._choose_rows(plan, step)
        return StepBatch(tuple(step.rows), tuple(step.added), tuple(self._running.removed))

    def finish(self, outcome: StepOutcome, times: StepClock) -> Report:
        """Settle what the runner computed for the plan begun last, and report."""
        step, running = self._step, self._running
        step.errors = outcome.errors
        active = self.memory.num_active
        running.dropped_unused_slots = 0
        if outcome.failed:
            step.status = StepStatus.FAILED
            self._failed_step = step.number
            for sequence in step.added:
                running.states[sequence.handle].introduced = False
        elif step.rows:
            running.removed.clear()
            running.settle(outcome, step)
            step.take_logprobs(outcome.logprobs)
            step.take_read(outcome)
            step.stalled.extend((handle, StallReason.COMPILING) for handle in sorted(outcome.unguided))
            self.memory.cost.executed(step.num_decodes, step.num_prefill_tokens, times.execute_s * 1e6)
        if running.guided and step.status is StepStatus.OK:
            running.go_on_guided(outcome.token_ids, step)
        self._step_use = StepUse(active, running.unused_slots + running.dropped_unused_slots)
        return step.report(self.memory, self.pool_report(), (len(running.states), running.digest), times)

    def _release(self, released: Iterable[int], step: CurrentStep) -> None:
        for handle in self._cancelled:
            if self._running.drop(handle):
                step.released.append(handle)
            elif handle > self._last_handle:
                self._cancelled_early.add(handle)
        self._cancelled.clear()
        for handle in released:
            if self._running.drop(handle):
                step.released.append(handle)
        self.memory.drop_abandoned()

    def _skip_admits(self, admits: Iterable[Admit]) -> None:
        for admit in admits:
            self._last_handle = max(self._last_handle, admit.handle)
            self._cancelled_early.discard(admit.handle)

    def _hand_out_blocks(self, plan: Plan, step: CurrentStep) -> None:
        """Give blocks to decodes that need one and to new sequences: by priority, then by handle."""
        skipped = set(plan.skip)
        demands: list[tuple[Priority, int, SequenceState | Admit]] = [
            (state.sequence.priority, handle, state)
            for handle, state in self._running.starved.items()
            if handle not in skipped
        ]
        demands.extend((admit.priority, admit.handle, admit) for admit in plan.admit)
        if len(demands) > 1:
            demands.sort(key=_by_priority)
        taken: dict[int, tuple[SequenceState, Placement]] = {}
        for _, handle, demand in demands:
            if isinstance(demand, Admit):
                outcome = self._admit(demand, len(taken))
                if isinstance(outcome, Refused):
                    step.refused.append(outcome)
                else:
                    taken[handle] = outcome
            elif not self._grow(demand):
                step.stalled.append((handle, StallReason.NO_BLOCK))
        for admit in plan.admit:
            self._last_handle = max(self._last_handle, admit.handle)
            if admit.handle in taken:
                self._take_in(admit.handle, *taken[admit.handle], step)

    def _take_in(self, handle: int, state: SequenceState, placement: Placement, step: CurrentStep) -> None:
        self._running.add(state, placement)
        step.admitted.append(Admitted(handle, placement.cached_tokens, placement.host_cached_tokens))
        if handle in self._cancelled_early:
            self._cancelled_early.discard(handle)
            self._running.drop(handle)
            step.released.append(handle)

    def _grow(self, state: SequenceState) -> bool:
        try:
            self._faults.draw_allocation()
            self._running.grow(state)
        except OutOfBlocks:
            return False
        return True

    def _admit(self, admit: Admit, num_taken: int) -> tuple[SequenceState, Placement] | Refused:
        """Find room for a new sequence, or say why there is none."""
        problem = self._problem_of(admit)
        if problem is not None:
            return Refused(admit.handle, RefuseReason.UNSUPPORTED, problem)
        if len(self._running.states) + num_taken >= self._config.max_num_seqs:
            return Refused(admit.handle, RefuseReason.MAX_NUM_SEQS)
        state = new_state(admit, self._eos_token_ids, self._config.max_model_len)
        num_tokens = len(admit.token_ids)
        reserve_tokens = admit.reserve_tokens or state.max_len
        cacheable = cacheable_tokens(admit.score_from, admit.pooling, num_tokens)
        match = self.memory.match(admit.keys[: cacheable // self._config.block_size], num_tokens)
        if match.device_blocks and self._faults.draw(FaultKind.EVICTION_RACE):
            self.memory.evict(self._config.num_blocks)
        try:
            self._faults.draw_allocation()
            placement = self.memory.admit(match, num_tokens, reserve_tokens)
        except OutOfBlocks as error:
            return Refused(admit.handle, self.memory.refusal, str(error))
        if not self._config.paged:
            state.max_len = min(state.max_len, len(placement.block_table) * self._config.block_size)
        if admit.sampling.structured is not None and self._grammars is not None:
            state.sequence.guide = self._grammars.guide(
                admit.sampling.structured,
                Output(admit.token_ids[admit.prompt_len :], state.stop_ids, admit.sampling.min_tokens or 0),
            )
        return state, placement

    def _problem_of(self, admit: Admit) -> str | None:
        """Return what of a sequence this worker cannot do at all."""
        num_tokens = len(admit.token_ids)
        if admit.handle <= self._last_handle:
            return f"handle {admit.handle} is not above {self._last_handle}, which was used"
        if not 0 < num_tokens < self._config.max_model_len:
            return f"{num_tokens} tokens in a context of {self._config.max_model_len}"
        if admit.sampling.structured is not None and self._grammars is None:
            return "structured output: this worker has no library of grammars"
        return self._runner.supports(admit.sampling)

    def _choose_rows(self, plan: Plan, step: CurrentStep) -> None:
        """Collect the rows of the step in admission order: the decodes, and chunks of prefills."""
        chunks = self._chunks_of(plan, step) if plan.prefill else {}
        skipped = set(plan.skip)
        rows = step.rows
        context_tokens = 0
        for handle, state in self._running.states.items():
            sequence = state.sequence
            if sequence.prefill_done:
                known = len(sequence.token_ids)
                if known > state.capacity or handle in skipped:
                    continue
                if sequence.guide is not None and sequence.guide.missed and not sequence.guide.ready:
                    step.stalled.append((handle, StallReason.COMPILING))
                    continue
                row = state.row
                row.start = known - 1
                context_tokens += known
            elif handle in chunks:
                start, num_tokens = sequence.num_computed_tokens, chunks[handle]
                row = Row(sequence, start, num_tokens, start + num_tokens == len(sequence.token_ids))
            else:
                continue
            rows.append(row)
            if not state.introduced:
                state.introduced = True
                step.added.append(sequence)
        step.num_decodes = len(rows) - len(chunks)
        step.context_tokens = context_tokens

    def _chunks_of(self, plan: Plan, step: CurrentStep) -> dict[int, int]:
        """Return the tokens to prefill by handle. How many a step may hold is the scheduler's care."""
        chunks: dict[int, int] = {}
        for handle, wanted in plan.prefill:
            state = self._running.states.get(handle)
            if state is None or state.sequence.prefill_done:
                continue
            if state.load is not None:
                waits = state.load.num_missing > 0
                step.stalled.append((handle, StallReason.PROMOTING if waits else StallReason.NO_BLOCK))
                continue
            left = len(state.sequence.token_ids) - state.sequence.num_computed_tokens
            guide = state.sequence.guide
            if guide is not None and not guide.ready and wanted + state.lost_tokens >= left:
                # Its first token has to wait, and so its last prompt token.
                step.stalled.append((handle, StallReason.COMPILING))
                left -= 1
            if wanted > 0 and left:
                chunks[handle] = min(wanted + state.lost_tokens, left, _most_scored(state))
        return chunks


def _by_priority(demand: tuple[Priority, int, object]) -> tuple[Priority, int]:
    return demand[:2]


def _memory_of(config: EngineConfig) -> KvMemory:
    if not config.paged:
        return ContiguousMemory(config.num_blocks, config.block_size, config.first_block_id)
    pool = BlockPool(config.num_blocks, config.first_block_id)
    return PagedMemory(pool, config.block_size, config.num_host_blocks, config.pin_budget_blocks)


def _most_scored(state: SequenceState) -> int:
    """Return how many tokens of a sequence a step may compute for the sake of what it reports of them."""
    sequence = state.sequence
    if sequence.score_from is None:
        return len(sequence.token_ids)
    return _MOST_SCORES // (1 + (sequence.sampling.prompt_logprobs or 0))
