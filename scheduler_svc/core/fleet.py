"""All workers, what they hold, and which of them a waiting sequence is best left to."""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple

from octavo.protocol.steps import StepTiming, cacheable_tokens

from scheduler_svc.core.blame import Losses
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.events import NewRequest
from scheduler_svc.core.placement import PrefixIndex
from scheduler_svc.core.policies import make_charges
from scheduler_svc.core.policies.base import Charges
from scheduler_svc.core.request import Sequence
from scheduler_svc.core.sharing import tokens_before
from scheduler_svc.core.steptime import ENOUGH_STEPS, ScaledStepTimes, StepTimePredictor, chunk_pairs
from scheduler_svc.core.waiting import WaitingQueue
from scheduler_svc.core.worker import WorkerState

_MAX_HOLDERS = 8
_LEAST_LOADED = 4
_MIN_GAIN = 0.1
"""Share of the time to its first token that a sequence must save to be left for another worker."""


class LoadIndex:
    """Workers by load: a heap whose stale entries are dropped when they come up."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._loads: dict[str, float] = {}

    def update(self, worker_id: str, load: float) -> None:
        """Set a worker's load."""
        if self._loads.get(worker_id) == load:
            return
        self._loads[worker_id] = load
        heapq.heappush(self._heap, (load, worker_id))
        if len(self._heap) > 64 + 4 * len(self._loads):
            self._heap = [(value, key) for key, value in self._loads.items()]
            heapq.heapify(self._heap)

    def remove(self, worker_id: str) -> None:
        """Forget a worker."""
        self._loads.pop(worker_id, None)

    def least(self, count: int) -> list[str]:
        """Return the workers with the least load, the least loaded first."""
        found: dict[str, float] = {}
        while self._heap and len(found) < count:
            load, worker_id = heapq.heappop(self._heap)
            if self._loads.get(worker_id) == load:
                found[worker_id] = load
        for worker_id, load in found.items():
            heapq.heappush(self._heap, (load, worker_id))
        return list(found)


class BetterWorker(NamedTuple):
    """A worker on which a sequence is expected to have its first token sooner."""

    worker: WorkerState
    worth_until: float
    """Until then it is worth waiting for: as long as the estimate promises to save."""


