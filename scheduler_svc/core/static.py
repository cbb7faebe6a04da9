"""Static batching, the control arm: length buckets, fill or timeout, one batch in, one batch out.

Every member reserves room for its prompt and max_tokens in one run of blocks; prompts are computed
whole in the first step; rows that have finished are held, and computed, until the whole batch ends.
"""

from __future__ import annotations

import bisect

from octavo.protocol.steps import Admit

from scheduler_svc.core.config import CoreConfig, StaticConfig
from scheduler_svc.core.effects import Effect
from scheduler_svc.core.fleet import ModelPool
from scheduler_svc.core.planning import Draft, Explain
from scheduler_svc.core.request import Sequence, Status
from scheduler_svc.core.worker import WorkerState


class StaticPlanner:
    """Plans the steps of the workers of one model, a batch at a time."""

    def __init__(self, config: CoreConfig, pool: ModelPool, explain: Explain | None = None) -> None:
        assert config.static is not None
        self._static: StaticConfig = config.static
        self._pool = pool
        self.explain = explain

    def plan(self, worker: WorkerState, now: float, out: list[Effect]) -> Draft | None:
        """Return a draft for the worker's next step, or None when no batch is ready."""
        draft = Draft(worker, worker.next_step, worker.token_budget, worker.available_blocks())
        if worker.sequences:
            return self._go_on(worker, draft)
        batch = [] if worker.draining else self._ready_batch(now)
        for sequence in batch:
            self._admit(draft, sequence, now)
        return draft if draft.admitted else None

    def wake_at(self, worker: WorkerState, now: float) -> float | None:
        """Return when a bucket that is not full times out."""
        if worker.sequences or worker.draining:
            return None
        heads = (members[0].request.arrival for members in self._buckets(now).values())
        return min((arrival + self._static.timeout_s for arrival in heads), default=None)

    def _go_on(self, worker: WorkerState, draft: Draft) -> Draft | None:
        """Decode until the last row has finished, then give the whole batch back at once."""
        if worker.decoding or worker.prefilling:
            draft.decodes = len(worker.decoding)
            return draft
        coming = {sequence for flight in worker.in_flight for sequence in flight.released}
        draft.released = [s for s in worker.sequences.values() if s not in coming]
        return draft if draft.released else None

    def _buckets(self, now: float) -> dict[int, list[Sequence]]:
        """Return the waiting by length bucket, in queue order."""
        buckets: dict[int, list[Sequence]] = {}
        for sequence in self._pool.queue.order(now):
            bucket = bisect.bisect_left(self._static.bucket_bounds, sequence.num_tokens)
            buckets.setdefault(bucket, []).append(sequence)
        return buckets

    def _ready_batch(self, now: float) -> list[Sequence]:
        """Return the batch of the bucket that is full or has timed out, the longest waiting first."""
        ready = [
            members
            for members in self._buckets(now).values()
            if len(members) >= self._static.batch_size
            or now - members[0].request.arrival >= self._static.timeout_s
        ]
        if not ready:
            return []
        return min(ready, key=lambda members: members[0].request.arrival)[: self._static.batch_size]

    def _admit(self, draft: Draft, sequence: Sequence, now: float) -> None:
        worker, request = draft.worker, sequence.request
        reserved = request.max_total_tokens
        blocks = worker.blocks_for(reserved)
        if blocks > draft.available or len(draft.admitted) >= worker.max_num_seqs:
            if self.explain is not None:
                self.explain(sequence, worker, "blocks", {"needed": blocks, "available": draft.available})
            return
        self._pool.queue.start(sequence)
        sequence.transition(Status.RUNNING)
        worker.admit(sequence, draft.step)
        if sequence.started_at is None:
            sequence.started_at = now
        request.started = True
        draft.admit.append(
            Admit(
                handle=sequence.handle,
                token_ids=tuple(sequence.token_ids),
                prompt_len=sequence.prompt_len,
                sampling=request.spec.sampling,
                choice=sequence.choice,
                reserve_tokens=reserved,
                hold_after_finish=self._static.hold_finished,
                priority=request.priority,
            )
        )
        draft.admitted.append(sequence)
        draft.take_blocks(blocks)
        draft.compute(sequence, sequence.num_tokens)
