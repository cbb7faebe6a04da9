"""Continuous batching: the plan of one worker's next step.

Decodes first, then running prefills in chunks, then admissions, under the token budget, the places
and the blocks that no plan in flight may take. Cost grows with what changes, not with what runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.effects import LogEvent
from scheduler_svc.core.fleet import ModelPool
from scheduler_svc.core.plan_builder import MAX_ADMIT_BYTES, PlanBuilder
from scheduler_svc.core.request import Sequence, SequenceStatus
from scheduler_svc.core.sharing import Claim, Shares
from scheduler_svc.core.worker import WorkerState

_BEST_CASE = 0.8
"""Share of its predicted time that a first token takes at least."""
_LONG_STEP = 8.0
"""A prompt that takes several steps adds to each at most so many times what the shortest one costs."""
_TRIAL_WAIT_S = 5.0
"""A suspect that may run beside nobody leaves workers to others so long: one may come back, or be done."""
Explain = Callable[[Sequence, WorkerState, str, dict[str, object]], None]
"""Called for each waiting sequence that a plan passes over, with the reason and its figures."""


class ContinuousPlanner:
    """Plans the steps of the workers of one model."""

    def __init__(self, config: CoreConfig, pool: ModelPool, explain: Explain | None = None) -> None:
        self._config = config
        self._pool = pool
        self.explain = explain

    def plan(self, worker: WorkerState, now: float) -> PlanBuilder | None:
        """Return the plan of the worker's next step, or None when there is nothing to do."""
        builder = PlanBuilder.for_next_step(worker)
        if now >= worker.moves_at:
            self._move(builder, now)
        self._decode(builder)
        admits = len(self._pool.queue) and not worker.draining and now >= worker.backoff.admits_after
        first = self._next_in_reach(now, builder, set()) if admits else []
        self._prefill(builder, first)
        if first:
            self._admit_waiting(builder, first, now)
            if self._config.chunked_prefill:
                self._use_up(builder)
        if worker.sequences:
            # Also when all are cancelled: without one more report their blocks would seem taken for good.
            return builder
        worker.pipeline.pending_seals.clear()
        return None

    def wake_at(self, worker: WorkerState, now: float) -> float | None:
        """Return when a worker that refused what was offered may be offered something again."""
        waits = len(self._pool.queue) and not worker.draining and now < worker.backoff.admits_after
        return worker.backoff.admits_after if waits else None

    def _move(self, builder: PlanBuilder, now: float) -> None:
        """Take off a draining worker what others have room for; the rest goes on until they have.

        One per worker at a time, so that none waits for the prefills of the others.
        """
        worker, taken = builder.worker, set[str]()
        if self._pool.queue.num_servable or any(flight.plan.release for flight in worker.pipeline.in_flight):
            return
        for sequence in [*worker.decoding.values(), *worker.prefilling.values()]:
            other = self._pool.best(sequence, now)
            if other is None or other.worker_id in taken:
                return
            taken.add(other.worker_id)
            sequence.history.recoveries += 1
            builder.release(sequence)
            sequence.transition(SequenceStatus.RELEASING)

    def _decode(self, builder: PlanBuilder) -> None:
        """All decodes run; blocks for their growth come from preemption when there are none left."""
        worker = builder.worker
        of_cancelled: int | None = None
        while (growth := worker.growth_in(builder.step)) > (
            builder.available + builder.blocks_coming + worker.blocks.coming + (of_cancelled or 0)
        ):
            if of_cancelled is None:
                # Nobody is preempted while the blocks of cancelled sequences suffice.
                of_cancelled = worker.blocks_of_cancelled()
                continue
            victim = self._victim(worker)
            if victim is None:
                break
            self._preempt(builder, victim)
        builder.take_blocks(growth)
        completing = sum(1 for sequence in worker.prefilling.values() if sequence.left_to_plan <= 0)
        builder.decodes = len(worker.decoding) + completing
        builder.budget -= builder.decodes

    def _prefill(self, builder: PlanBuilder, waiting: list[Sequence]) -> None:
        """Go on with the prefills that run, and keep their share for the first of those that wait."""
        if not waiting and not builder.worker.prefilling:
            return
        builder.budget = min(builder.budget, self._prefill_cap(builder))
        running = self._running(builder)
        if self._config.chunked_prefill:
            builder.shares = Shares(builder.budget)
            places = builder.worker.max_num_seqs - builder.worker.num_seqs
            soon = waiting[: min(places, self._config.lookahead + 1)]
            given = builder.shares.deal(
                running, [self._claim(builder, s, self._todo(builder, s)) for s in soon]
            )
        else:
            given = {claim.sequence: claim.left for claim in running}
        for sequence, tokens in given.items():
            builder.compute(sequence, tokens)

    def _use_up(self, builder: PlanBuilder) -> None:
        """Give what the waiting have left to the prefills that run."""
        for sequence, tokens in builder.shares.rest(self._running(builder)).items():
            builder.compute(sequence, tokens)

    def _running(self, builder: PlanBuilder) -> list[Claim]:
        prefilling = builder.worker.prefilling.values()
        return [self._claim(builder, s, left) for s in prefilling if (left := s.left_to_plan) > 0]

    def _todo(self, builder: PlanBuilder, sequence: Sequence) -> int:
        """Return the tokens that a waiting sequence would have to compute on the worker."""
        return sequence.num_tokens - self._pool.cached_tokens(builder.worker, sequence)

    def _claim(self, builder: PlanBuilder, sequence: Sequence, left: int) -> Claim:
        """Return what a prompt could use. One that takes several steps makes none of them long."""
        worker = builder.worker
        start = sequence.num_tokens - left
        least_s = worker.pace.least_step_s
        if sequence.num_tokens <= worker.token_budget or least_s == math.inf:
            return Claim(sequence, left)
        times = worker.pace.step_times
        seconds = times.predict(builder.decodes, 0, worker.context_tokens) + _LONG_STEP * least_s
        seconds = min(seconds, self._config.target_itl_s or seconds)
        chunk = times.prefill_tokens_within(seconds, builder.decodes, worker.context_tokens, start)
        return Claim(sequence, left, max(worker.block_size, chunk))

    def _prefill_cap(self, builder: PlanBuilder) -> int:
        """Latency-critical mode: prefill tokens that keep the step near its target time.

        At least one block's worth, or prompts would never get done.
        """
        target = self._config.target_itl_s
        worker = builder.worker
        if target is None or not builder.decodes:
            return builder.budget
        seconds = target * worker.pace.prefill_cap_factor
        within = worker.pace.step_times.prefill_tokens_within(seconds, builder.decodes, worker.context_tokens)
        return max(worker.block_size, within)

    def _admit_waiting(self, builder: PlanBuilder, first: list[Sequence], now: float) -> None:
        """Admit in queue order; past what does not fit, look a bounded number further."""
        misses, worker = 0, builder.worker
        for sequence in self._in_reach(now, builder, first):
            verdict = self._try_admit(builder, sequence, now)
            if verdict is None:
                continue
            builder.shares.forgo(sequence)
            reason, figures = verdict
            if self.explain is not None:
                self.explain(sequence, worker, reason, figures)
            if reason == "better_worker":
                builder.num_deferred += 1
                continue
            if reason in {"blocks", "max_num_seqs"} and misses == 0:
                self._make_room(builder, sequence, now)
            if reason in {"max_num_seqs", "token_budget", "plan_bytes"}:
                return
            if reason == "isolated" and sequence.suspect:
                if self._insists(worker, sequence, now):
                    return
                # Suspects that wait for others to be tried take no place in the search.
                builder.num_deferred += 1
                continue
            if reason == "blocks":
                if sequence.waiting.blocked_since is None:
                    sequence.waiting.blocked_since = now
                if now - sequence.waiting.blocked_since >= self._config.lookahead_age_s:
                    return
            misses += 1
            if misses > self._config.lookahead:
                return

    def _insists(self, worker: WorkerState, sequence: Sequence, now: float) -> bool:
        """Return whether this worker is to be emptied for a suspect that has waited for one long enough."""
        return now - sequence.deaths.last_at >= _TRIAL_WAIT_S and worker is min(
            self._pool.workers.values(), key=lambda other: (other.draining, other.num_seqs)
        )

    def _in_reach(self, now: float, builder: PlanBuilder, some: list[Sequence]) -> Iterator[Sequence]:
        """Yield the waiting that this plan may consider, best first; the queue may change meanwhile.

        Whoever is left to a better worker takes no place, so then as many others are asked again.
        """
        asked: set[Sequence] = set()
        while some:
            num_deferred = builder.num_deferred
            asked.update(some)
            yield from some
            some = self._next_in_reach(now, builder, asked) if num_deferred != builder.num_deferred else []

    def _next_in_reach(self, now: float, builder: PlanBuilder, asked: set[Sequence]) -> list[Sequence]:
        """Return as many as could matter of those not asked: not what is late, nor what never fits."""
        worker = builder.worker
        places = worker.max_num_seqs - worker.num_seqs
        # Where nobody can be admitted, the first is told so and nobody else is asked.
        reach = places + self._config.lookahead + 1 if places > 0 and builder.budget > 0 else 1
        found: list[Sequence] = []
        for sequence in self._pool.queue.order(now, builder.turns):
            if sequence in asked or sequence.request.is_late(now) or self._is_hopeless(worker, sequence, now):
                continue
            if not self._pool.can_hold(worker, sequence):
                if self.explain is not None:
                    self.explain(sequence, worker, *self._never_fits(worker, sequence))
                continue
            found.append(sequence)
            if len(found) == reach:
                break
        return found

    def _never_fits(self, worker: WorkerState, sequence: Sequence) -> tuple[str, dict[str, object]]:
        if self._pool.has_adapter(worker, sequence):
            return "too_big_for_worker", {"max_model_len": worker.info.max_model_len}
        return "no_adapter", {"adapter": sequence.request.spec.adapter}

    def _is_hopeless(self, worker: WorkerState, sequence: Sequence, now: float) -> bool:
        """Return whether a first token before its deadline is out of the question on a busy worker."""
        request = sequence.request
        if self._config.overload is None or request.got_token or not worker.busy:
            return False
        spec = request.spec
        at = min((d for d in (spec.ttft_deadline, spec.deadline) if d is not None), default=None)
        if at is None:
            return False
        seconds = _BEST_CASE * self._pool.first_token_s(worker, sequence, now)
        if now + seconds <= at:
            return False
        if self.explain is not None:
            self.explain(sequence, worker, "too_late", {"predicted_s": seconds, "left_s": at - now})
        return True

    def _try_admit(
        self, builder: PlanBuilder, sequence: Sequence, now: float
    ) -> tuple[str, dict[str, object]] | None:
        """Admit a sequence, or return why not. The reasons are those of `octavo replay --explain`."""
        worker = builder.worker
        if worker.num_seqs >= worker.max_num_seqs:
            return "max_num_seqs", {"running": worker.num_seqs, "max_num_seqs": worker.max_num_seqs}
        if builder.budget <= 0:
            return "token_budget", {"left": builder.budget, "token_budget": worker.token_budget}
        if builder.admit_bytes >= MAX_ADMIT_BYTES:
            return "plan_bytes", {"bytes": builder.admit_bytes, "max_bytes": MAX_ADMIT_BYTES}
        if not worker.may_join(sequence):
            return "isolated", {"deaths": sequence.deaths.count}
        better = self._pool.better_elsewhere(worker, sequence, now)
        if better is not None:
            sequence.note_better(better.worth_until)
            self._pool.defer(sequence, better.worker)
            return "better_worker", {"worker": better.worker.worker_id}
        cached = self._pool.cached_tokens(worker, sequence)
        todo = sequence.num_tokens - cached
        blocks = worker.blocks.needed_to_admit(sequence)
        shared = 0
        if cached and sequence.waiting.trust_hits:
            shared = min(worker.blocks.active_hits(sequence.keys), cached // worker.block_size)
            blocks -= shared
        spare = int(self._config.watermark * worker.info.geometry.num_blocks) if worker.busy else 0
        if blocks + spare > builder.available:
            return "blocks", {"needed": blocks, "watermark": spare, "available": builder.available}
        tokens = self._first_chunk(builder, sequence, todo)
        if tokens == 0:
            return "max_partial_prefills" if self._config.chunked_prefill else "token_budget", {"todo": todo}
        builder.shared_keys.update(sequence.keys[:shared])
        self._admit(builder, sequence, (todo, tokens, blocks), now)
        return None

    def _first_chunk(self, builder: PlanBuilder, sequence: Sequence, todo: int) -> int:
        """Return how many tokens of a new prefill this step may compute; 0: it has to wait."""
        if not self._config.chunked_prefill:
            # Longer than what decodes leave: it will get the step for itself.
            return todo if todo <= builder.budget or not builder.prefill else 0
        claim = self._claim(builder, sequence, todo)
        tokens = builder.shares.take(claim)
        partial = sum(
            s.left_to_plan > 0 and s.request.priority <= sequence.request.priority
            for s in builder.worker.prefilling.values()
        )
        if tokens < todo and partial >= self._config.max_partial_prefills:
            builder.shares.put_back(claim, tokens)
            return 0
        return tokens

    def _admit(
        self, builder: PlanBuilder, sequence: Sequence, need: tuple[int, int, int], now: float
    ) -> None:
        todo, tokens, blocks = need
        self._pool.queue.start(sequence, on_turn=sequence in builder.turns)
        if tokens > builder.budget:
            builder.skip_decodes()
        builder.take_in(sequence, now)
        sequence.binding.num_believed_tokens = sequence.num_tokens - todo
        builder.take_blocks(blocks)
        builder.compute(sequence, tokens)
        # Charged at once, so that plans made before the report do not all favour the same tenant.
        owed = sequence.binding.num_charged_tokens = min(todo, sequence.num_unpaid_tokens)
        self._pool.charges.charge(sequence.request.tenant, owed)

    def _victim(self, worker: WorkerState, below: int | None = None) -> Sequence | None:
        """Return whom to preempt: lowest class, then admitted last, then with the least work lost.

        Never the one that would be the last victim: somebody always gets done. With `below`, only
        from lower classes than that, and nobody who is protected.
        """
        running = [*worker.decoding.values(), *worker.prefilling.values()]
        if len(running) < 2 and below is None:
            return None
        ranked = sorted(running, key=_victim_rank)
        candidates = ranked[1:] if below is None else [s for s in ranked if s.request.priority > below]
        open_to_it = [s for s in candidates if s.history.preemptions < self._config.max_preemptions]
        if open_to_it:
            return open_to_it[-1]
        return candidates[-1] if candidates and below is None else None

    def _preempt(self, builder: PlanBuilder, victim: Sequence) -> None:
        worker = builder.worker
        victim.history.preemptions += 1
        to_recompute = _tokens_to_recompute(worker, victim)
        blocks = builder.release(victim)
        victim.transition(SequenceStatus.RELEASING)
        builder.events.append(
            LogEvent(
                "sequence_preempted",
                {
                    "request_id": victim.request.request_id,
                    "choice": victim.choice,
                    "worker_id": worker.worker_id,
                    "step": builder.step,
                    "blocks": blocks,
                    "tokens_to_recompute": to_recompute,
                    "preemptions": victim.history.preemptions,
                },
            )
        )

    def _make_room(self, builder: PlanBuilder, head: Sequence, now: float) -> None:
        """Preempt one of a lower class for the first in the queue, unless there is room without that."""
        worker = builder.worker
        freed = builder.released or worker.cancelled or any(f.plan.release for f in worker.pipeline.in_flight)
        if freed or builder.admitted or self._pool.best(head, now) is not None:
            return
        victim = self._victim(worker, below=head.request.priority)
        if victim is not None:
            self._preempt(builder, victim)


def _tokens_to_recompute(worker: WorkerState, sequence: Sequence) -> int:
    """Return what is left to compute if the cache keeps the full blocks that the sequence has published."""
    if not worker.info.geometry.paged:
        return sequence.num_tokens
    decodes = sequence.binding.handle in worker.decoding
    computed = sequence.num_tokens - 1 if decodes else sequence.binding.num_computed_tokens
    return sequence.num_tokens - min(len(sequence.keys), computed // worker.block_size) * worker.block_size


def _victim_rank(sequence: Sequence) -> tuple[int, int, int]:
    """Order of preemption; the last is the victim."""
    return (sequence.request.priority, sequence.binding.admitted_step, -sequence.num_tokens)