class ModelPool:
    """The workers of one model, its waiting queue and its prefix index."""

    def __init__(self, config: CoreConfig, weights: dict[str, float], model: str) -> None:
        self.model = model
        self.charges: Charges = make_charges(config.policy, weights)
        self.queue = WaitingQueue(config, self.charges)
        self.prefixes = PrefixIndex()
        self.loads = LoadIndex()
        self.losses = Losses()
        self._drain_grace_s = config.worker_drain_grace_s
        self.workers: dict[str, WorkerState] = {}
        self.block_size: int | None = None
        """Tokens per block of all its workers; None until the first has come."""
        self.max_model_len: int | None = None
        """Tokens that the largest of its workers holds; None without workers."""
        self.num_seats = 0
        """Sequences that its workers can run at once."""
        self.idle: dict[str, WorkerState] = {}
        """Workers without a plan, those that drain left out."""
        self._veteran: WorkerState | None = None
        """One whose step times are known; new workers are taken to be as fast."""

    def add(self, worker: WorkerState) -> None:
        """Take a worker in."""
        self.workers[worker.worker_id] = worker
        self.block_size = worker.block_size
        self._note_size()
        self.prefixes.add(worker.worker_id, worker.info.device_keys)
        self.prefixes.add(worker.worker_id, worker.info.host_keys)
        self.update_load(worker)

    def remove(self, worker: WorkerState, now: float) -> None:
        """Forget a worker."""
        del self.workers[worker.worker_id]
        self._note_size()
        self.idle.pop(worker.worker_id, None)
        self.end_deferrals(worker, now, all_of_them=True)
        self.prefixes.forget(worker.worker_id)
        self.loads.remove(worker.worker_id)

    def _note_size(self) -> None:
        sizes = (worker.info.max_model_len for worker in self.workers.values())
        self.max_model_len = max(sizes, default=None)
        reach: dict[str | None, int] = {}
        for worker in self.workers.values():
            if not worker.draining:
                for adapter in (None, *worker.info.adapters):
                    reach[adapter] = max(reach.get(adapter, 0), worker.info.max_model_len)
        self.queue.set_reach(reach)
        self.num_seats = sum(worker.max_num_seqs for worker in self.workers.values())

    def stop_using(self, worker: WorkerState, now: float) -> None:
        """A worker takes nothing new, and after a while what it runs moves to others."""
        worker.draining = True
        worker.moves_at = min(worker.moves_at, now + self._drain_grace_s)
        self._note_size()
        self.idle.pop(worker.worker_id, None)
        self.loads.remove(worker.worker_id)
        self.end_deferrals(worker, now, all_of_them=True)

    def note_idle(self, worker: WorkerState) -> None:
        """Note whether a worker has a plan to work on."""
        if worker.pipeline.in_flight or worker.draining:
            self.idle.pop(worker.worker_id, None)
        else:
            self.idle[worker.worker_id] = worker

    def update_load(self, worker: WorkerState) -> None:
        """Recompute when a worker could start on something new. Full workers are out of the running."""
        if worker.draining or worker.num_seqs >= worker.max_num_seqs:
            self.loads.remove(worker.worker_id)
            return
        model = self.times_of(worker)
        load = model.per_prefill_token_s * worker.backlog_tokens
        if worker.decoding:
            load += model.predict(len(worker.decoding), 0, worker.context_tokens)
        worker.pace.load = load
        self.loads.update(worker.worker_id, load)

    def observe(self, worker: WorkerState, timing: StepTiming, seconds: float, pairs: float) -> None:
        """Learn from a step of a worker; from its first ones, how it compares with a known one."""
        pace = worker.pace
        decodes, prefill_tokens = timing.num_decodes, timing.num_prefill_tokens
        if pace.step_times.num_observations >= ENOUGH_STEPS:
            self._veteran = self._veteran or worker
        elif self._veteran is not None:
            known = self._veteran.pace.step_times
            pace.expected_s += known.predict(decodes, prefill_tokens, timing.context_tokens, pairs)
            pace.observed_s += seconds
        pace.step_times.observe(decodes, prefill_tokens, timing.context_tokens, seconds, pairs)

    def times_of(self, worker: WorkerState) -> StepTimePredictor:
        """Return the step times to expect of a worker: those of a known one, scaled, while it is new."""
        pace = worker.pace
        if pace.step_times.num_observations >= ENOUGH_STEPS or self._veteran is None:
            return pace.step_times
        known = self._veteran.pace.step_times
        return ScaledStepTimes(known, pace.observed_s / pace.expected_s) if pace.expected_s else known

    def cached_tokens(self, worker: WorkerState, sequence: Sequence) -> int:
        """Return how many tokens of a sequence a worker is believed to hold; one is always computed."""
        if not sequence.keys:
            return 0
        size = worker.block_size
        held = self.prefixes.match(worker.worker_id, sequence.keys)
        return min(held, sequence.num_cacheable_tokens // size) * size

    def deepest_cached_tokens(self, spec: NewRequest) -> int:
        """Return how many tokens of a prompt some worker is believed to hold."""
        if not spec.prompt_keys or self.block_size is None:
            return 0
        depth, _ = self.prefixes.deepest(spec.prompt_keys)
        score_from = None if spec.sampling.prompt_logprobs is None else max(1, spec.scored_tokens)
        most = cacheable_tokens(score_from, spec.pooling, len(spec.prompt_token_ids))
        most = min(most, len(spec.prompt_token_ids) - 1)
        return min(depth, most // self.block_size) * self.block_size

    def can_hold(self, worker: WorkerState, sequence: Sequence) -> bool:
        """Return whether a sequence can ever run on a worker."""
        return self.has_adapter(worker, sequence) and (
            sequence.request.max_total_tokens <= worker.info.max_model_len
        )

    @staticmethod
    def has_adapter(worker: WorkerState, sequence: Sequence) -> bool:
        """Return whether a worker can apply the adapter of a sequence, if that has one."""
        adapter = sequence.request.spec.adapter
        return adapter is None or adapter in worker.info.adapters

    def best(self, sequence: Sequence, now: float) -> WorkerState | None:
        """Return the worker on which a sequence would have its first token soonest, if any has room."""
        found: tuple[float, int, WorkerState] | None = None
        for worker in self._candidates(sequence, now):
            if self._has_room(worker, sequence, now):
                score = (self.first_token_s(worker, sequence, now), -worker.blocks.pool.free)
                if found is None or score < found[:2]:
                    found = (*score, worker)
        return found[2] if found else None

    def better_elsewhere(self, worker: WorkerState, sequence: Sequence, now: float) -> BetterWorker | None:
        """Return a worker that should have a sequence rather than the one that has room for it now.

        Longest cached prefix, free capacity and speed, all as what they are worth: seconds to the first
        token. That worker need not have room yet, but the sequence is left for it no longer than what
        the first estimate promises to save. So an estimate that is wrong costs at most twice the time.
        """
        if len(self.workers) == 1 or not sequence.may_be_deferred(now):
            return None
        own_s = self.first_token_s(worker, sequence, now)
        best, best_s = None, own_s * (1.0 - _MIN_GAIN)
        patient_until = math.inf if (at := sequence.request.queue_deadline) is None else at
        for other in self._candidates(sequence, now):
            in_time = other.ends_at() < patient_until
            if other is not worker and in_time and self._suits(other, sequence, now):
                seconds = self.first_token_s(other, sequence, now)
                if seconds < best_s:
                    best, best_s = other, seconds
        return BetterWorker(best, now + own_s - best_s) if best is not None else None

    def defer(self, sequence: Sequence, worker: WorkerState) -> None:
        """Leave a waiting sequence to a worker, which is to look at it when it plans next."""
        if not worker.pipeline.in_flight:
            self.queue.unplaced.append(sequence)
        elif sequence.waiting.deferred_to is not worker.deferred:
            sequence.end_deferral()
            worker.deferred[sequence] = sequence.num_tokens - self.cached_tokens(worker, sequence)
            sequence.waiting.deferred_to = worker.deferred

    def end_deferrals(self, worker: WorkerState, now: float, *, all_of_them: bool = False) -> None:
        """What was left to a worker for long enough, and still waits, is not left to anybody again."""
        for sequence in list(worker.deferred):
            if all_of_them or not sequence.may_be_deferred(now):
                sequence.end_deferral()
                sequence.waiting.deferred_until = now
                self.queue.unplaced.append(sequence)

    def looks_until(self, now: float) -> float:
        """Return when some worker that has a place is expected to have looked at what comes now."""
        if self.idle:
            return now
        ends = [self.workers[worker_id].ends_at() for worker_id in self.loads.least(_LEAST_LOADED)]
        return max(now, min(ends, default=now))

    def idle_for(self, sequence: Sequence, now: float) -> WorkerState | None:
        """Return an idle worker that can hold a sequence: one that may take it at once, if there is one."""
        later: WorkerState | None = None
        for worker in self.idle.values():
            if self.can_hold(worker, sequence):
                if worker.backoff.is_over(now):
                    return worker
                later = later or worker
        return later

    def _candidates(self, sequence: Sequence, now: float) -> list[WorkerState]:
        """Return the least loaded workers, an idle one, and some of those with the longest cached prefix."""
        names = dict.fromkeys(self.loads.least(_LEAST_LOADED))
        idle = self.idle_for(sequence, now)
        if idle is not None:
            names[idle.worker_id] = None
        if sequence.keys:
            _, holders = self.prefixes.deepest(sequence.keys)
            chosen = heapq.nsmallest(_MAX_HOLDERS, holders, key=lambda w: (self.workers[w].pace.load, w))
            names.update(dict.fromkeys(chosen))
        return [self.workers[worker_id] for worker_id in names]

    def _has_room(self, worker: WorkerState, sequence: Sequence, now: float) -> bool:
        """Return whether a worker could take a sequence in its next step."""
        return self._before(worker, sequence) < worker.token_budget and self._suits(worker, sequence, now)

    def _before(self, worker: WorkerState, sequence: Sequence) -> int:
        """Return the tokens of the prompts of a worker that go before those of a sequence."""
        todo = sequence.num_tokens - self.cached_tokens(worker, sequence)
        return tokens_before(worker.prefills_left(), sequence.request.priority, todo)

    def _suits(self, worker: WorkerState, sequence: Sequence, now: float) -> bool:
        """Return whether a worker could take a sequence once it has prefilled what it has."""
        return (
            not worker.draining
            and worker.pipeline.bisection is None
            and worker.num_seqs < worker.max_num_seqs
            and now >= worker.backoff.admits_after
            and self.can_hold(worker, sequence)
            and worker.blocks.needed_to_admit(sequence) <= worker.available_blocks()
            and worker.may_join(sequence)
        )

    def first_token_s(self, worker: WorkerState, sequence: Sequence, now: float) -> float:
        """Return the predicted time to the first token of a sequence on a worker.

        First the plans in flight, then so many steps with the prefill of what goes before, of what was
        left to it before, and of the sequence, in each of which everything decodes.
        """
        model = self.times_of(worker)
        decodes = len(worker.decoding)
        cached = self.cached_tokens(worker, sequence)
        todo = sequence.num_tokens - cached + self._before(worker, sequence)
        pairs = chunk_pairs(sequence.num_tokens - cached, cached)
        for other, tokens in worker.deferred.items():
            if other is sequence:
                break
            todo += tokens
        steps = -(-todo // max(1, worker.token_budget - decodes))
        seconds = model.predict(decodes, todo, worker.context_tokens, pairs)
        seconds += (steps - 1) * model.predict(decodes, 0, worker.context_tokens)
        return seconds + max(0.0, worker.ends_at() - now)
