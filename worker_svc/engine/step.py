"""What comes of the plan in hand, collected for its report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

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

from worker_svc.kv.memory import KvMemory
from worker_svc.runner.base import Row, Sequence

_US_PER_S = 1e6


class StepTimes:
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
class Step:
    """The step of one plan, from its beginning to its report."""

    number: int
    status: StepStatus = StepStatus.OK
    rows: list[Row] = field(default_factory=list)
    added: list[Sequence] = field(default_factory=list)
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
    errors: tuple[ReportedError, ...] = ()

    def take_logprobs(self, logprobs: Mapping[int, TokenLogprobs]) -> None:
        """Keep those of tokens that are reported."""
        for handle in self.token_handles if logprobs else ():
            if handle in logprobs:
                self.logprobs[handle] = (logprobs[handle],)

    def report(self, memory: KvMemory, pool: PoolReport, live: tuple[int, int], times: StepTimes) -> Report:
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
