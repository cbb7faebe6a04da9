"""One account per request, from its arrival to its one end.

Arrivals equal the sum of outcomes and the live requests at all times, whatever refuses or ends a
request and however early.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Final

import grpc
import structlog
from octavo.protocol.steps import Priority

from scheduler_svc.core.effects import FinishChoice
from scheduler_svc.core.events import NewRequest
from scheduler_svc.errors import CODES
from scheduler_svc.metrics import Metrics
from scheduler_svc.recent import RecentTimes
from scheduler_svc.tenants import Seat

_log = structlog.get_logger()

RATE_WINDOW_S: Final = 10.0
_MAX_SAMPLES: Final = 100_000
# Not the client's fault, and no bug: there was no room, no time, or nobody to do it.
_FOR_LOAD: Final = frozenset(
    {
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNAVAILABLE,
    }
)


class Recent:
    """Values of the last ten seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=_MAX_SAMPLES)

    def add(self, now: float, value: float) -> None:
        """Take a value."""
        samples = self._samples
        samples.append((now, value))
        while samples[0][0] < now - RATE_WINDOW_S:
            samples.popleft()

    def values(self, now: float) -> list[float]:
        """Return the values, oldest first."""
        return [value for at, value in self._samples if at >= now - RATE_WINDOW_S]

    def per_s(self, now: float) -> float:
        """Return their sum per second."""
        return sum(self.values(now)) / RATE_WINDOW_S

    def quantile(self, share: float, now: float) -> float:
        """Return a quantile, 0 when there are no values."""
        values = sorted(self.values(now))
        return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0


class Accounts:
    """All requests that ever came in, by how they ended, and those that are still here."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float]) -> None:
        self.metrics = metrics
        self.clock = clock
        self.arrivals = 0
        self.live = 0
        self.outcomes: Counter[str] = Counter()
        self.recent_requests = Recent()
        self.recent_prompt_tokens = Recent()
        self.recent_output_tokens = Recent()
        self.recent_ttft_s = Recent()
        self.recent_queue_s = Recent()
        self.recent_refusals = Recent()
        self.recent_itl_s = RecentTimes()

    def open(self, transport: str) -> RequestRecord:
        """Account for an arrival."""
        self.arrivals += 1
        self.live += 1
        self.metrics.arrivals.labels(transport).inc()
        now = self.clock()
        self.recent_requests.add(now, 1)
        return RequestRecord(self, transport, now)


class RequestRecord:
    """The account of one request; ends as the one log line about it. Never holds its text."""

    def __init__(self, accounts: Accounts, transport: str, now: float) -> None:
        self.arrival = now
        self.request_id = ""
        self.tenant = ""
        """Empty until its key is known to be good."""
        self.seat: Seat | None = None
        """Its place among its tenant's requests, once it has one."""
        self._accounts = accounts
        self._transport = transport
        self._model = ""
        self._priority = Priority.STANDARD
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._completion_tokens = 0
        self._resumed_tokens = 0
        self._choices = 0
        self._ttft_s: float | None = None
        self._finish: FinishChoice | None = None
        self._ended = False

    def admitted(self, request: NewRequest) -> None:
        """The request is known to be right, and goes to the core."""
        accounts, now = self._accounts, self._accounts.clock()
        self._model = request.model
        self._priority = request.priority
        self._prompt_tokens = len(request.prompt_token_ids)
        self._resumed_tokens = sum(map(len, request.resumed.values()))
        if self.seat is not None:
            self.seat.tokenized(self._prompt_tokens, now)
        accounts.metrics.tokenize.observe(now - self.arrival)
        accounts.metrics.prompt_tokens.inc(self._prompt_tokens)
        accounts.recent_prompt_tokens.add(now, self._prompt_tokens)

    def first_token(self, now: float) -> None:
        """A choice has its first token."""
        if self._ttft_s is None:
            self._ttft_s = now - self.arrival
            self._accounts.recent_ttft_s.add(now, self._ttft_s)
            if self.seat is not None:
                self.seat.started(now)

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
        if self._finish is None or finish.choice == 0:
            self._finish = finish

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
        if self.seat is not None:
            self.seat.end(*self._computed(), now)
        metrics.duration.labels(priority).observe(now - self.arrival)
        metrics.cached_tokens.inc(self._cached_tokens)
        if self._ttft_s is not None:
            metrics.ttft.labels(priority).observe(self._ttft_s)
        if self._finish is not None:
            queue_s = self._finish.timings.queue_s
            metrics.queue.labels(priority).observe(queue_s)
            accounts.recent_queue_s.add(now, queue_s)
        self._log(outcome, now)

    def _computed(self) -> tuple[int, int]:
        """Return prompt and output tokens that the tenant is charged: none before a first token."""
        if self._ttft_s is None:
            return 0, 0
        cached = self._finish.cached_tokens if self._finish is not None else 0
        return self._prompt_tokens - cached, max(0, self._completion_tokens - self._resumed_tokens)

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
