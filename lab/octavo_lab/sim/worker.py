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
    paged: bool = True

    @property
    def caches(self) -> bool:
        """It keeps blocks for whoever has the same prefix; contiguous memory never does."""
        return self.prefix_caching and self.paged


@dataclass(slots=True)
class _Row:
    """A sequence on the worker."""

    handle: int
    length: int
    """Tokens known."""
    stream: int
    seed: int
    choice: int
    priority: Priority
    max_length: int
    """Length at which it ends."""
    least_length: int
    """Length before which no token stops it."""
    stop_token_ids: frozenset[int]
    keys: list[bytes]
    blocks: int
    shared: list[bytes]
    """Keys of published blocks it holds a reference on."""
    computed: int
    num_published: int
    """Leading blocks that are published, or stay private."""
    hold: bool
    prefill_done: bool = False
    held: bool = False


@dataclass(slots=True)
class _Step:
    """What a step computes."""

    decodes: list[_Row] = field(default_factory=list)
    prefills: list[tuple[_Row, int]] = field(default_factory=list)
    stalled: list[tuple[int, StallReason]] = field(default_factory=list)
    context_tokens: int = 0
    prefill_tokens: int = 0
    prefill_squares: int = 0

    def seeds(self) -> set[int]:
        return {row.seed for row in self.decodes} | {row.seed for row, _ in self.prefills}


StepFault = Callable[[frozenset[int]], tuple[StepError, ...]]
"""Given the seeds of what a step computes: its errors, if it fails. May raise WorkerCrashedError."""


def no_fault(seeds: frozenset[int]) -> tuple[StepError, ...]:
    """Let every step pass."""
    return ()


