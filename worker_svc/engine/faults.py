"""Fault injection: which faults are in force and when they fire. Others perform what they mean."""

from __future__ import annotations

import enum
import random
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from octavo.sampling import SamplingParams

from worker_svc.errors import StepFailed, StepOutOfMemory
from worker_svc.kv.errors import OutOfBlocks
from worker_svc.runner.base import BlockCopy, CopyTicket, LoadedModel, ModelRunner, StepBatch, StepResult


class FaultKind(enum.IntEnum):
    """What goes wrong; as FaultKind in operations.proto."""

    ALLOCATION = 1
    STEP_OOM = 2
    STEP_ERROR = 3
    SLOW_STEP = 4
    HANG = 5
    STREAM_DROP = 6
    CRASH = 7
    LOST_REPORT = 8
    EVICTION_RACE = 9
    TIER_COPY = 10


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault to inject."""

    kind: FaultKind
    probability: float = 1.0
    """Per opportunity, in [0, 1]."""
    count: int | None = None
    """Times that it fires at most."""
    duration_s: float = 0.0
    """Of a slow step."""
    token_id: int | None = None
    """It fires only when this token is computed in the step."""


@dataclass(slots=True)
class _InForce:
    fault: Fault
    fires_left: int | None


class Faults:
    """The faults in force. Decisions are seeded, so that a run can be repeated."""

    def __init__(self, faults: Iterable[Fault] = (), seed: int = 0) -> None:
        self._random = random.Random(seed)  # noqa: S311  chance, not secrets
        self._in_force: dict[FaultKind, list[_InForce]] = {}
        self.set(faults)

    def set(self, faults: Iterable[Fault]) -> None:
        """Replace the faults in force."""
        in_force: dict[FaultKind, list[_InForce]] = {}
        for fault in faults:
            in_force.setdefault(fault.kind, []).append(_InForce(fault, fault.count))
        self._in_force = in_force

    def __bool__(self) -> bool:
        return bool(self._in_force)

    def draw(self, kind: FaultKind, token_ids: Collection[int] = ()) -> Fault | None:
        """Return the fault that strikes at this opportunity, if one does, and count it.

        `token_ids` are those that the step computes.
        """
        for entry in self._in_force.get(kind, ()):
            fault = entry.fault
            if entry.fires_left == 0 or (fault.token_id is not None and fault.token_id not in token_ids):
                continue
            if self._random.random() >= fault.probability:
                continue
            if entry.fires_left is not None:
                entry.fires_left -= 1
            return fault
        return None

    def draw_allocation(self) -> None:
        """Raise OutOfBlocks when an allocation is to fail."""
        if self._in_force and self.draw(FaultKind.ALLOCATION):
            raise OutOfBlocks(1, 0)


class FaultEffects(Protocol):
    """What faults do to a process; the shell has the real ones, tests have theirs."""

    def sleep(self, seconds: float) -> None:
        """Let time pass."""

    def hang(self) -> None:
        """Never come back."""

    def crash(self) -> None:
        """End the process at once."""


class FaultyRunner:
    """A model runner whose steps go wrong as the faults in force say."""

    def __init__(self, runner: ModelRunner, faults: Faults, effects: FaultEffects) -> None:
        self._runner = runner
        self._faults = faults
        self._effects = effects

    @property
    def info(self) -> LoadedModel:
        """As the runner's."""
        return self._runner.info

    def available_kv_bytes(self, utilization: float) -> int:
        """As the runner's."""
        return self._runner.available_kv_bytes(utilization)

    def allocate(self, num_blocks: int, block_size: int, num_host_blocks: int) -> None:
        """As the runner's."""
        self._runner.allocate(num_blocks, block_size, num_host_blocks)

    def supports(self, sampling: SamplingParams) -> str | None:
        """As the runner's."""
        return self._runner.supports(sampling)

    def execute(self, batch: StepBatch) -> StepResult:
        """Do what the faults that strike say, then compute the step if there is still one to compute.

        Each attempt at a step is an opportunity.
        """
        if self._faults:
            self._strike(batch)
        return self._runner.execute(batch)

    def copy_to_host(self, copies: Seq[BlockCopy]) -> None:
        """Copy as the runner does, unless a fault strikes: one opportunity, however many blocks."""
        self._check_copy()
        self._runner.copy_to_host(copies)

    def copy_to_device(self, copies: Seq[BlockCopy]) -> CopyTicket:
        """Copy as the runner does, unless a fault strikes: one opportunity, however many blocks."""
        self._check_copy()
        return self._runner.copy_to_device(copies)

    def close(self) -> None:
        """As the runner's."""
        self._runner.close()

    def _check_copy(self) -> None:
        if self._faults and self._faults.draw(FaultKind.TIER_COPY):
            raise StepFailed("copy between device and host failed (injected)")

    def _strike(self, batch: StepBatch) -> None:
        token_ids: set[int] = set()
        for row in batch.rows:
            token_ids.update(row.sequence.token_ids[row.start : row.start + row.num_tokens])
        faults = self._faults
        if faults.draw(FaultKind.CRASH, token_ids):
            self._effects.crash()
        if faults.draw(FaultKind.HANG, token_ids):
            self._effects.hang()
        slow = faults.draw(FaultKind.SLOW_STEP, token_ids)
        if slow:
            self._effects.sleep(slow.duration_s)
        if faults.draw(FaultKind.STEP_OOM, token_ids):
            raise StepOutOfMemory("out of memory (injected)")
        if faults.draw(FaultKind.STEP_ERROR, token_ids):
            raise StepFailed("step error (injected)")
