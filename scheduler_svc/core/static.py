"""Static batching, the control arm: length buckets, fill or timeout, one batch in, one batch out.

Every member reserves room for its prompt and max_tokens in one run of blocks; prompts are computed
whole in the first step; rows that have finished are held, and computed, until the whole batch ends.
"""

from __future__ import annotations

import bisect

from scheduler_svc.core.config import CoreConfig, StaticConfig
from scheduler_svc.core.fleet import ModelPool
from scheduler_svc.core.plan_builder import PlanBuilder
from scheduler_svc.core.planning import Explain
from scheduler_svc.core.request import Sequence
from scheduler_svc.core.worker import WorkerState


class StaticPlanner:
    """Plans the steps of the workers of one model, a batch at a time."""

    def __init__(self, config: CoreConfig, pool: ModelPool, explain: Explain | None = None) -> None:
        assert config.static is not None
        self._static: StaticConfig = config.static
        self._pool = pool
        self.explain = explain

    def plan(self, worker: WorkerState, now: float) -> PlanBuilder | None:
        """Return the plan of the worker's next step, or None when no batch is ready."""
        builder = PlanBuilder.for_next_step(worker)
        if worker.sequences:
            return self._go_on(worker, builder)
        if not worker.draining and now >= worker.backoff.admits_after:
            for sequence in self._ready_batch(worker, now, builder.turns):
                self._admit(builder, sequence, now)
        if builder.admitted:
            return builder
        worker.pipeline.pending_seals.clear()
        return None

    def wake_at(self, worker: WorkerState, now: float) -> float | None:
        """Return when a bucket that is not full times out, or when a worker that refused may be asked."""
        if worker.sequences or worker.draining or not len(self._pool.queue):
            return None
        if now < worker.backoff.admits_after:
            return worker.backoff.admits_after
        heads = (members[0].request.arrival for members in self._buckets(worker, now).values())
        timeouts = (arrival + self._static.timeout_s for arrival in heads)
        return min((at for at in timeouts if at > now), default=None)

    def _go_on(self, worker: WorkerState, builder: PlanBuilder) -> PlanBuilder | None:
        """Decode until the last row has finished, then give the whole batch back at once."""
        if worker.decoding or worker.prefilling:
            builder.decodes = len(worker.decoding)
            for sequence in worker.prefilling.values():
                if sequence.left_to_plan > 0:
                    builder.compute(sequence, sequence.left_to_plan)
            return builder
        coming = {handle for flight in worker.pipeline.in_flight for handle in flight.plan.release}
        for handle, sequence in worker.sequences.items():
            if handle not in coming:
                builder.release(sequence)
        return builder if builder.released or not worker.pipeline.in_flight else None

    def _buckets(
        self, worker: WorkerState, now: float, turns: set[Sequence] | None = None
    ) -> dict[int, list[Sequence]]:
        """Return the waiting that a worker can hold by length bucket, in queue order."""
        buckets: dict[int, list[Sequence]] = {}
        for sequence in self._pool.queue.order(now, turns):
            if self._pool.can_hold(worker, sequence) and not sequence.request.is_late(now):
                bucket = bisect.bisect_left(self._static.bucket_bounds, sequence.num_tokens)
                buckets.setdefault(bucket, []).append(sequence)
        return buckets

    def _ready_batch(self, worker: WorkerState, now: float, turns: set[Sequence]) -> list[Sequence]:
        """Return the batch of the bucket that is full or has timed out, the longest waiting first.

        A sequence under which a worker died is a batch by itself.
        """
        ready = [
            members
            for members in self._buckets(worker, now, turns).values()
            if len(members) >= self._static.batch_size
            or now >= members[0].request.arrival + self._static.timeout_s
        ]
        if not ready:
            return []
        members = min(ready, key=lambda members: members[0].request.arrival)
        if members[0].suspect:
            return members[:1]
        return [sequence for sequence in members if not sequence.suspect][: self._static.batch_size]

    def _admit(self, builder: PlanBuilder, sequence: Sequence, now: float) -> None:
        worker = builder.worker
        reserved = sequence.request.max_total_tokens
        blocks = worker.blocks.needed_for(reserved)
        if blocks > builder.available or worker.num_seqs >= worker.max_num_seqs:
            if self.explain is not None:
                self.explain(sequence, worker, "blocks", {"needed": blocks, "available": builder.available})
            return
        self._pool.queue.start(sequence, on_turn=sequence in builder.turns)
        builder.take_in(sequence, now, reserve_tokens=reserved, hold_after_finish=self._static.hold_finished)
        builder.take_blocks(blocks)
        builder.compute(sequence, sequence.num_tokens)
