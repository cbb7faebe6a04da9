"""One step: what its plan comes to, and how its batch is run.

A batch is run so that one bad sequence, or a moment without memory, costs as little as possible.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import add

from octavo.protocol.steps import (
    Admitted,
    Finished,
    PoolReport,
    Refused,
    Report,
    StallReason,
    StepStatus,
    StepTiming,
    TokenLogprobs,
)
from octavo.protocol.steps import StepError as ReportedError

from worker_svc.errors import DeviceLost, RunnerError, StepFailed, StepOutOfMemory
from worker_svc.kv.memory import KvMemory
from worker_svc.runner.base import ModelRunner, Row, SequenceData, StepBatch, StepResult

_US_PER_S = 1e6
_LONE_ROW_RETRIES = 2


class StepClock:
    """Where a step's time goes, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.started = clock()
        self.copy_s = 0.0
        self.execute_s = 0.0

    def overhead_s(self) -> float:
        """Return the time up to now that neither the runner nor copies took."""
        return max(self.clock() - self.started - self.execute_s - self.copy_s, 0.0)


@dataclass(slots=True)
class CurrentStep:
    """The step of one plan, from its beginning to its report."""

    number: int
    status: StepStatus = StepStatus.OK
    rows: list[Row] = field(default_factory=list)
    added: list[SequenceData] = field(default_factory=list)
    num_decodes: int = 0
    num_prefill_tokens: int = 0
    context_tokens: int = 0
    admitted: list[Admitted] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    stalled: list[tuple[int, StallReason]] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    prefilled: list[tuple[int, int]] = field(default_factory=list)
    token_handles: list[int] = field(default_factory=list)
    first_positions: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[int, tuple[TokenLogprobs, ...]]] = field(default_factory=dict)
    embeddings: dict[int, tuple[float, ...]] = field(default_factory=dict)
    errors: tuple[ReportedError, ...] = ()

    def take_logprobs(self, logprobs: Mapping[int, TokenLogprobs]) -> None:
        """Keep those of tokens that are reported."""
        for handle in self.token_handles if logprobs else ():
            if handle in logprobs:
                self.logprobs[handle] = (logprobs[handle],)

    def take_read(self, outcome: StepOutcome) -> None:
        """Keep what was read off prompts: log probabilities, and vectors of those that are computed whole."""
        for row in outcome.rows if outcome.prompt_logprobs or outcome.pooled else ():
            sequence = row.sequence
            if entries := outcome.prompt_logprobs.get(sequence.handle):
                self.prompt_logprobs[sequence.handle] = (row.scored.start, tuple(entries))
            if added := outcome.pooled.get(sequence.handle):
                before = sequence.pooled
                sequence.pooled = list(map(add, before, added)) if before else added
                if row.sample:
                    length = math.hypot(*sequence.pooled) or 1.0
                    vector = tuple([value / length for value in sequence.pooled])
                    self.embeddings[sequence.handle] = vector

    def report(self, memory: KvMemory, pool: PoolReport, live: tuple[int, int], times: StepClock) -> Report:
        """Return the report; `live` is the count and the digest of the live sequences."""
        live_count, digest = live
        return Report(
            step=self.number,
            status=self.status,
            pool=pool,
            live_count=live_count,
            digest=digest,
            token_handles=self.token_handles,
            first_positions=self.first_positions,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            embeddings=self.embeddings,
            finished=tuple(self.finished),
            stalled=tuple(self.stalled),
            refused=tuple(self.refused),
            admitted=tuple(self.admitted),
            released=tuple(self.released),
            prefilled=tuple(self.prefilled),
            key_events=memory.take_key_events(),
            errors=self.errors,
            timing=StepTiming(
                execute_us=int(times.execute_s * _US_PER_S),
                overhead_us=int(times.overhead_s() * _US_PER_S),
                copy_us=int(times.copy_s * _US_PER_S),
                num_decodes=self.num_decodes,
                num_prefill_tokens=self.num_prefill_tokens,
                context_tokens=self.context_tokens,
            ),
        )


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What came of a step batch.

    When `failed`, nothing counts. Otherwise `rows` were computed, some perhaps in part, and
    `culprits` were left out because the step cannot run with them.
    """

    rows: tuple[Row, ...] = ()
    token_ids: Mapping[int, int] = field(default_factory=dict)
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, list[TokenLogprobs]] = field(default_factory=dict)
    pooled: Mapping[int, list[float]] = field(default_factory=dict)
    culprits: frozenset[int] = frozenset()
    unguided: frozenset[int] = frozenset()
    """Left out, too, since their grammars are not ready."""
    errors: tuple[ReportedError, ...] = ()
    failed: bool = False


def execute(runner: ModelRunner, batch: StepBatch) -> StepOutcome:
    """Compute a batch.

    Out of memory: its halves are computed one after the other, down to single rows and shorter
    chunks. Culprits named by the runner: the others are computed without them. Any other failure
    fails the step.

    Raises:
        DeviceLost: the process cannot go on.
    """
    if not batch.rows:
        return StepOutcome()
    return _Execution(runner, batch).outcome()


class _Execution:
    """The attempts at one batch."""

    def __init__(self, runner: ModelRunner, batch: StepBatch) -> None:
        self._runner = runner
        self._batch = batch
        self._added = batch.added
        self._removed = batch.removed
        self._rows: list[Row] = []
        self._sampled = StepResult({}, {})
        self._errors: list[ReportedError] = []
        self._culprits: set[int] = set()
        self._unguided: set[int] = set()
        self._starved: Counter[int] = Counter()
        """Rows of one token that ran out of memory all alone, and how often."""

    def outcome(self) -> StepOutcome:
        """Attempt the whole batch and return what came of it."""
        try:
            self._attempt(self._batch.rows)
        except RunnerError as error:
            self._note(error, error.handles)
            return StepOutcome(errors=tuple(self._errors), failed=True)
        sampled = self._sampled
        return StepOutcome(
            rows=tuple(self._rows),
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            prompt_logprobs=sampled.prompt_logprobs,
            pooled=sampled.pooled,
            culprits=frozenset(self._culprits),
            unguided=frozenset(self._unguided),
            errors=tuple(self._errors),
        )

    def _attempt(self, rows: tuple[Row, ...]) -> None:
        """Compute these rows, in parts if need be.

        Raises:
            RunnerError: they fail and it is not known why.
        """
        if not rows:
            return
        try:
            result = self._runner.execute(self._part(rows))
        except DeviceLost:
            raise
        except (StepOutOfMemory, MemoryError) as error:
            self._shrink(rows, error)
        except RunnerError as error:
            self._leave_out(rows, error)
        except Exception as error:  # a fault of a runner is a failed step, not a dead worker
            raise StepFailed(f"{type(error).__name__}: {error}") from error
        else:
            self._collect(rows, result)

    def _part(self, rows: tuple[Row, ...]) -> StepBatch:
        if rows is self._batch.rows:
            return self._batch
        handles = {row.sequence.handle for row in rows}
        added = tuple([sequence for sequence in self._added if sequence.handle in handles])
        return StepBatch(rows, added, self._removed)

    def _collect(self, rows: tuple[Row, ...], result: StepResult) -> None:
        token_ids = result.token_ids
        answered = token_ids.keys() | result.unguided if result.unguided else token_ids
        missing = [row for row in rows if row.sample and row.sequence.handle not in answered]
        if missing:
            handles = tuple([row.sequence.handle for row in missing])
            self._leave_out(rows, StepFailed("the runner sampled no token", handles))
            return
        self._removed = ()
        if rows is not self._batch.rows:
            handles_done = {row.sequence.handle for row in rows}
            self._added = tuple([seq for seq in self._added if seq.handle not in handles_done])
        if result.unguided:
            self._unguided |= result.unguided
            rows = tuple([row for row in rows if row.sequence.handle not in result.unguided])
        self._rows.extend(rows)
        self._sampled.update(result)

    def _shrink(self, rows: tuple[Row, ...], error: Exception) -> None:
        """Go on in halves; a single token is tried again, since memory may have come free."""
        if len(rows) > 1:
            half = len(rows) // 2
            self._attempt(rows[:half])
            self._attempt(rows[half:])
            return
        (row,) = rows
        handle = row.sequence.handle
        if row.num_tokens > 1:
            self._attempt((Row(row.sequence, row.start, row.num_tokens // 2, sample=False),))
        elif self._starved[handle] < _LONE_ROW_RETRIES:
            self._starved[handle] += 1
            self._attempt(rows)
        else:
            raise StepOutOfMemory(str(error), (handle,))

    def _leave_out(self, rows: tuple[Row, ...], error: RunnerError) -> None:
        """Go on without the culprits that the error names."""
        named = {row.sequence.handle for row in rows}.intersection(error.handles)
        if not named:
            raise error
        self._note(error, tuple(sorted(named)))
        self._culprits |= named
        self._attempt(tuple([row for row in rows if row.sequence.handle not in named]))

    def _note(self, error: RunnerError, handles: tuple[int, ...]) -> None:
        self._errors.append(ReportedError(handles, error.reason, str(error)))
