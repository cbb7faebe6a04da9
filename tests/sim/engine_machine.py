"""The worker's real engine in the simulator: both sides' own code, and no model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import replace

from octavo.protocol.steps import Geometry, Plan, Refused, RefuseReason, Report, StepStatus
from octavo.sampling import SamplingParams
from octavo_lab.sim import SimWorkerConfig
from octavo_lab.sim.tokens import stream_of, token_at
from octavo_lab.sim.worker import StepFault, WorkerCrashedError, no_fault

from scheduler_svc.core import WorkerInfo
from worker_svc.engine.engine import EngineConfig, WorkerEngine
from worker_svc.errors import DeviceLost, StepFailed
from worker_svc.runner.base import BlockCopy, SequenceData, StepBatch, StepResult


class _Ticket:
    """A copy that takes two looks to arrive."""

    def __init__(self) -> None:
        self._looks = 0

    def done(self) -> bool:
        self._looks += 1
        return self._looks > 1

    def elapsed_s(self) -> float:
        return 0.001


class _Runner:
    """Makes up tokens by position, in the time that the step-time model says."""

    def __init__(self, machine: EngineMachine) -> None:
        self._machine = machine

    def supports(self, sampling: SamplingParams) -> str | None:
        return None

    def execute(self, batch: StepBatch) -> StepResult:
        decodes = [row for row in batch.rows if row.sequence.prefill_done]
        prefills = [row for row in batch.rows if not row.sequence.prefill_done]
        self._machine.now += self._machine.config.step_times.seconds(
            len(decodes),
            sum(row.start + 1 for row in decodes),
            sum(row.num_tokens for row in prefills),
            sum(row.num_tokens * (row.num_tokens + 2 * row.start) for row in prefills),
        )
        seeds = {row.sequence.handle: row.sequence.sampling.seed or 0 for row in batch.rows}
        try:
            errors = self._machine.step_fault(frozenset(seeds.values()))
        except WorkerCrashedError as error:
            raise DeviceLost from error
        if errors:
            raise StepFailed(errors[0].message, tuple(h for h in errors[0].handles if h in seeds))
        tokens = {}
        for row in batch.rows:
            if row.sample:
                sequence = row.sequence
                position = row.start + row.num_tokens
                assert position == len(sequence.token_ids)
                stream = stream_of(sequence.sampling.seed or 0, sequence.choice)
                tokens[sequence.handle] = token_at(stream, position)
        return StepResult(tokens, {})

    def copy_to_host(self, copies: Seq[BlockCopy]) -> None:
        """Blocks have no contents here."""

    def copy_to_device(self, copies: Seq[BlockCopy]) -> _Ticket:
        return _Ticket()


class EngineMachine:
    """A `StepMachine` around the worker's engine, which audits itself after every step."""

    num_host_blocks = 24

    def __init__(self, config: SimWorkerConfig) -> None:
        self.config = config
        self.now = 0.0
        self.draining = False
        self.step_fault: StepFault = no_fault
        self.refuse_next = 0
        self.surprises: Counter[str] = Counter()
        self._incarnation = 0
        self.restart()

    def restart(self) -> None:
        self._incarnation += 1
        self.draining = False
        config = EngineConfig(
            block_size=self.config.block_size,
            num_blocks=self.config.num_blocks,
            max_num_seqs=self.config.max_num_seqs,
            max_model_len=self.config.max_model_len,
            num_host_blocks=self.num_host_blocks if self.config.paged else 0,
            paged=self.config.paged,
            check_integrity=True,
        )
        self.engine = WorkerEngine(_Runner(self), config)  # type: ignore[arg-type] # as much as the engine uses

    def welcome(self) -> WorkerInfo:
        self.engine.drop_all()
        device_keys, host_keys = self.engine.take_cached_keys()
        config = self.config
        geometry = Geometry(config.block_size, config.num_blocks, self.num_host_blocks, paged=config.paged)
        return WorkerInfo(
            worker_id=config.worker_id,
            incarnation=str(self._incarnation),
            model=config.model,
            geometry=geometry,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            pool=self.engine.pool_report(),
            device_keys=tuple(device_keys),
            host_keys=tuple(host_keys),
        )

    def cancel(self, handles: tuple[int, ...]) -> None:
        self.engine.cancel(handles)

    def run(self, plan: Plan, bubble_us: int = 0) -> Report:
        forced: list[Refused] = []
        if self.draining:
            forced = [Refused(admit.handle, RefuseReason.DRAINING) for admit in plan.admit]
        elif self.refuse_next and plan.admit:
            count = min(self.refuse_next, len(plan.admit))
            self.refuse_next -= count
            forced = [Refused(admit.handle, RefuseReason.NO_BLOCKS) for admit in plan.admit[:count]]
        offered = replace(plan, admit=plan.admit[len(forced) :])
        try:
            report = self.engine.run_step(offered, lambda: self.now)
        except DeviceLost as error:
            raise WorkerCrashedError from error
        if report.status is StepStatus.SKIPPED:
            # None of its admissions was looked at.
            self.refuse_next += 0 if self.draining else len(forced)
            forced = []
        self.surprises["refused"] += len(report.refused)
        timing = replace(report.timing, bubble_us=bubble_us)
        return replace(report, refused=(*forced, *report.refused), timing=timing)

    def has(self, seed: int, choice: int) -> bool:
        return any(s.sampling.seed == seed and s.choice == choice for s in self._sequences)

    def handles_of(self, seeds: frozenset[int]) -> tuple[int, ...]:
        return tuple(s.handle for s in self._sequences if s.sampling.seed in seeds)

    @property
    def num_seqs(self) -> int:
        return self.engine.num_live

    @property
    def _sequences(self) -> list[SequenceData]:
        return [live.sequence for live in self.engine._running.states.values()]

    @property
    def quiet(self) -> bool:
        pool = self.engine.pool_report()
        return self.engine.num_live == 0 and pool.active == 0
