"""Continuous batching: the plan of one worker's next step.

Decodes first, then running prefills in chunks, then admissions, under the token budget, the places
and the blocks that no plan in flight may take. Cost grows with what changes, not with what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from octavo.protocol.steps import Admit, Plan

from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.effects import Effect, LogEvent
from scheduler_svc.core.fleet import ModelPool
from scheduler_svc.core.request import Sequence, Status
from scheduler_svc.core.worker import InFlight, WorkerState

_BEST_CASE = 0.8
"""Share of its predicted time that a first token takes at least."""
Explain = Callable[[Sequence, WorkerState, str, dict[str, object]], None]
"""Called for each waiting sequence that a plan passes over, with the reason and its figures."""


@dataclass(slots=True)
class Draft:
    """A plan in the making."""

    worker: WorkerState
    step: int
    budget: int
    """Tokens that may still be computed in this step."""
    available: int
    """Blocks that may still be taken in this step; those that it releases come later."""
    admits: list[Admit] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    num_left: int = 0
    """Waiting sequences that are left to better workers."""
    prefill: list[tuple[int, int]] = field(default_factory=list)
    skip: list[int] = field(default_factory=list)
    released: list[Sequence] = field(default_factory=list)
    blocks: int = 0
    shared_keys: set[bytes] = field(default_factory=set)
    blocks_coming: int = 0
    """Blocks that its releases give back."""
    decodes: int = 0
    prefill_tokens: int = 0

    def take_blocks(self, blocks: int) -> None:
        """Reserve blocks for this step."""
        self.blocks += blocks
        self.available -= blocks

    def skip_decodes(self) -> None:
        """Let all decodes sit this step out."""
        for handle, sequence in self.worker.decoding.items():
            self.skip.append(handle)
            self.worker.delay_growth(sequence)
        self.decodes = 0

    def compute(self, sequence: Sequence, tokens: int) -> None:
        """Add prefill tokens of an admitted sequence."""
        self.prefill.append((sequence.handle, tokens))
        sequence.num_planned_tokens += tokens
        self.prefill_tokens += tokens
        self.budget -= tokens

    def take_in(
        self,
        sequence: Sequence,
        now: float,
        *,
        reserve_tokens: int | None = None,
        hold_after_finish: bool = False,
    ) -> None:
        """Bind a waiting sequence to the worker from this step on."""
        sequence.transition(Status.RUNNING)
        self.worker.admit(sequence, self.step)
        if sequence.started_at is None:
            sequence.started_at = now
        sequence.request.started = True
        spec = sequence.request.spec
        self.admits.append(
            Admit(
                handle=sequence.handle,
                token_ids=tuple(sequence.token_ids),
                prompt_len=sequence.prompt_len,
                sampling=spec.sampling,
                choice=sequence.choice,
                keys=tuple(sequence.keys),
                reserve_tokens=reserve_tokens,
                hold_after_finish=hold_after_finish,
                priority=spec.priority,
                adapter=spec.adapter,
            )
        )
        self.admitted.append(sequence)

    def release(self, sequence: Sequence) -> int:
        """Take a sequence off the worker in this step; return the blocks that this gives back."""
        blocks = self.worker.blocks_won(sequence)
        self.worker.stop(sequence)
        self.released.append(sequence)
        self.blocks_coming += blocks
        return blocks

    def finish(self, now: float) -> InFlight:
        """Return the plan, entered into the worker's books."""
        worker = self.worker
        plan = Plan(
            step=self.step,
            admit=tuple(self.admits),
            prefill=tuple(self.prefill),
            skip=tuple(self.skip),
            seal=tuple(worker.pending_seals),
            release=tuple(sequence.handle for sequence in self.released),
            resume_after=worker.resume_after,
        )
        worker.resume_after = None
        worker.pending_seals.clear()
        flight = InFlight(
            plan=plan,
            sent_at=now,
            blocks=self.blocks,
            shared_keys=self.shared_keys,
            blocks_coming=self.blocks_coming,
            decodes=self.decodes,
            prefill_tokens=self.prefill_tokens,
            admitted=self.admitted,
        )
        worker.blocks_coming += flight.blocks_coming
        worker.in_flight.append(flight)
        worker.next_step = self.step + 1
        return flight


