"""Runs a step batch so that one bad sequence, or a moment without memory, costs as little as possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from octavo.protocol.steps import StepError as ReportedError
from octavo.protocol.steps import TokenLogprobs

from worker_svc.errors import DeviceLost, StepError, StepFailed, StepOutOfMemory
from worker_svc.runner.base import ModelRunner, Row, StepBatch, StepResult

_LONE_ROW_RETRIES = 2


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a step batch.

    When `failed`, nothing counts. Otherwise `rows` were computed, some perhaps in part, and
    `culprits` were left out because the step cannot run with them.
    """

    rows: tuple[Row, ...] = ()
    token_ids: Mapping[int, int] = field(default_factory=dict)
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    culprits: frozenset[int] = frozenset()
    errors: tuple[ReportedError, ...] = ()
    failed: bool = False


def execute(runner: ModelRunner, batch: StepBatch) -> Outcome:
    """Compute a batch.

    Out of memory: its halves are computed one after the other, down to single rows and shorter
    chunks. Culprits named by the runner: the others are computed without them. Any other failure
    fails the step.

    Raises:
        DeviceLost: the process cannot go on.
    """
    if not batch.rows:
        return Outcome()
    return _Execution(runner, batch).outcome()


class _Execution:
    """The attempts at one batch."""

    def __init__(self, runner: ModelRunner, batch: StepBatch) -> None:
        self._runner = runner
        self._batch = batch
        self._added = batch.added
        self._removed = batch.removed
        self._rows: list[Row] = []
        self._token_ids: dict[int, int] = {}
        self._logprobs: dict[int, TokenLogprobs] = {}
        self._errors: list[ReportedError] = []
        self._culprits: set[int] = set()
        self._starved: Counter[int] = Counter()
        """Rows of one token that ran out of memory all alone, and how often."""

    def outcome(self) -> Outcome:
        """Attempt the whole batch and return what came of it."""
        try:
            self._attempt(self._batch.rows)
        except StepError as error:
            self._note(error, error.handles)
            return Outcome(errors=tuple(self._errors), failed=True)
        return Outcome(
            tuple(self._rows), self._token_ids, self._logprobs, frozenset(self._culprits), tuple(self._errors)
        )

    def _attempt(self, rows: tuple[Row, ...]) -> None:
        """Compute these rows, in parts if need be.

        Raises:
            StepError: they fail and it is not known why.
        """
        if not rows:
            return
        try:
            result = self._runner.execute(self._part(rows))
        except DeviceLost:
            raise
        except (StepOutOfMemory, MemoryError) as error:
            self._shrink(rows, error)
        except StepError as error:
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
        missing = [row for row in rows if row.sample and row.sequence.handle not in token_ids]
        if missing:
            handles = tuple([row.sequence.handle for row in missing])
            self._leave_out(rows, StepFailed("the runner sampled no token", handles))
            return
        self._removed = ()
        if rows is not self._batch.rows:
            handles_done = {row.sequence.handle for row in rows}
            self._added = tuple([seq for seq in self._added if seq.handle not in handles_done])
        self._rows.extend(rows)
        self._token_ids.update(token_ids)
        self._logprobs.update(result.logprobs)

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

    def _leave_out(self, rows: tuple[Row, ...], error: StepError) -> None:
        """Go on without the culprits that the error names."""
        named = {row.sequence.handle for row in rows}.intersection(error.handles)
        if not named:
            raise error
        self._note(error, tuple(sorted(named)))
        self._culprits |= named
        self._attempt(tuple([row for row in rows if row.sequence.handle not in named]))

    def _note(self, error: StepError, handles: tuple[int, ...]) -> None:
        self._errors.append(ReportedError(handles, error.reason, str(error)))
