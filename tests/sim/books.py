"""A core that checks each charge against what the workers report, by books of its own."""

from __future__ import annotations

from collections import Counter

from octavo.protocol.steps import Report

from scheduler_svc.core import ChargeTenant, CoreConfig, Effect, EmitTokens, SchedulerCore
from scheduler_svc.core.model import ModelScheduler
from scheduler_svc.core.request import Sequence


class AuditedCore(SchedulerCore):
    """Each token of a choice is charged once: prompt and resumed ones when computed, others as they come."""

    def __init__(self, config: CoreConfig) -> None:
        super().__init__(config)
        self.computed: Counter[str] = Counter()
        """Prefill and output tokens of all reports, by tenant; what was computed anew included."""
        self.charged: Counter[str] = Counter()
        self.fair: Counter[str] = Counter()
        """What fairness was told."""
        self.anew = 0
        """Of the computed ones, those that had been paid for, or that a cache had had before."""
        self._covered: dict[Sequence, int] = {}
        self._at: dict[tuple[str, int], int] = {}

    def report(self, worker_id: str, report: Report, now: float) -> list[Effect]:
        expected = self._expect(worker_id, report)
        out = super().report(worker_id, report, now)
        charged: Counter[str] = Counter()
        for effect in out:
            if isinstance(effect, ChargeTenant):
                charged[effect.tenant] += effect.prompt_tokens + effect.output_tokens
            elif isinstance(effect, EmitTokens):
                for delta in effect.deltas:
                    charged[self._tenants[delta.request_id]] += len(delta.token_ids)
        assert charged == expected, (charged, expected)
        self.charged += charged
        return out

    def check_ended(self) -> None:
        """Nothing is live any more."""
        assert self.computed.total() - self.anew == self.charged.total()
        if self.config.policy == "fair":
            assert +self.fair == self.charged

    def _expect(self, worker_id: str, report: Report) -> Counter[str]:
        worker = self._workers.get(worker_id)
        expected: Counter[str] = Counter()
        if worker is None or not worker.pipeline.in_flight:
            return expected
        if worker.pipeline.in_flight[0].plan.step != report.step:
            return expected
        sequences = worker.sequences
        self._tenants = {s.request_id: s.request.tenant for s in sequences.values()}
        for entry in report.admitted:
            if (sequence := sequences.get(entry.handle)) is not None:
                cached = entry.cached_tokens + entry.host_cached_tokens
                self._at[worker_id, entry.handle] = cached
                self._cover(sequence, cached)
        for handle, tokens in report.prefilled:
            if (sequence := sequences.get(handle)) is not None:
                end = self._at[worker_id, handle] = self._at[worker_id, handle] + tokens
                new = self._cover(sequence, end)
                self.anew += tokens - new
                self._pay(sequence, new, expected)
                self.computed[sequence.request.tenant] += tokens
        counts = report.token_counts or (1,) * len(report.token_handles)
        for handle, count in zip(report.token_handles, counts, strict=True):
            if (sequence := sequences.get(handle)) is not None:
                self._pay(sequence, count, expected)
                self.computed[sequence.request.tenant] += count
        return expected

    def _cover(self, sequence: Sequence, end: int) -> int:
        if not sequence.untried:
            return 0
        start = self._covered.get(sequence, 0)
        self._covered[sequence] = max(start, end)
        return max(0, end - start)

    @staticmethod
    def _pay(sequence: Sequence, tokens: int, expected: Counter[str]) -> None:
        if tokens:
            expected[sequence.request.tenant] += tokens

    def _model(self, name: str) -> ModelScheduler:
        known = name in self._models
        model = super()._model(name)
        if not known:
            charges = model.pool.charges
            charge = charges.charge

            def spy(tenant: str, tokens: float) -> None:
                self.fair[tenant] += int(tokens)
                charge(tenant, tokens)

            charges.charge = spy  # type: ignore[method-assign]  # a spy
        return model
