"""All workers, what they hold, and which of them a waiting sequence is best left to."""

from __future__ import annotations

import heapq

from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.placement import PrefixIndex
from scheduler_svc.core.policies import Charges, make_charges
from scheduler_svc.core.rates import Rate
from scheduler_svc.core.request import Sequence, Status
from scheduler_svc.core.steptime import StepTimeModel
from scheduler_svc.core.waiting import WaitingQueue
from scheduler_svc.core.worker import WorkerState

MAX_DEFERRALS = 2
"""A sequence is left for a better worker so often; then the next worker with room takes it."""
_MAX_HOLDERS = 8
_ENOUGH_STEPS = 8
"""Observed steps after which a worker's own step times are trusted."""
_MIN_GAIN_S = 1e-4


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

    def least(self) -> str | None:
        """Return the worker with the least load."""
        while self._heap:
            load, worker_id = self._heap[0]
            if self._loads.get(worker_id) == load:
                return worker_id
            heapq.heappop(self._heap)
        return None


class ModelPool:
    """The workers of one model, its waiting queue and its prefix index."""

    def __init__(self, config: CoreConfig) -> None:
        self.charges: Charges = make_charges(config.policy, config.tenant_weights)
        self.queue = WaitingQueue(config, self.charges)
        self.prefixes = PrefixIndex()
        self.loads = LoadIndex()
        self.workers: dict[str, WorkerState] = {}
        self.block_size: int | None = None
        """Tokens per block of all its workers; None until the first has come."""
        self.idle: dict[str, WorkerState] = {}
        """Workers without a plan, those that drain left out."""
        self.starts = Rate()
        """Sequences that workers have taken."""
        self._veteran: WorkerState | None = None
        """One whose step times are known; new workers are taken to be as fast."""

    def add(self, worker: WorkerState) -> None:
        """Take a worker in."""
        self.workers[worker.worker_id] = worker
        self.block_size = worker.block_size
        self.prefixes.add(worker.worker_id, worker.info.device_keys)
        self.prefixes.add(worker.worker_id, worker.info.host_keys)
        self.update_load(worker)

    def remove(self, worker: WorkerState) -> None:
        """Forget a worker."""
        del self.workers[worker.worker_id]
        self.idle.pop(worker.worker_id, None)
        self.take_back(worker)
        self.prefixes.forget(worker.worker_id)
        self.loads.remove(worker.worker_id)

    def stop_using(self, worker: WorkerState) -> None:
        """A worker takes nothing new."""
        self.idle.pop(worker.worker_id, None)
        self.loads.remove(worker.worker_id)
        self.take_back(worker)

    def note_idle(self, worker: WorkerState) -> None:
        """Note whether a worker has a plan to work on."""
        if worker.in_flight or worker.draining:
            self.idle.pop(worker.worker_id, None)
        else:
            self.idle[worker.worker_id] = worker

    def update_load(self, worker: WorkerState) -> None:
        """Recompute when a worker could start on something new. Full workers are out of the running."""
        if worker.draining or worker.num_seqs >= worker.max_num_seqs:
            self.loads.remove(worker.worker_id)
            return
        model = self.times_of(worker)
        worker.load = model.per_prefill_token_s * worker.backlog_tokens
        if worker.decoding:
            worker.load += model.predict(len(worker.decoding), 0, worker.context_tokens)
        self.loads.update(worker.worker_id, worker.load)

    def times_of(self, worker: WorkerState) -> StepTimeModel:
        """Return the step times to expect of a worker: those of another while its own are not known."""
        if worker.step_times.num_observations >= _ENOUGH_STEPS:
            self._veteran = self._veteran or worker
        elif self._veteran is not None:
            return self._veteran.step_times
        return worker.step_times

    def cached_tokens(self, worker: WorkerState, sequence: Sequence) -> int:
        """Return how many tokens of a sequence a worker is believed to hold; one is always computed."""
        if not sequence.keys:
            return 0
        size = worker.block_size
        held = self.prefixes.match(worker.worker_id, sequence.keys)
        return min(held, (sequence.num_tokens - 1) // size) * size

    def can_hold(self, worker: WorkerState, sequence: Sequence) -> bool:
        """Return whether a sequence can ever run on a worker."""
        return sequence.request.max_total_tokens <= worker.info.max_model_len

    def best(self, sequence: Sequence, now: float) -> WorkerState | None:
        """Return the worker on which a sequence would have its first token soonest, if any has room."""
        found: tuple[float, int, WorkerState] | None = None
        for worker in self._candidates(sequence):
            if self._has_room(worker, sequence, now):
                score = (self._first_token_s(worker, sequence, now), -worker.pool.free)
                if found is None or score < found[:2]:
                    found = (*score, worker)
        return found[2] if found else None

    def better_elsewhere(self, worker: WorkerState, sequence: Sequence, now: float) -> WorkerState | None:
        """Return a worker that should have a sequence rather than the one that has room for it now.

        Longest cached prefix, then free capacity, both as what they are worth: seconds to the first token.
        """
        if len(self.workers) == 1 or sequence.deferrals >= MAX_DEFERRALS:
            return None
        best = self.best(sequence, now)
        if best is None or best is worker:
            return None
        gain = self._first_token_s(worker, sequence, now) - self._first_token_s(best, sequence, now)
        return best if gain > _MIN_GAIN_S else None

    def leave(self, sequence: Sequence, worker: WorkerState) -> None:
        """Leave a waiting sequence to a worker, which is to look at it when it plans next."""
        sequence.deferrals += 1
        if worker.in_flight:
            worker.left_to_it.append(sequence)
        else:
            self.queue.unplaced.append(sequence)

    def take_back(self, worker: WorkerState) -> None:
        """What was left to a worker, and still waits, is not left to anybody again."""
        for sequence in worker.left_to_it:
            if sequence.status is Status.WAITING:
                sequence.deferrals = MAX_DEFERRALS
                self.queue.unplaced.append(sequence)
        worker.left_to_it.clear()

    def idle_for(self, sequence: Sequence) -> WorkerState | None:
        """Return an idle worker that can hold a sequence."""
        return next((worker for worker in self.idle.values() if self.can_hold(worker, sequence)), None)

    def _candidates(self, sequence: Sequence) -> list[WorkerState]:
        """Return the least loaded worker, an idle one, and some of those with the longest cached prefix."""
        candidates: list[WorkerState] = []
        least = self.loads.least()
        if least is not None:
            candidates.append(self.workers[least])
        idle = self.idle_for(sequence)
        if idle is not None and idle.worker_id != least:
            candidates.append(idle)
        if sequence.keys:
            _, holders = self.prefixes.deepest(sequence.keys)
            chosen = heapq.nsmallest(_MAX_HOLDERS, holders, key=lambda w: (self.workers[w].load, w))
            candidates.extend(self.workers[worker_id] for worker_id in chosen)
        return candidates

    def _has_room(self, worker: WorkerState, sequence: Sequence, now: float) -> bool:
        """Return whether a worker could take a sequence in its next step."""
        return (
            not worker.draining
            and worker.bisection is None
            and worker.num_seqs < worker.max_num_seqs
            and worker.backlog_tokens < worker.token_budget
            and now >= worker.admits_after
            and self.can_hold(worker, sequence)
            and worker.blocks_to_admit(sequence) <= worker.available_blocks()
            and worker.may_join(sequence)
        )

    def _first_token_s(self, worker: WorkerState, sequence: Sequence, now: float) -> float:
        """Return the predicted time to the first token of a sequence on a worker."""
        model = self.times_of(worker)
        todo = sequence.num_tokens - self.cached_tokens(worker, sequence) + worker.backlog_tokens
        seconds = model.predict(len(worker.decoding), todo, worker.context_tokens)
        if worker.in_flight:
            flight = worker.in_flight[0]
            ends = max(flight.sent_at, worker.last_report_at) + worker.predict_flight_s(flight)
            seconds += max(0.0, ends - now)
        return seconds
