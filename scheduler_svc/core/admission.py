"""Who may come in: the queue's bounds, the level, and whether a deadline can be met."""

from __future__ import annotations

import math

from octavo.protocol.steps import Priority

from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.effects import LogEvent
from scheduler_svc.core.errors import CoreError, Reason
from scheduler_svc.core.events import AdmissionRequest
from scheduler_svc.core.fleet import ModelPool
from scheduler_svc.core.forecast import Forecast
from scheduler_svc.core.overload import Caps, Controller, Level, Misses, Pressure, Transition
from scheduler_svc.core.request import Prediction, Request, Sequence
from scheduler_svc.core.steptime import ENOUGH_STEPS

MIN_RETRY_S = 0.1
MAX_RETRY_S = 30.0
_DEMAND_S = 30.0
"""How long after its last newcomer the predicted wait of a class still counts."""
_MOST_MARGIN = 0.25
"""The margin for errors of a prediction takes at most this share of the time that is left."""
_EXPIRED = frozenset({Reason.QUEUE_TIMEOUT, Reason.TTFT_DEADLINE, Reason.DEADLINE_QUEUED})
_FAILED = _EXPIRED | {Reason.STEP_FAILED, Reason.POISON}
"""Ends that speak against the service; the others are its clients' doing."""


class AdmissionControl:
    """Who may come in to one model. Only `observe` and what is told of requests change anything."""

    def __init__(self, config: CoreConfig, pool: ModelPool) -> None:
        self._config = config
        self._pool = pool
        self.forecast = Forecast(pool)
        # The control arm is what others do: it has bounds, and nothing else.
        ladder = config.overload if config.static is None else None
        self.controller = Controller(ladder) if ladder is not None else None
        self._misses = Misses()
        self._asked_at: dict[Priority, float] = {}
        self._looked_at = 0.0
        self._looked_at_work = False
        """Something was going on at the last look."""

    @property
    def level(self) -> Level:
        """The degradation level."""
        return self.controller.level if self.controller is not None else Level.NORMAL

    @property
    def pressure(self) -> Pressure:
        """The inputs of the level, as last seen."""
        return self.controller.pressure if self.controller is not None else Pressure()

    def caps(self) -> Caps | None:
        """Return the limits in force for requests that may be trimmed."""
        return self.controller.caps() if self.controller is not None else None

    # Newcomers -----------------------------------------------------------------------------------

    def refusal(self, newcomer: AdmissionRequest, now: float) -> CoreError | None:
        """Return why a newcomer is refused, if so."""
        if newcomer.paced:
            # Its client was granted what it sends, and gets no more credits while there is no room.
            return None
        return (
            self._refused_by_level(newcomer, now)
            or self._full(newcomer, now)
            or self._too_late(newcomer, now)
        )

    def predict(self, newcomer: AdmissionRequest, now: float) -> Prediction | None:
        """Return what a newcomer has to expect, or None while too little is known."""
        ahead, tokens = self._ahead(newcomer, now)
        return self.forecast.predict(newcomer.priority, ahead, (tokens, newcomer.todo_tokens), now)

    def displaced(self, newcomer: AdmissionRequest) -> Sequence | None:
        """Return who has to leave a full queue for a newcomer: the last of the lowest class below its own."""
        if newcomer.paced or not self._over_bound(newcomer):
            return None
        return self._pool.queue.last_below(newcomer.priority)

    def displacement(self, now: float) -> CoreError:
        """Return what those are told who had to leave."""
        return CoreError(
            Reason.SHED,
            "the queue is full, and a request of a higher class took the place",
            retry_after_s=self.retry_after_s(Priority.BATCH, now),
            metadata=self._facts(),
        )

    def retry_after_s(self, priority: Priority, now: float) -> float:
        """Return when a refused client should come back: when what is ahead of its class has drained."""
        ahead, _ = self._ahead(AdmissionRequest(priority=priority), now)
        drain_s = self.forecast.drain_s(ahead, now)
        return _bounded(drain_s if drain_s is not None else 1.0)

    # What becomes of them ------------------------------------------------------------------------

    def asked(self, priority: Priority, now: float) -> None:
        """A newcomer of a class has come, whatever becomes of it."""
        self._asked_at[priority] = now

    def came_in(self, request: Request) -> None:
        """A newcomer is about to be queued."""
        if self.level is Level.OPEN and self.controller is not None and not request.spec.paced:
            self.controller.breaker.probes.add(request.request_id)

    def first_token(self, request: Request, now: float) -> None:
        """A request has its first token."""
        if request.prediction is not None:
            self._misses.add(now, missed=False)
        if self.controller is not None:
            self.controller.breaker.passed(request.request_id)

    def closed(self, request: Request, reason: Reason | None, now: float) -> LogEvent | None:
        """A request has ended; `reason` is that of its failure, None when it ended well or was cancelled.

        Returns what is to be logged: the breaker opens again when a probe has failed.
        """
        if request.got_token:
            return None
        if reason in _EXPIRED and request.prediction is not None:
            self._misses.add(now, missed=True)
        if self.controller is None:
            return None
        if reason in _FAILED:
            return self._event(self.controller.probe_failed(request.request_id, now))
        self.controller.breaker.withdrawn(request.request_id)
        return None

    def fewer_workers(self) -> None:
        """A worker has gone, or takes nothing new."""
        if all(worker.draining for worker in self._pool.workers.values()):
            self.forecast.drain.pause()

    # The level -----------------------------------------------------------------------------------

    def next_look(self) -> float | None:
        """Return when `observe` is due without any other event, or None."""
        if self.controller is None:
            return None
        next_at = self._looked_at + self.controller.config.interval_s
        # Once more when all is over, and until misses are forgotten: what is shown must not stay as it was.
        stale = self._looked_at_work or self.pressure.misses > 0
        return next_at if self.level or stale or self._outstanding() else None

    def observe(self, now: float) -> LogEvent | None:
        """Look at the inputs if it is time to, and move the level; return what is to be logged of that."""
        controller = self.controller
        if controller is None or now < self._looked_at + controller.config.interval_s:
            return None
        self._looked_at = now
        self._looked_at_work = self._outstanding()
        return self._event(controller.observe(self._measure(now), now))

    # Inside --------------------------------------------------------------------------------------

    def _refused_by_level(self, newcomer: AdmissionRequest, now: float) -> CoreError | None:
        controller = self.controller
        if controller is None or self.level < Level.SHED_BATCH:
            return None
        if self.level is Level.OPEN:
            breaker = controller.breaker
            if breaker.admits():
                return None
            retry = max(breaker.open_until - now, self.retry_after_s(newcomer.priority, now))
            return CoreError(
                Reason.BREAKER_OPEN, "the service has no room at all", _bounded(retry), self._facts()
            )
        what = ""
        if self.level >= Level.SHED_STANDARD and newcomer.priority > Priority.INTERACTIVE:
            what = "nothing but the interactive class"
        elif newcomer.priority is Priority.BATCH:
            what = "none of the batch class"
        elif newcomer.may_shed and newcomer.prompt_tokens > controller.config.shed_prompt_tokens:
            what = f"no prompts of more than {controller.config.shed_prompt_tokens} tokens that may be shed"
        if not what:
            return None
        return CoreError(
            Reason.SHED,
            f"at level {int(self.level)} of load the service takes {what}",
            max(self.retry_after_s(newcomer.priority, now), controller.config.dwell_s),
            self._facts(),
        )

    def _over_bound(self, newcomer: AdmissionRequest) -> str | None:
        """Return the bound of the queue that a newcomer would pass, if any."""
        queue, config = self._pool.queue, self._config
        waiting = queue.bounded_requests()
        over = waiting + newcomer.pending_requests - config.max_waiting_requests
        # Of those on their way, as many as there are places will not wait.
        if waiting >= config.max_waiting_requests or (over >= 0 and over >= self._places()):
            return f"{config.max_waiting_requests} requests"
        tokens, limit = queue.bounded_tokens() + newcomer.pending_tokens, config.max_waiting_tokens
        if limit is not None and tokens > 0 and tokens + newcomer.prompt_tokens > limit:
            return f"{limit} tokens"
        return None

    def _places(self) -> int:
        """Return how many sequences the workers have places for now."""
        workers = self._pool.workers.values()
        return sum(max(0, worker.max_num_seqs - worker.num_seqs) for worker in workers if not worker.draining)

    def _full(self, newcomer: AdmissionRequest, now: float) -> CoreError | None:
        bound = self._over_bound(newcomer)
        if bound is None or self._pool.queue.last_below(newcomer.priority) is not None:
            return None
        return CoreError(
            Reason.QUEUE_FULL,
            f"the queue is full ({bound})",
            retry_after_s=self.retry_after_s(newcomer.priority, now),
            metadata=self._facts(),
        )

    def _too_late(self, newcomer: AdmissionRequest, now: float) -> CoreError | None:
        """Return the refusal of a newcomer that would miss a deadline. An idle service always tries."""
        deadlines = (newcomer.queue_deadline, newcomer.ttft_deadline, newcomer.deadline)
        if self.controller is None or deadlines == (None, None, None) or not self._outstanding():
            return None
        expected = self.predict(newcomer, now)
        if expected is None:
            return None
        step_s = self.forecast.token_s(now)
        end_s = expected.ttft_s + (newcomer.output_tokens - 1) * step_s
        queue_deadline = newcomer.queue_deadline
        if queue_deadline is not None:
            # No wait at all means: in the next plan or never.
            queue_deadline = max(queue_deadline, self._pool.looks_until(now) + step_s)
        for name, at, seconds, error_s in (
            ("queue timeout", queue_deadline, expected.wait_s, expected.wait_error_s),
            ("TTFT deadline", newcomer.ttft_deadline, expected.ttft_s, expected.ttft_error_s),
            ("deadline", newcomer.deadline, end_s, expected.ttft_error_s),
        ):
            if at is None:
                continue
            left_s = at - now
            if seconds + min(error_s, _MOST_MARGIN * max(0.0, left_s)) > left_s:
                return CoreError(
                    Reason.DEADLINE_INFEASIBLE,
                    f"it would take {seconds:.3f} s, its {name} leaves {left_s:.3f} s",
                    _bounded(min(seconds - left_s + error_s, expected.wait_s)),
                    {**self._facts(), "predicted_ms": str(round(seconds * 1000))},
                )
        return None

    def _ahead(self, newcomer: AdmissionRequest, now: float) -> tuple[int, int]:
        """Return how many go before a newcomer, and how many tokens they have to compute."""
        waiting, tokens = self._pool.queue.ahead_of(newcomer, now)
        return waiting + newcomer.pending_requests, tokens + newcomer.pending_tokens

    def _outstanding(self) -> bool:
        """Return whether anything runs, or waits that a worker can hold."""
        pool = self._pool
        if pool.queue.num_servable:
            return True
        return len(pool.idle) < len(pool.workers) and any(w.pipeline.in_flight for w in pool.workers.values())

    def _measure(self, now: float) -> Pressure:
        """Return the inputs of the moment."""
        pool, config = self._pool, self._config
        assert self.controller is not None
        requests = tokens = 0
        backlog = []
        for queue in pool.queue.classes.values():
            # Who waits for a worker that is away is no load on those that are here.
            class_requests, class_tokens = queue.bounded_servable()
            requests += class_requests
            tokens += class_tokens
            share = requests / config.max_waiting_requests
            if config.max_waiting_tokens is not None:
                share = max(share, tokens / config.max_waiting_tokens)
            backlog.append(share)
        waits = [
            self._wait_share(priority, timeout_s, now) if timeout_s else 0.0
            for priority, timeout_s in self.controller.config.queue_timeout_s.items()
        ]
        active = sum(worker.blocks.pool.active for worker in pool.workers.values())
        total = sum(worker.info.geometry.num_blocks for worker in pool.workers.values())
        return Pressure(
            backlog=(backlog[0], backlog[1], backlog[2]),
            wait=(waits[0], max(waits)),
            blocks=active / total if total and pool.queue.num_servable else 0.0,
            misses=self._misses.share(now),
            stalled_s=self._stalled_s(now),
        )

    def _stalled_s(self, now: float) -> float:
        """Return for how long the report of every worker is overdue; 0 while it is not known when one is due.

        Where no worker is there, none is due: whoever looks after workers brings one back, or ends the wait.
        """
        busy = [worker for worker in self._pool.workers.values() if worker.pipeline.in_flight]
        if self._pool.idle or any(one.pace.step_times.num_observations < ENOUGH_STEPS for one in busy):
            return 0.0
        return max(0.0, now - max((worker.ends_at() for worker in busy), default=now))

    def _wait_share(self, priority: Priority, timeout_s: float, now: float) -> float:
        # Nobody is turned away for the sake of a class that nobody asks for.
        if not self._pool.queue.num_servable or now - self._asked_at.get(priority, -math.inf) > _DEMAND_S:
            return 0.0
        expected = self.predict(AdmissionRequest(priority=priority), now)
        return expected.wait_s / timeout_s if expected is not None else 0.0

    def _facts(self) -> dict[str, str]:
        queue = self._pool.queue
        return {
            "level": str(int(self.level)),
            "waiting_requests": str(queue.num_fresh),
            "waiting_tokens": str(queue.num_tokens),
        }

    def _event(self, change: Transition | None) -> LogEvent | None:
        if change is None:
            return None
        moved = change.former is not change.level
        fields: dict[str, object] = {
            "model": self._pool.model,
            "cause": change.cause,
            **self.pressure.fields(),
        }
        if moved:
            fields |= {"former_level": int(change.former), "new_level": int(change.level)}
        return LogEvent("level_changed" if moved else f"breaker_{change.cause}", fields)


def _bounded(seconds: float) -> float:
    return min(MAX_RETRY_S, max(MIN_RETRY_S, seconds))
