"""A simulated worker: the step protocol of worker.proto without a model behind it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from octavo.protocol.steps import (
    DIGEST_MASK,
    Admit,
    Admitted,
    Finished,
    FinishReason,
    Geometry,
    Plan,
    Priority,
    Refused,
    RefuseReason,
    Report,
    StallReason,
    StepError,
    StepStatus,
    StepTiming,
)
from octavo.steptimes import StepTimes

from octavo_lab.sim.pool import CountingPool
from octavo_lab.sim.tokens import stream_of, token_at
from scheduler_svc.core.events import WorkerInfo

MODEL = "sim"


class WorkerCrashedError(Exception):
    """The step has killed the worker."""


class PlanFaultError(Exception):
    """A plan breaks the protocol: no scheduler may ever send it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimWorkerConfig:
    """Size and speed of a simulated worker."""

    worker_id: str
    step_times: StepTimes
    model: str = MODEL
    block_size: int = 16
    num_blocks: int = 4096
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int = 8192
    prefix_caching: bool = True
    """Blocks stay for whoever has the same prefix; those of contiguous memory never do."""
    paged: bool = True


@dataclass(slots=True)
class _Row:
    """A sequence on the worker."""

    admit: Admit
    handle: int
    seed: int
    stream: int
    length: int
    """Tokens known."""
    max_length: int
    """Length at which it ends."""
    least_length: int
    """Length before which no token stops it."""
    stop_token_ids: frozenset[int]
    keys: list[bytes]
    capacity: int
    """Tokens that its blocks hold."""
    shared: list[bytes]
    """Keys of published blocks it holds a reference on."""
    computed: int
    num_published: int
    """Leading blocks that are published, or stay private."""
    prefill_done: bool = False
    held: bool = False


@dataclass(slots=True)
class _Step:
    """What a step computes, and what comes of it; fields as in `Report`."""

    rows: list[tuple[_Row, int]] = field(default_factory=list)
    """Sequences in the order of their admission, and how many tokens of each are computed."""
    status: StepStatus = StepStatus.OK
    errors: tuple[StepError, ...] = ()
    timing: StepTiming = StepTiming()
    admitted: list[Admitted] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    stalled: list[tuple[int, StallReason]] = field(default_factory=list)
    prefilled: list[tuple[int, int]] = field(default_factory=list)
    token_handles: list[int] = field(default_factory=list)
    first_positions: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)


StepFault = Callable[[frozenset[int]], tuple[StepError, ...]]
"""Given the seeds of what a step computes: its errors, if it fails. May raise WorkerCrashedError."""


def no_fault(seeds: frozenset[int]) -> tuple[StepError, ...]:
    """Let every step pass."""
    return ()