class SimWorker:
    """Applies plans in virtual time: `run` does a whole step at once and says how long it took."""

    def __init__(self, config: SimWorkerConfig) -> None:
        self.config = config
        self.incarnation = 1
        self.slowdown = 1.0
        self.refuse_next = 0
        """Admissions that are refused although there is room."""
        self.step_fault: StepFault = no_fault
        self.draining = False
        self.surprises: Counter[str] = Counter()
        """What a scheduler with good books never brings about: refused, over_budget; and stalled."""
        self._pool = CountingPool(config.num_blocks, caching=config.caches)
        self._start_session()

    def _start_session(self) -> None:
        self._rows: dict[int, _Row] = {}
        self._digest = 0
        self._cancelled: list[int] = []
        self._last_step = 0
        self._last_handle = 0
        self._failed_step: int | None = None

    # Session -------------------------------------------------------------------------------------

    def welcome(self) -> WorkerInfo:
        """Begin a session: no sequences, whatever cache there is."""
        for row in list(self._rows.values()):
            self._drop(row)
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

    def restart(self) -> None:
        """Start anew: the cache is lost."""
        self.incarnation += 1
        self.draining = False
        self._pool = CountingPool(self.config.num_blocks, caching=self.config.caches)
        self._start_session()

    def cancel(self, handles: tuple[int, ...]) -> None:
        """Drop sequences at the next step boundary."""
        self._cancelled.extend(handles)

    @property
    def lengths(self) -> dict[int, int]:
        """Tokens known of each live sequence, by handle."""
        return {handle: row.length for handle, row in self._rows.items()}

    def has(self, seed: int, choice: int) -> bool:
        """Return whether a choice of the request with this seed is here."""
        return any(row.seed == seed and row.choice == choice for row in self._rows.values())

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
        released = [h for h in (*self._cancelled, *plan.release) if self._release(h)]
        self._cancelled.clear()
        if self._failed_step is not None and plan.resume_after != self._failed_step:
            return self._report(plan, StepStatus.SKIPPED, released=tuple(released))
        self._failed_step = None
        admitted, refused = self._admit(plan)
        self._note_seals(plan)
        step = self._batch(plan)
        errors = self.step_fault(frozenset(step.seeds()))
        timing = self._timing(step, bubble_us)
        if errors:
            self._failed_step = plan.step
            return self._report(
                plan,
                StepStatus.FAILED,
                released=tuple(released),
                admitted=tuple(admitted),
                refused=tuple(refused),
                stalled=tuple(step.stalled),
                errors=errors,
                timing=timing,
            )
        handles, positions, tokens, finished = self._commit(step)
        return self._report(
            plan,
            StepStatus.OK,
            token_handles=handles,
            first_positions=positions,
            token_ids=tokens,
            finished=tuple(finished),
            stalled=tuple(step.stalled),
            refused=tuple(refused),
            admitted=tuple(admitted),
            released=tuple(released),
            prefilled=tuple((row.handle, count) for row, count in step.prefills),
            timing=timing,
        )

    def _report(self, plan: Plan, status: StepStatus, **contents: object) -> Report:
        return Report(
            step=plan.step,
            status=status,
            pool=self._pool.report(),
            live_count=len(self._rows),
            digest=self._digest & DIGEST_MASK,
            key_events=self._pool.take_events(),
            **contents,  # type: ignore[arg-type] # the callers above name fields of Report
        )

    def _timing(self, step: _Step, bubble_us: int) -> StepTiming:
        decodes = len(step.decodes)
        seconds = 0.0
        if decodes or step.prefills:
            seconds = self.slowdown * self.config.step_times.seconds(
                decodes, step.context_tokens, step.prefill_tokens, step.prefill_squares
            )
        return StepTiming(
            execute_us=round(seconds * 1e6),
            bubble_us=bubble_us,
            num_decodes=decodes,
            num_prefill_tokens=step.prefill_tokens,
            context_tokens=step.context_tokens,
        )

    # Parts of a step -----------------------------------------------------------------------------

    def _release(self, handle: int) -> bool:
        row = self._rows.pop(handle, None)
        if row is None:
            return False
        self._digest -= handle * row.length
        self._drop(row)
        return True

    def _drop(self, row: _Row) -> None:
        self._pool.give_back(row.blocks - len(row.shared), reversed(row.shared))

    def _admit(self, plan: Plan) -> tuple[list[Admitted], list[Refused]]:
        admitted: list[Admitted] = []
        refused: list[Refused] = []
        for admit in plan.admit:
            if admit.handle <= self._last_handle:
                raise PlanFaultError(f"handle {admit.handle} after {self._last_handle}")
            self._last_handle = admit.handle
            reason = self._refusal()
            if reason is None:
                cached = self._take(admit)
                if cached is not None:
                    admitted.append(Admitted(admit.handle, cached))
                    continue
                self.surprises["refused"] += 1
                reason = RefuseReason.NO_BLOCKS if self.config.paged else RefuseReason.NO_CONTIGUOUS_RUN
            refused.append(Refused(admit.handle, reason))
        return admitted, refused

    def _refusal(self) -> RefuseReason | None:
        if self.draining:
            return RefuseReason.DRAINING
        if self.refuse_next > 0:
            self.refuse_next -= 1
            return RefuseReason.NO_BLOCKS
        if len(self._rows) < self.config.max_num_seqs:
            return None
        self.surprises["refused"] += 1
        return RefuseReason.MAX_NUM_SEQS

    def _take(self, admit: Admit) -> int | None:
        """Take blocks for a sequence; return its cached tokens, or None when there are too few."""
        size, length = self.config.block_size, len(admit.token_ids)
        sampling = admit.sampling
        hits = self._pool.share(admit.keys, (length - 1) // size)
        seed = sampling.seed or 0
        most = admit.prompt_len + (sampling.max_tokens or self.config.max_model_len)
        most = min(most, self.config.max_model_len)
        reserved = admit.reserve_tokens or (0 if self.config.paged else most)
        blocks = -(-max(length + 1, reserved) // size)
        if not self._pool.take(blocks - len(hits)):
            self._pool.give_back(0, reversed(hits))
            return None
        self._rows[admit.handle] = _Row(
            handle=admit.handle,
            length=length,
            stream=stream_of(seed, admit.choice),
            seed=seed,
            choice=admit.choice,
            priority=admit.priority,
            max_length=most,
            least_length=admit.prompt_len + (sampling.min_tokens or 0),
            stop_token_ids=frozenset(sampling.stop_token_ids),
            keys=list(admit.keys),
            blocks=blocks,
            shared=hits,
            computed=len(hits) * size,
            num_published=len(hits),
            hold=admit.hold_after_finish,
        )
        self._digest += admit.handle * length
        return len(hits) * size

    def _note_seals(self, plan: Plan) -> None:
        for handle, index, key in plan.seal:
            row = self._rows.get(handle)
            if row is None:
                continue
            if index != len(row.keys):
                raise PlanFaultError(f"handle {handle}: seal of block {index} after {len(row.keys)}")
            row.keys.append(key)
            self._publish(row)

    def _batch(self, plan: Plan) -> _Step:
        """Choose what to compute: decodes that have their block, and the prefills of the plan."""
        step = _Step()
        size, skip = self.config.block_size, frozenset(plan.skip)
        rows = [row for row in self._rows.values() if row.prefill_done and row.handle not in skip]
        growing = sum(1 for row in rows if row.length > row.blocks * size)
        if growing > self._pool.obtainable:
            rows.sort(key=lambda row: (row.priority, row.handle))
        for row in rows:
            if row.length > row.blocks * size:
                if not self._pool.take(1):
                    self.surprises["stalled"] += 1
                    step.stalled.append((row.handle, StallReason.NO_BLOCK))
                    continue
                row.blocks += 1
            step.decodes.append(row)
            step.context_tokens += row.length
        for handle, most in plan.prefill:
            prefill = self._rows.get(handle)
            if prefill is None:
                continue
            tokens = min(most, prefill.length - prefill.computed)
            if prefill.prefill_done or tokens <= 0:
                continue
            step.prefills.append((prefill, tokens))
            step.prefill_tokens += tokens
            step.prefill_squares += tokens * (tokens + 2 * prefill.computed)
        over = len(step.decodes) + step.prefill_tokens > self.config.max_num_batched_tokens
        if over and (step.decodes or len(step.prefills) > 1):
            self.surprises["over_budget"] += 1
        return step

    def _commit(self, step: _Step) -> tuple[list[int], list[int], list[int], list[Finished]]:
        """Advance what was computed; return handles, positions and ids of new tokens, and who finished."""
        handles: list[int] = []
        positions: list[int] = []
        tokens: list[int] = []
        finished: list[Finished] = []
        size = self.config.block_size
        sampled = list(step.decodes)
        for row, count in step.prefills:
            row.computed += count
            if row.computed == row.length:
                row.prefill_done = True
                sampled.append(row)
            else:
                self._publish(row)
        for row in sampled:
            if row.held:
                continue
            row.computed = row.length
            if row.computed // size > row.num_published:
                self._publish(row)
            token = token_at(row.stream, row.length)
            handles.append(row.handle)
            positions.append(row.length)
            tokens.append(token)
            row.length += 1
            self._digest += row.handle
            stopped = token in row.stop_token_ids and row.length > row.least_length
            if stopped or row.length >= row.max_length:
                reason = FinishReason.STOP if stopped else FinishReason.LENGTH
                finished.append(Finished(row.handle, reason, token if stopped else None))
                if row.hold:
                    row.held = True
                else:
                    self._release(row.handle)
        return handles, positions, tokens, finished

    def _publish(self, row: _Row) -> None:
        """Publish the blocks that are computed and have a key."""
        ready = min(row.computed // self.config.block_size, len(row.keys))
        while row.num_published < ready:
            key = row.keys[row.num_published]
            row.num_published += 1
            if self._pool.publish(key):
                row.shared.append(key)
