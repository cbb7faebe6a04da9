"""One account per request, from its arrival to its one end.

Arrivals equal the sum of outcomes and the live requests at all times, whatever refuses or ends a
request and however early.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Final

import grpc
import structlog
from octavo.protocol.steps import Priority, StepTiming

from scheduler_svc.core.effects import FinishChoice, RequestAccepted
from scheduler_svc.core.events import NewRequest
from scheduler_svc.errors import CODES
from scheduler_svc.observe.metrics import SchedulerMetrics
from scheduler_svc.observe.recent import RecentSum, RecentTimes
from scheduler_svc.requests.tenants import QuotaLease, Tenants

_log = structlog.get_logger()

# Not the client's fault, and no bug: there was no room, no time, or nobody to do it.
_FOR_LOAD: Final = frozenset(
    {
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNAVAILABLE,
    }
)
_REFUSALS_LOGGED_EVERY_S: Final = 1.0


class Accounts:
    """All requests that ever came in, by how they ended, and those that are still here."""

    def __init__(self, metrics: SchedulerMetrics, clock: Callable[[], float]) -> None:
        self.metrics = metrics
        self.clock = clock
        self.tenants = Tenants(metrics)
        self.arrivals = 0
        self.live = 0
        self.outcomes: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()
        """Refused for want of room since they were last logged."""
        self.recent_requests = RecentSum()
        self.recent_prompt_tokens = RecentSum()
        self.recent_output_tokens = RecentSum()
        self.recent_ttft_s = RecentTimes()
        self.recent_queue_s = RecentTimes()
        self.recent_refusals = RecentSum()
        self.recent_itl_s = RecentTimes()
        self.recent_bubble_s: dict[str, RecentSum] = {}
        """Time that each worker waited for a plan while it had sequences."""

    def open(self, transport: str) -> RequestAccount:
        """Account for an arrival."""
        self.arrivals += 1
        self.live += 1
        self.metrics.arrivals.labels(transport).inc()
        now = self.clock()
        self.recent_requests.add(now, 1)
        return RequestAccount(self, transport, now)

    def refused(self, transport: str, priority: int, tenant: str, reason: str) -> None:
        """Account for an arrival that there is no room for: counters, and one log line a second for all."""
        self.arrivals += 1
        self.outcomes[reason] += 1
        now = self.clock()
        self.recent_requests.add(now, 1)
        self.recent_refusals.add(now, 1)
        self.metrics.refused(transport, priority, reason)
        self.metrics.tenant_outcomes.labels(tenant, reason).inc()
        if not self._refusals:
            asyncio.get_running_loop().call_later(_REFUSALS_LOGGED_EVERY_S, self._log_refusals)
        self._refusals[reason] += 1

    def step(self, worker_id: str, timing: StepTiming) -> None:
        """Account for a step of a worker."""
        bubble_s = timing.bubble_us / 1e6
        self.recent_bubble_s.setdefault(worker_id, RecentSum()).add(self.clock(), bubble_s)
        self.metrics.step.labels(worker_id).observe(timing.execute_us / 1e6)
        self.metrics.bubble.labels(worker_id).inc(bubble_s)

    def _log_refusals(self) -> None:
        refusals, self._refusals = self._refusals, Counter()
        _log.info("requests_refused", **refusals)


class RequestAccount:
    """The account of one request; ends as the one log line about it. Never holds its text."""

    def __init__(self, accounts: Accounts, transport: str, now: float) -> None:
        self.arrival = now
        self.request_id = ""
        self.tenant = ""
        """Empty until its key is known to be good."""
        self.lease: QuotaLease | None = None
        """What it takes of its tenant's quotas, once it has been let in."""
        self._accounts = accounts
        self._transport = transport
        self._model = ""
        self._priority = Priority.STANDARD
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._completion_tokens = 0
        self._choices = 0
        self._trimmed_tokens = 0
        self._expected: RequestAccepted | None = None
        self._accepted_at = now
        self._ttft_s: float | None = None
        self._finish: FinishChoice | None = None
        self._ended = False

    def admitted(self, request: NewRequest, trimmed_tokens: int, *, clamped: bool) -> None:
        """The request is known to be right, and goes to the core.

        Args:
            trimmed_tokens: that were cut off its prompt under load.
            clamped: whether its max_tokens was lowered under load.
        """
        accounts, now = self._accounts, self._accounts.clock()
        self._trimmed_tokens = trimmed_tokens
        accounts.metrics.trimmed_tokens.inc(trimmed_tokens)
        if clamped:
            accounts.metrics.clamped.inc()
        self._model = request.model
        self._priority = request.priority
        self._prompt_tokens = len(request.prompt_token_ids)
        if self.lease is not None:
            resumed_tokens = sum(map(len, request.resumed.values()))
            self.lease.tokenized(self._prompt_tokens + resumed_tokens, now)
        accounts.metrics.tokenize.observe(now - self.arrival)
        accounts.metrics.prompt_tokens.inc(self._prompt_tokens)
        accounts.recent_prompt_tokens.add(now, self._prompt_tokens)

    def accepted(self, accepted: RequestAccepted) -> None:
        """The core has taken the request, and says what it expects."""
        self._expected = accepted
        self._accepted_at = self._accounts.clock()

    def first_token(self, now: float) -> None:
        """A choice has its first token."""
        if self._ttft_s is None:
            self._ttft_s = now - self.arrival
            if self._expected is not None and self._expected.estimated_ttft_s is not None:
                error_s = now - self._accepted_at - self._expected.estimated_ttft_s
                self._accounts.metrics.prediction_error.labels("ttft").observe(error_s)
            self._accounts.recent_ttft_s.add(now, self._ttft_s)
            if self.lease is not None:
                self.lease.started(now)

    def choice_ended(self, finish: FinishChoice, completion_tokens: int) -> None:
        """A choice has ended with this many tokens shown."""
        self._choices += 1
        self._completion_tokens += completion_tokens
        self._cached_tokens += finish.cached_tokens
        metrics, timings = self._accounts.metrics, finish.timings
        if timings.preemptions:
            metrics.preemptions.inc(timings.preemptions)
        if timings.recoveries:
            metrics.recoveries.inc(timings.recoveries)
        if self._finish is None or finish.choice < self._finish.choice:
            self._finish = finish

    def now(self) -> float:
        """Return the time, in monotonic seconds."""
        return self._accounts.clock()

    def end(self, outcome: str) -> None:
        """Close the account. Later calls change nothing: the first end is the one that counts."""
        if self._ended:
            return
        self._ended = True
        accounts = self._accounts
        now = accounts.clock()
        accounts.live -= 1
        accounts.outcomes[outcome] += 1
        metrics, priority = accounts.metrics, self._priority.name.lower()
        metrics.outcomes.labels(self._model, priority, outcome).inc()
        if self._ttft_s is None and CODES.get(outcome) in _FOR_LOAD:
            accounts.recent_refusals.add(now, 1)
        if self.tenant:
            metrics.tenant_outcomes.labels(self.tenant, outcome).inc()
        if self.lease is not None:
            self.lease.end(now)
        metrics.duration.labels(priority).observe(now - self.arrival)
        metrics.cached_tokens.inc(self._cached_tokens)
        if self._ttft_s is not None:
            metrics.ttft.labels(priority).observe(self._ttft_s)
        if self._finish is not None:
            queue_s = self._finish.timings.queue_s
            metrics.queue.labels(priority).observe(queue_s)
            accounts.recent_queue_s.add(now, queue_s)
            if self._expected is not None and self._expected.estimated_wait_s is not None:
                error_s = queue_s - self._expected.estimated_wait_s
                metrics.prediction_error.labels("wait").observe(error_s)
        self._log(outcome, now)

    def _log(self, outcome: str, now: float) -> None:
        timings = self._finish.timings if self._finish is not None else None
        _log.info(
            "request",
            request_id=self.request_id,
            outcome=outcome,
            tenant=self.tenant,
            transport=self._transport,
            model=self._model,
            priority=self._priority.name.lower(),
            choices=self._choices,
            prompt_tokens=self._prompt_tokens,
            trimmed_tokens=self._trimmed_tokens,
            degradation_level=self._expected.level if self._expected is not None else None,
            cached_tokens=self._cached_tokens,
            completion_tokens=self._completion_tokens,
            queue_ms=_ms(timings.queue_s) if timings is not None else None,
            ttft_ms=_ms(self._ttft_s) if self._ttft_s is not None else None,
            tpot_ms=_ms(timings.tpot_s) if timings is not None else None,
            total_ms=_ms(now - self.arrival),
            preemptions=timings.preemptions if timings is not None else 0,
            recoveries=timings.recoveries if timings is not None else 0,
        )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