class SimWorker:
    """Applies plans in virtual time: `run` does a whole step at once and says how long it took.

    It reports what `worker_svc.engine` would, without block tables and token ids, so that a step costs two
    thirds of the time; `tests/sim/test_worker_twins.py` compares the two. Blocks are only counted: where
    memory is not paged, no free run is ever too short. And a step with a culprit that is known fails, where
    the engine goes on without it: the scheduler has to take both.
    """

    def __init__(self, config: SimWorkerConfig) -> None:
        self.config = config
        self.incarnation = 0
        self.refuse_next = 0
        """Admissions that are refused although there is room."""
        self.step_fault: StepFault = no_fault
        self.surprises: Counter[str] = Counter()
        """What a scheduler with good books never brings about: refused, over_budget; and stalled."""
        self.restart()

    def restart(self) -> None:
        """Start anew: the cache is lost."""
        config = self.config
        self.incarnation += 1
        self.draining = False
        self._pool = CountingPool(config.num_blocks, caching=config.prefix_caching and config.paged)
        self._start_session()

    def _start_session(self) -> None:
        self._rows: dict[int, _Row] = {}
        self._starved: dict[int, _Row] = {}
        """Those whose next token does not fit into their blocks."""
        self._late_seals: list[_Row] = []
        """Those with a key that came after its block had been computed."""
        self._digest = 0
        self._cancelled: list[int] = []
        self._cancelled_early: set[int] = set()
        """Cancelled before the plan that admits them came."""
        self._last_step = 0
        self._last_handle = 0
        self._failed_step: int | None = None

    def welcome(self) -> WorkerInfo:
        """Begin a session: no sequences, whatever cache there is."""
        for handle in list(self._rows):
            self._release(handle)
        self._start_session()
        config = self.config
        # Nobody is told what became of keys while nobody was attached: the welcome lists them all.
        self._pool.take_events()
        return WorkerInfo(
            worker_id=config.worker_id,
            incarnation=str(self.incarnation),
            model=config.model,
            geometry=Geometry(config.block_size, config.num_blocks, paged=config.paged),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            pool=self._pool.report(),
            device_keys=self._pool.keys,
        )

    def cancel(self, handles: tuple[int, ...]) -> None:
        """Drop sequences at the next step boundary."""
        self._cancelled.extend(handles)

    def has(self, seed: int, choice: int) -> bool:
        """Return whether a choice of the request with this seed is here."""
        return any(row.seed == seed and row.admit.choice == choice for row in self._rows.values())

    def handles_of(self, seeds: frozenset[int]) -> tuple[int, ...]:
        """Return the handles of the sequences with these seeds."""
        return tuple(row.handle for row in self._rows.values() if row.seed in seeds)

    @property
    def num_seqs(self) -> int:
        """Live sequences."""
        return len(self._rows)

    @property
    def quiet(self) -> bool:
        """Nothing is held for anybody: no sequences, no active blocks."""
        return not self._rows and self._pool.obtainable == self._pool.num_blocks

    # A step --------------------------------------------------------------------------------------

    def run(self, plan: Plan, bubble_us: int = 0) -> Report:
        """Apply a plan; `timing.execute_us` of the report is how long the step takes.

        Raises:
            PlanFaultError: the plan breaks the protocol.
            WorkerCrashedError: an injected fault.
        """
        if plan.step != self._last_step + 1:
            raise PlanFaultError(f"step {plan.step} after {self._last_step}")
        self._last_step = plan.step
        step = _Step()
        self._let_go(plan, step)
        if self._failed_step is not None and plan.resume_after != self._failed_step:
            step.status = StepStatus.SKIPPED
            # Its admissions do not come about: nothing is left to cancel.
            for admit in plan.admit:
                self._last_handle = admit.handle
                self._cancelled_early.discard(admit.handle)
        else:
            self._failed_step = None
            self._note_seals(plan)
            self._hand_out_blocks(plan, step)
            self._choose_rows(plan, step, bubble_us)
            step.errors = self.step_fault(frozenset(row.seed for row, _ in step.rows))
            if step.errors:
                step.status, step.prefilled = StepStatus.FAILED, []
                self._failed_step = plan.step
            else:
                self._commit(step)
        return self._report(plan, step)

    def _report(self, plan: Plan, step: _Step) -> Report:
        return Report(
            step=plan.step,
            status=step.status,
            pool=self._pool.report(),
            live_count=len(self._rows),
            digest=self._digest & DIGEST_MASK,
            token_handles=step.token_handles,
            first_positions=step.first_positions,
            token_ids=step.token_ids,
            finished=tuple(step.finished),
            stalled=tuple(step.stalled),
            refused=tuple(step.refused),
            admitted=tuple(step.admitted),
            released=tuple(step.released),
            prefilled=tuple(step.prefilled),
            key_events=self._pool.take_events(),
            timing=step.timing,
            errors=step.errors,
        )

    # Parts of a step -----------------------------------------------------------------------------

    def _let_go(self, plan: Plan, step: _Step) -> None:
        """Drop what was cancelled, and what the plan releases."""
        if self._cancelled:
            self._cancelled_early.update(handle for handle in self._cancelled if handle > self._last_handle)
            step.released += filter(self._release, self._cancelled)
            self._cancelled.clear()
        step.released += filter(self._release, plan.release)

    def _release(self, handle: int) -> bool:
        row = self._rows.pop(handle, None)
        if row is None:
            return False
        self._starved.pop(handle, None)
        self._digest -= handle * row.length
        private = row.capacity // self.config.block_size - len(row.shared)
        self._pool.give_back(private, reversed(row.shared))
        return True

    def _note_seals(self, plan: Plan) -> None:
        for handle, index, key in plan.seal:
            row = self._rows.get(handle)
            if row is None:
                continue
            if index != len(row.keys):
                raise PlanFaultError(f"handle {handle}: seal of block {index} after {len(row.keys)}")
            row.keys.append(key)
            if (index + 1) * self.config.block_size <= row.computed:
                self._late_seals.append(row)

    def _hand_out_blocks(self, plan: Plan, step: _Step) -> None:
        """Give blocks to decodes that need one and to new sequences: by priority, then by handle."""
        if not self._starved and not plan.admit:
            return
        # The first of the plan may come to nothing for another reason than room.
        forced = len(plan.admit) if self.draining else min(self.refuse_next, len(plan.admit))
        why = RefuseReason.DRAINING if self.draining else RefuseReason.NO_BLOCKS
        step.refused += (Refused(admit.handle, why) for admit in plan.admit[:forced])
        if not self.draining:
            self.refuse_next -= forced
        demands: list[tuple[Priority, int, _Row | Admit]] = [
            (row.admit.priority, handle, row)
            for handle, row in self._starved.items()
            if handle not in plan.skip
        ]
        demands += ((admit.priority, admit.handle, admit) for admit in plan.admit[forced:])
        demands.sort(key=lambda demand: demand[:2])
        taken: dict[int, _Row] = {}
        for _, handle, demand in demands:
            if isinstance(demand, Admit):
                self._admit(demand, taken, step)
            elif self._pool.take(1):
                demand.capacity += self.config.block_size
                del self._starved[handle]
            else:
                self.surprises["stalled"] += 1
                step.stalled.append((handle, StallReason.NO_BLOCK))
        for admit in plan.admit:
            if admit.handle <= self._last_handle:
                raise PlanFaultError(f"handle {admit.handle} after {self._last_handle}")
            self._last_handle = admit.handle
            if (row := taken.get(admit.handle)) is None:
                continue
            self._rows[row.handle] = row
            self._digest += row.handle * row.length
            step.admitted.append(Admitted(row.handle, row.computed))
            if row.handle in self._cancelled_early:
                # Its cancel has overtaken its plan.
                self._cancelled_early.discard(row.handle)
                self._release(row.handle)
                step.released.append(row.handle)

    def _admit(self, admit: Admit, taken: dict[int, _Row], step: _Step) -> None:
        """Take blocks for a sequence, or refuse it."""
        why = RefuseReason.NO_BLOCKS if self.config.paged else RefuseReason.NO_CONTIGUOUS_RUN
        if len(self._rows) + len(taken) >= self.config.max_num_seqs:
            why = RefuseReason.MAX_NUM_SEQS
        elif (row := self._take(admit)) is not None:
            taken[admit.handle] = row
            return
        self.surprises["refused"] += 1
        step.refused.append(Refused(admit.handle, why))

    def _take(self, admit: Admit) -> _Row | None:
        """Take blocks for a sequence; None when there are too few."""
        size, length, sampling = self.config.block_size, len(admit.token_ids), admit.sampling
        hits = self._pool.share(admit.keys, (length - 1) // size)
        seed, longest = sampling.seed or 0, self.config.max_model_len
        most = min(admit.prompt_len + (sampling.max_tokens or longest), longest)
        reserved = max(length + 1, admit.reserve_tokens or most)
        blocks = length // size + 1 if self.config.paged else -(-reserved // size)
        if not self._pool.take(blocks - len(hits)):
            self._pool.give_back(0, reversed(hits))
            return None
        return _Row(
            admit=admit,
            handle=admit.handle,
            seed=seed,
            stream=stream_of(seed, admit.choice),
            length=length,
            max_length=most,
            least_length=admit.prompt_len + (sampling.min_tokens or 0),
            stop_token_ids=frozenset(sampling.stop_token_ids),
            keys=list(admit.keys),
            capacity=blocks * size,
            shared=hits,
            computed=len(hits) * size,
            num_published=len(hits),
        )

    def _choose_rows(self, plan: Plan, step: _Step, bubble_us: int) -> None:
        """Choose what to compute: decodes that have their block, and the prefills of the plan."""
        skip, chunks = frozenset(plan.skip), dict(plan.prefill)
        rows = step.rows
        context = prefill = squares = 0
        for handle, row in self._rows.items():
            if row.prefill_done:
                if row.length <= row.capacity and handle not in skip:
                    rows.append((row, 1))
                    context += row.length
            elif handle in chunks:
                tokens = min(chunks[handle], row.length - row.computed)
                rows.append((row, tokens))
                step.prefilled.append((handle, tokens))
                prefill += tokens
                squares += tokens * (tokens + 2 * row.computed)
        decodes = len(rows) - len(step.prefilled)
        if decodes + prefill > self.config.max_num_batched_tokens and len(rows) > 1:
            self.surprises["over_budget"] += 1
        seconds = self.config.step_times.seconds(decodes, context, prefill, squares) if rows else 0.0
        step.timing = StepTiming(
            execute_us=round(seconds * 1e6),
            bubble_us=bubble_us,
            num_decodes=decodes,
            num_prefill_tokens=prefill,
            context_tokens=context,
        )

    def _commit(self, step: _Step) -> None:
        """Advance what was computed: new tokens, keys to publish, and who has finished."""
        handles, positions, tokens = step.token_handles, step.first_positions, step.token_ids
        size = self.config.block_size
        if step.rows and self._late_seals:
            for row in self._late_seals:
                if row.handle in self._rows:
                    self._publish(row)
            self._late_seals.clear()
        for row, count in step.rows:
            if row.held:
                continue
            row.computed += count
            if row.computed // size > row.num_published:
                self._publish(row)
            if row.computed < row.length:
                continue
            row.prefill_done = True
            token = token_at(row.stream, row.length)
            handles.append(row.handle)
            positions.append(row.length)
            tokens.append(token)
            row.length += 1
            self._digest += row.handle
            stopped = token in row.stop_token_ids and row.length > row.least_length
            if stopped or row.length >= row.max_length:
                reason = FinishReason.STOP if stopped else FinishReason.LENGTH
                step.finished.append(Finished(row.handle, reason, token if stopped else None))
                if row.admit.hold_after_finish:
                    row.held = True
                else:
                    self._release(row.handle)
            elif row.length > row.capacity:
                self._starved[row.handle] = row

    def _publish(self, row: _Row) -> None:
        """Publish the blocks that are computed and have a key."""
        ready = min(row.computed // self.config.block_size, len(row.keys))
        while row.num_published < ready:
            key = row.keys[row.num_published]
            row.num_published += 1
            if self._pool.publish(key):
                row.shared.append(key)