class ContinuousPlanner:
    """Plans the steps of the workers of one model."""

    def __init__(self, config: CoreConfig, pool: ModelPool, explain: Explain | None = None) -> None:
        self._config = config
        self._pool = pool
        self.explain = explain

    def plan(self, worker: WorkerState, now: float, out: list[Effect]) -> Draft | None:
        """Return a draft for the worker's next step, or None when there is nothing to do."""
        draft = Draft(worker, worker.next_step, worker.token_budget, worker.available_blocks())
        self._decode(draft, out)
        self._prefill(draft)
        if len(self._pool.queue) and not worker.draining and now >= worker.admits_after:
            self._admit_waiting(draft, now, out)
        if worker.sequences:
            # Also when all are cancelled: without one more report their blocks would seem taken for good.
            return draft
        worker.pending_seals.clear()
        return None

    def wake_at(self, worker: WorkerState, now: float) -> float | None:
        """Return when a worker that refused what was offered may be offered something again."""
        waits = len(self._pool.queue) and not worker.draining and now < worker.admits_after
        return worker.admits_after if waits else None

    def _decode(self, draft: Draft, out: list[Effect]) -> None:
        """All decodes run; blocks for their growth come from preemption when there are none left."""
        worker = draft.worker
        owed: int | None = None
        while (growth := worker.growth_in(draft.step)) > (
            draft.available + draft.blocks_coming + worker.blocks_coming + (owed or 0)
        ):
            if owed is None:
                # Nobody is preempted for what cancels on their way bring; else they do not matter.
                owed = worker.blocks_owed()
                continue
            victim = self._victim(worker)
            if victim is None:
                break
            self._preempt(draft, victim, out)
        draft.take_blocks(growth)
        completing = sum(1 for sequence in worker.prefilling.values() if sequence.left_to_plan <= 0)
        draft.decodes = len(worker.decoding) + completing
        draft.budget -= draft.decodes

    def _prefill(self, draft: Draft) -> None:
        """Go on with the prefills that run, in the order of their admission."""
        draft.budget = min(draft.budget, self._prefill_cap(draft))
        for sequence in draft.worker.prefilling.values():
            left = sequence.left_to_plan
            if left > 0 and (draft.budget > 0 or not self._config.chunked_prefill):
                draft.compute(sequence, min(left, draft.budget) if self._config.chunked_prefill else left)

    def _prefill_cap(self, draft: Draft) -> int:
        """Latency-critical mode: prefill tokens that keep the step near its target time.

        At least one block's worth, or prompts would never get done.
        """
        target = self._config.target_itl_s
        worker = draft.worker
        if target is None or not draft.decodes:
            return draft.budget
        seconds = target * worker.prefill_cap_factor
        within = worker.step_times.prefill_tokens_within(seconds, draft.decodes, worker.context_tokens)
        return max(worker.block_size, within)

    def _admit_waiting(self, draft: Draft, now: float, out: list[Effect]) -> None:
        """Admit in queue order; past what does not fit, look a bounded number further."""
        misses = 0
        for sequence in self._in_reach(now, draft):
            verdict = self._try_admit(draft, sequence, now)
            if verdict is None:
                continue
            reason, figures = verdict
            if self.explain is not None:
                self.explain(sequence, draft.worker, reason, figures)
            if reason == "better_worker":
                draft.num_left += 1
                continue
            if reason in {"blocks", "max_num_seqs"} and misses == 0:
                self._make_room(draft, sequence, now, out)
            if reason in {"max_num_seqs", "token_budget"} or (reason == "isolated" and sequence.suspect):
                return
            if reason == "blocks":
                if sequence.blocked_since is None:
                    sequence.blocked_since = now
                if now - sequence.blocked_since >= self._config.lookahead_age_s:
                    return
            misses += 1
            if misses > self._config.lookahead:
                return

    def _in_reach(self, now: float, draft: Draft) -> Iterator[Sequence]:
        """Yield the waiting that this plan may consider, best first; the queue may change meanwhile.

        Whoever is left to a better worker takes no place, so then as many others are asked again.
        """
        asked: set[Sequence] = set()
        num_left = -1
        while num_left != draft.num_left:
            num_left = draft.num_left
            some = self._next_in_reach(now, draft, asked)
            asked.update(some)
            yield from some

    def _next_in_reach(self, now: float, draft: Draft, asked: set[Sequence]) -> list[Sequence]:
        """Return as many as could matter of those not asked: not what is late, nor what never fits."""
        worker = draft.worker
        places = worker.max_num_seqs - worker.num_seqs
        # Where nobody can be admitted, the first is told so and nobody else is asked.
        reach = places + self._config.lookahead + 1 if places > 0 and draft.budget > 0 else 1
        found: list[Sequence] = []
        for sequence in self._pool.queue.order(now):
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
        self, draft: Draft, sequence: Sequence, now: float
    ) -> tuple[str, dict[str, object]] | None:
        """Admit a sequence, or return why not. The reasons are those of `octavo replay --explain`."""
        worker = draft.worker
        if worker.num_seqs >= worker.max_num_seqs:
            return "max_num_seqs", {"running": worker.num_seqs, "max_num_seqs": worker.max_num_seqs}
        if draft.budget <= 0:
            return "token_budget", {"left": draft.budget, "token_budget": worker.token_budget}
        if not worker.may_join(sequence):
            return "isolated", {"deaths": sequence.deaths}
        other = self._pool.better_elsewhere(worker, sequence, now)
        if other is not None:
            self._pool.leave(sequence, other)
            return "better_worker", {"worker": other.worker_id}
        cached = self._pool.cached_tokens(worker, sequence)
        todo = sequence.num_tokens - cached
        tokens = self._first_chunk(draft, todo)
        if tokens == 0:
            return "max_partial_prefills" if self._config.chunked_prefill else "token_budget", {"todo": todo}
        blocks = worker.blocks_to_admit(sequence)
        shared = 0
        if cached and sequence.trust_hits:
            shared = min(worker.active_hits(sequence.keys), cached // worker.block_size)
            blocks -= shared
        spare = int(self._config.watermark * worker.info.geometry.num_blocks) if worker.busy else 0
        if blocks + spare > draft.available:
            return "blocks", {"needed": blocks, "watermark": spare, "available": draft.available}
        draft.shared_keys.update(sequence.keys[:shared])
        self._admit(draft, sequence, (todo, tokens, blocks), now)
        return None

    def _first_chunk(self, draft: Draft, todo: int) -> int:
        """Return how many tokens of a new prefill this step may compute; 0: it has to wait."""
        if self._config.chunked_prefill:
            partial = sum(1 for s in draft.worker.prefilling.values() if s.left_to_plan > 0)
            if todo > draft.budget and partial >= self._config.max_partial_prefills:
                return 0
            return min(todo, draft.budget)
        # Longer than what decodes leave: it will get the step for itself.
        return todo if todo <= draft.budget or not draft.prefill else 0

    def _admit(self, draft: Draft, sequence: Sequence, need: tuple[int, int, int], now: float) -> None:
        todo, tokens, blocks = need
        self._pool.queue.start(sequence)
        if tokens > draft.budget:
            draft.skip_decodes()
        draft.take_in(sequence, now)
        sequence.num_believed_tokens = sequence.num_tokens - todo
        draft.take_blocks(blocks)
        draft.compute(sequence, tokens)
        # Charged at once, so that plans made before the report do not all favour the same tenant.
        sequence.num_charged_tokens = todo
        self._pool.charges.charge(sequence.request.tenant, todo)

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
        open_to_it = [s for s in candidates if s.preemptions < self._config.max_preemptions]
        if open_to_it:
            return open_to_it[-1]
        return candidates[-1] if candidates and below is None else None

    def _preempt(self, draft: Draft, victim: Sequence, out: list[Effect]) -> None:
        worker = draft.worker
        victim.preemptions += 1
        to_recompute = _tokens_to_recompute(worker, victim)
        blocks = draft.release(victim)
        victim.transition(Status.RELEASING)
        out.append(
            LogEvent(
                "sequence_preempted",
                {
                    "request_id": victim.request.request_id,
                    "choice": victim.choice,
                    "worker_id": worker.worker_id,
                    "step": draft.step,
                    "blocks": blocks,
                    "tokens_to_recompute": to_recompute,
                    "preemptions": victim.preemptions,
                },
            )
        )

    def _make_room(self, draft: Draft, head: Sequence, now: float, out: list[Effect]) -> None:
        """Preempt one of a lower class for the first in the queue, unless there is room without that."""
        worker = draft.worker
        freed = draft.released or worker.owed or any(f.plan.release for f in worker.in_flight)
        if freed or draft.admitted or self._pool.best(head, now) is not None:
            return
        victim = self._victim(worker, below=head.request.priority)
        if victim is not None:
            self._preempt(draft, victim, out)


def _tokens_to_recompute(worker: WorkerState, sequence: Sequence) -> int:
    """Return what is left to compute if the cache keeps the full blocks that the sequence has published."""
    if not worker.info.geometry.paged:
        return sequence.num_tokens
    decodes = sequence.handle in worker.decoding
    computed = sequence.num_tokens - 1 if decodes else sequence.num_computed_tokens
    return sequence.num_tokens - min(len(sequence.keys), computed // worker.block_size) * worker.block_size


def _victim_rank(sequence: Sequence) -> tuple[int, int, int]:
    """Order of preemption; the last is the victim."""
    return (sequence.request.priority, sequence.admitted_step, -sequence.num_tokens)
