"""Predicts a newcomer's wait and time to first token, from measured rates and the backlog ahead of it.

A newcomer waits for two things: for a place, and for the prompts ahead of it to be computed. While
places are free only the second counts, and its rate is that of the measured step times. Once a plan
has left somebody waiting, places come free as fast as the backlog is seen to drain: sequences started
per second in which some were left. Until that has been seen for a while, the step times and the mean
length of what has finished stand in for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from octavo.protocol.steps import Priority

from scheduler_svc.core.fleet import ModelPool
from scheduler_svc.core.request import Prediction, Sequence
from scheduler_svc.core.sharing import tokens_before
from scheduler_svc.core.steptime import ENOUGH_STEPS, StepTimePredictor, chunk_pairs
from scheduler_svc.core.worker import WorkerState

WINDOW_S = 10.0
_PRIOR_S = 0.5
"""Backlogged seconds after which what is measured counts as much as what the step times say."""
_GAIN = 0.05
_REFRESH_S = 0.1
_REFRESH_PER_WORKER_S = 0.001
_FEW_WORKERS = 4
_MANY_PAIRS = 1e6


class DrainRate:
    """Sequences started per second while a backlog is left, weighted towards the last ten such seconds."""

    def __init__(self) -> None:
        self._starts = 0.0
        self._seconds = 0.0
        self._since: float | None = None
        """When the last plan left somebody waiting; None when it left nobody."""

    def planned(self, started: int, left: int, now: float) -> None:
        """A plan has taken so many and left so many."""
        if self._since is not None:
            elapsed = now - self._since
            keep = math.exp(-elapsed / WINDOW_S)
            self._seconds = self._seconds * keep + elapsed
            self._starts = self._starts * keep + started
        self._since = now if left else None

    def pause(self) -> None:
        """Nobody is there to take what waits: until the next plan, time says nothing of the rate."""
        self._since = None

    def per_s(self, prior_per_s: float | None, now: float) -> float | None:
        """Return the rate; before much was seen, mostly the prior. None when neither is known."""
        pending = now - self._since if self._since is not None else 0.0
        # A plan is due every step: only what is overdue says that the drain has slowed down.
        overdue = pending if pending > 1.0 else 0.0
        seconds, starts = self._seconds + overdue, self._starts
        if prior_per_s is not None:
            seconds += _PRIOR_S
            starts += _PRIOR_S * prior_per_s
        return starts / seconds if seconds > 0.0 and starts > 0.0 else None


class Mean:
    """A running mean that follows what comes; None before anything has come."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, value: float) -> None:
        """Take a value."""
        self.value = value if self.value is None else self.value + _GAIN * (value - self.value)

    def at_least_one(self) -> float:
        """Return the mean, or one."""
        return max(1.0, self.value or 0.0)


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the workers of a model can take, at one moment. Rates are of all workers together."""

    at: float
    workers: int
    free: int
    """Sequences that places and blocks have room for now."""
    running: tuple[int, ...]
    """Running sequences by class."""
    start_rate: float | None
    """Sequences per second that full workers would finish, and so start; None before one has finished."""
    prefill_rate: float
    """Prompt tokens per second, beside the decodes of the moment."""
    prefills: tuple[tuple[Priority, int], ...]
    """Class and tokens not computed yet of the prompts that run."""
    pair_s: float
    """Seconds that a pair of query and key costs in a prefill."""
    step_s: float
    """Time of a step with the decodes of the moment; 0 when nothing runs."""


class Forecast:
    """Predicts for the newcomers of one model, and learns from what became of them."""

    def __init__(self, pool: ModelPool) -> None:
        self._pool = pool
        self.drain = DrainRate()
        self._output_tokens = Mean()
        self._prompt_tokens = Mean()
        self._wait_error_s = Mean()
        self._ttft_error_s = Mean()
        self._capacity: Capacity | None = None
        self._asked_capacity: Capacity | None = None
        """What questions have measured, which events must not see: a replay is not asked anything."""

    # What is predicted ---------------------------------------------------------------------------

    def predict(
        self, priority: Priority, ahead: int, tokens: tuple[int, int], now: float
    ) -> Prediction | None:
        """Return what a newcomer has to expect, or None while too little is known.

        Args:
            priority: its class.
            ahead: sequences that wait and will go before it.
            tokens: prompt tokens to compute of those, and of itself.
        """
        capacity = self.capacity(now)
        if capacity is None:
            return None
        tokens_ahead, own_tokens = tokens
        seat_s = self._seat_s(capacity, priority, ahead, now)
        if seat_s is None:
            return None
        # Who waits before it with a longer prompt goes on beside it.
        tokens_ahead = min(tokens_ahead, ahead * own_tokens)
        tokens_ahead += tokens_before(capacity.prefills, priority, own_tokens)
        prefill_s = tokens_ahead / capacity.prefill_rate
        # Half of the step under way is left, on average, before the next plan can take anybody.
        wait_s = max(seat_s, prefill_s) + capacity.step_s / 2
        own_s = own_tokens * capacity.workers / capacity.prefill_rate + capacity.step_s
        own_s += chunk_pairs(own_tokens, 0) * capacity.pair_s
        return Prediction(
            wait_s, wait_s + own_s, self._wait_error_s.value or 0.0, self._ttft_error_s.value or 0.0
        )

    def drain_s(self, ahead: int, now: float) -> float | None:
        """Return how long a backlog of so many takes to drain at the measured rate, if that is known.

        On the path of every refusal, so it takes a capacity that was measured a moment ago.
        """
        capacity = self._capacity
        if capacity is None or now - capacity.at >= _REFRESH_S:
            capacity = self.capacity(now)
        rate = self.drain.per_s(capacity.start_rate if capacity is not None else None, now)
        return ahead / rate if rate is not None else None

    def token_s(self, now: float) -> float:
        """Return the time that one output token takes at least: a step as it is now."""
        capacity = self.capacity(now)
        return capacity.step_s if capacity is not None else 0.0

    def capacity(self, now: float) -> Capacity | None:
        """Return what the workers can take, or None while no step times are known."""
        known = self._capacity
        workers = len(self._pool.workers)
        refresh_s = 0.0 if workers <= _FEW_WORKERS else max(_REFRESH_S, _REFRESH_PER_WORKER_S * workers)
        if known is None or now - known.at >= refresh_s or known.workers != workers:
            self._capacity = self._measure(now)
        return self._capacity

    @contextmanager
    def question(self) -> Iterator[None]:
        """Keep what is measured inside from all that is predicted outside."""
        self._capacity, self._asked_capacity = self._asked_capacity, self._capacity
        try:
            yield
        finally:
            self._capacity, self._asked_capacity = self._asked_capacity, self._capacity

    # What is learnt ------------------------------------------------------------------------------

    def waited(self, sequence: Sequence, now: float) -> None:
        """A worker has taken a sequence."""
        predicted = sequence.request.prediction
        again = sequence.history.recoveries or sequence.history.preemptions
        if predicted is not None and sequence is sequence.request.leader and not again:
            self._wait_error_s.add(abs(now - sequence.request.arrival - predicted.wait_s))

    def first_token(self, sequence: Sequence, now: float) -> None:
        """The first token of a request has come."""
        self._prompt_tokens.add(sequence.prompt_len - sequence.history.cached_tokens)
        predicted = sequence.request.prediction
        if predicted is not None:
            self._ttft_error_s.add(abs(now - sequence.request.arrival - predicted.ttft_s))

    def ended(self, sequence: Sequence) -> None:
        """A sequence has ended; one that never ran says nothing."""
        if sequence.history.first_token_at is not None:
            self._output_tokens.add(sequence.num_output_tokens)

    # Inside --------------------------------------------------------------------------------------

    def _seat_s(self, capacity: Capacity, priority: Priority, ahead: int, now: float) -> float | None:
        """Return how long a newcomer waits for a place; None while that cannot be known."""
        over = ahead + 1 - capacity.free
        if over <= 0:
            return 0.0
        lower = sum(capacity.running[priority + 1 :])
        if over <= lower:
            # One of a lower class gives way in each plan.
            return over * capacity.step_s / capacity.workers
        rate = self.drain.per_s(capacity.start_rate, now)
        return (over - lower) / rate if rate is not None else None

    def _measure(self, now: float) -> Capacity | None:
        pool = self._pool
        workers = [worker for worker in pool.workers.values() if not worker.draining]
        prefill_rate = start_rate = step_s = pair_s = 0.0
        free = 0
        prefills: list[tuple[Priority, int]] = []
        running = [0] * (max(Priority) + 1)
        for worker in workers:
            times = pool.times_of(worker)
            if times.num_observations < ENOUGH_STEPS:
                return None
            decodes = len(worker.decoding)
            room = max(1, worker.token_budget - decodes)
            prefill_rate += room / times.predict(decodes, room, worker.context_tokens)
            if worker.busy:
                step_s += times.predict(decodes, 0, worker.context_tokens)
            start_rate += self._start_rate(worker, times)
            free += self._free(worker)
            prefills += worker.prefills_left()
            pair_s += times.predict(0, 0, 0, _MANY_PAIRS) - times.predict(0, 0, 0)
            for sequence_class, count in enumerate(worker.running):
                running[sequence_class] += count
        if not workers:
            return None
        known = self._output_tokens.value is not None
        return Capacity(
            at=now,
            workers=len(pool.workers),
            free=free,
            running=tuple(running),
            start_rate=start_rate if known else None,
            prefill_rate=prefill_rate,
            prefills=tuple(prefills),
            pair_s=max(0.0, pair_s / _MANY_PAIRS / len(workers)),
            step_s=step_s / len(workers),
        )

    def _tokens_of_one(self) -> float:
        """Return the tokens that a sequence holds on average while it runs."""
        return self._prompt_tokens.at_least_one() + self._output_tokens.at_least_one() / 2

    def _free(self, worker: WorkerState) -> int:
        """Return how many more sequences a worker has places and blocks for."""
        blocks = worker.blocks.needed_for(math.ceil(self._tokens_of_one()))
        return max(0, min(worker.max_num_seqs - worker.num_seqs, worker.available_blocks() // blocks))

    def _start_rate(self, worker: WorkerState, times: StepTimePredictor) -> float:
        """Return the sequences per second that a worker starts when all its places are always taken.

        Each stays for as many steps as it generates tokens, and each step computes the prompts of
        those that come in with it.
        """
        tokens = self._tokens_of_one()
        held = worker.info.geometry.num_blocks // worker.blocks.needed_for(math.ceil(tokens))
        seats = max(1, min(worker.max_num_seqs, held))
        output, prompt = self._output_tokens.at_least_one(), self._prompt_tokens.at_least_one()
        prefill = min(seats * prompt / output, max(1, worker.token_budget - seats))
        step_s = times.predict(seats, round(prefill), round(seats * tokens))
        return min(seats / output, prefill / prompt) / step_s
