"""The live requests of each tenant, and whether one more fits its quotas.

A request is charged before it is tokenized, on an estimate; the estimate is corrected as soon as its
prompt is known and again when it has ended. Each of these costs the same however much is going on, and
only tenants that exist are remembered.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Final, NamedTuple

from octavo.keys import Tenant

from scheduler_svc.errors import ServiceError
from scheduler_svc.observe.metrics import SchedulerMetrics

# What a request without max_tokens is taken to generate before there is experience.
_OUTPUT_TOKENS: Final = 256.0
_LEARNING_RATE: Final = 0.1
_WINDOW_S: Final = 10.0
_RETRY_S: Final = (0.05, 60.0)
_UNKNOWN_RETRY_S: Final = 1.0


class TokenEstimate(NamedTuple):
    """About how many tokens a request will take. `output` is None when nothing bounds it."""

    prompt: int
    output: int | None
    choices: int = 1


class TokenBucket:
    """A minute's worth of something: what is taken comes back evenly, within a minute.

    More may be taken than there is, and then it takes longer until something fits again: so what
    was estimated too low is made up for.
    """

    __slots__ = ("_at", "_level", "per_minute")

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def wait_s(self, amount: float, now: float) -> float:
        """Return how long it takes until this much fits; 0 when it does. More than a minute's worth fits
        when nothing is taken.
        """
        missing = min(amount, self.per_minute) - self._level_at(now)
        return max(0.0, missing * 60 / self.per_minute)

    def take(self, amount: float, now: float) -> None:
        """Take this much; give it back when negative."""
        self._refill(now)
        self._level = min(float(self.per_minute), self._level - amount)

    def resize(self, per_minute: int, now: float) -> None:
        """Change the size; what is taken stays taken."""
        self._refill(now)
        self._level += per_minute - self.per_minute
        self.per_minute = per_minute

    def _level_at(self, now: float) -> float:
        # With a time before the last change (as of an arrival) nothing has come back since.
        gained = max(0.0, now - self._at) * self.per_minute / 60
        return min(float(self.per_minute), self._level + gained)

    def _refill(self, now: float) -> None:
        self._level = self._level_at(now)
        self._at = max(now, self._at)


class RateEstimator:
    """How fast something goes, lately: an amount that fades within some ten seconds."""

    __slots__ = ("_amount", "_at", "_since")

    def __init__(self) -> None:
        self._amount = 0.0
        self._at = 0.0
        self._since: float | None = None

    def add(self, amount: float, now: float) -> None:
        """Take note of what happened now."""
        if self._since is None:
            self._since = now
        self._amount = self._amount * math.exp((self._at - now) / _WINDOW_S) + amount
        self._at = now

    def time_for(self, amount: float, now: float) -> float:
        """Return how long this much takes at this pace, within bounds that make a retry delay."""
        if self._since is None:
            return _UNKNOWN_RETRY_S
        # In the first seconds the window is as long as the record, so that a young pace is not too slow.
        covered_s = _WINDOW_S * -math.expm1(-max(now - self._since, 0.5) / _WINDOW_S)
        rate = self._amount * math.exp((self._at - now) / _WINDOW_S) / covered_s
        low, high = _RETRY_S
        return min(high, max(low, amount / rate)) if rate > 1e-6 else _UNKNOWN_RETRY_S


class TenantState:
    """One tenant: its live requests, what is left of its quotas, and its accounts."""

    def __init__(self, tenant: Tenant, metrics: SchedulerMetrics, now: float) -> None:
        self.tenant = tenant
        self.requests_in_flight = 0
        self.waiting_requests = 0
        self.waiting_tokens = 0
        self.arrivals = 0
        self.over_quota = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self._metrics = metrics
        self._mean_output = _OUTPUT_TOKENS
        self._ends = RateEstimator()
        self._starts = RateEstimator()
        self._started_tokens = RateEstimator()
        self._requests = _bucket(None, tenant.quotas.requests_per_minute, now)
        self._tokens = _bucket(None, tenant.quotas.tokens_per_minute, now)

    def retune(self, tenant: Tenant, now: float) -> None:
        """Take in what the key file says of the tenant now; what is going on stays counted."""
        self.tenant = tenant
        self._requests = _bucket(self._requests, tenant.quotas.requests_per_minute, now)
        self._tokens = _bucket(self._tokens, tenant.quotas.tokens_per_minute, now)

    def take(self, estimate: TokenEstimate, now: float, *, paced: bool) -> QuotaLease:
        """Charge one more request to the quotas and return its lease.

        Raises:
            ServiceError: a quota does not allow it; says which, and when it will.
        """
        error = self.refusal(estimate, now, paced=paced)
        if error is not None:
            self.count_refusal(error)
            raise error
        self.arrivals += 1
        if self._requests is not None:
            self._requests.take(1, now)
        return QuotaLease(self, estimate.prompt, self._tokens_of(estimate), now)

    def refusal(self, estimate: TokenEstimate, now: float, *, paced: bool) -> ServiceError | None:
        """Return which quota a request would pass, and when it will not; None if it fits."""
        found = self._excess(estimate.prompt, self._tokens_of(estimate), now, paced=paced)
        if found is None:
            return None
        quota, limit, retry_after_s = found
        return ServiceError(
            "QUOTA_EXCEEDED",
            f"tenant {self.tenant.name} has reached its quota of {limit} {quota.replace('_', ' ')}",
            # Rounded up: who comes back then must not come too early.
            retry_after_s=math.ceil(retry_after_s * 1000 + 1) / 1000,
            metadata={"tenant": self.tenant.name, "quota": quota, "limit": str(limit)},
        )

    def count_refusal(self, error: ServiceError) -> None:
        """Count a request that came and was refused for a quota."""
        self.arrivals += 1
        self.over_quota += 1
        self._metrics.quota_refusals.labels(self.tenant.name, error.metadata["quota"]).inc()

    def _tokens_of(self, estimate: TokenEstimate) -> int:
        output = self._mean_output if estimate.output is None else float(estimate.output)
        return estimate.prompt + round(output * estimate.choices)

    def _excess(
        self, prompt_tokens: int, tokens: int, now: float, *, paced: bool
    ) -> tuple[str, int, float] | None:
        """Return the quota that one more request would pass, its limit, and when the request fits."""
        quotas = self.tenant.quotas
        limit = quotas.requests_in_flight
        if limit is not None and self.requests_in_flight >= limit:
            over = self.requests_in_flight - limit + 1
            return "requests_in_flight", limit, self._ends.time_for(over, now)
        if self._requests is not None and (wait_s := self._requests.wait_s(1, now)) > 0:
            return "requests_per_minute", self._requests.per_minute, wait_s
        if self._tokens is not None and (wait_s := self._tokens.wait_s(tokens, now)) > 0:
            return "tokens_per_minute", self._tokens.per_minute, wait_s
        if paced:
            # Requests of a paced session wait at the client, for credits.
            return None
        limit = quotas.waiting_requests
        if limit is not None and self.waiting_requests >= limit:
            over = self.waiting_requests - limit + 1
            return "waiting_requests", limit, self._starts.time_for(over, now)
        limit = quotas.waiting_tokens
        # A prompt that is larger than the quota may wait alone.
        if limit is not None and self.waiting_tokens and self.waiting_tokens + prompt_tokens > limit:
            over = self.waiting_tokens + prompt_tokens - limit
            return "waiting_tokens", limit, self._started_tokens.time_for(over, now)
        return None

    # For leases ----------------------------------------------------------------------------------

    def admit(self, prompt_tokens: int, tokens: int, now: float) -> None:
        """One more request is live."""
        self.requests_in_flight += 1
        self.waiting_requests += 1
        self.waiting_tokens += prompt_tokens
        self.charge(tokens, now)

    def charge(self, tokens: int, now: float) -> None:
        """Take tokens off the quota; give them back when negative."""
        if self._tokens is not None:
            self._tokens.take(tokens, now)

    def started(self, prompt_tokens: int, now: float) -> None:
        """A request waits no more."""
        self.waiting_requests -= 1
        self.waiting_tokens -= prompt_tokens
        self._starts.add(1, now)
        self._started_tokens.add(prompt_tokens, now)

    def ended(self, prompt_tokens: int, output_tokens: int, now: float) -> None:
        """A request is over, and this is what was computed for it."""
        self.requests_in_flight -= 1
        self._ends.add(1, now)
        self.prompt_tokens += prompt_tokens
        self.output_tokens += output_tokens
        if output_tokens:
            self._mean_output += (output_tokens - self._mean_output) * _LEARNING_RATE
        self._metrics.tenant_tokens.labels(self.tenant.name, "prompt").inc(prompt_tokens)
        self._metrics.tenant_tokens.labels(self.tenant.name, "output").inc(output_tokens)


class QuotaLease:
    """What one live request takes of its tenant's quotas, until it ends."""

    __slots__ = ("_charged", "_prompt_tokens", "_state", "_waits")

    def __init__(self, state: TenantState, prompt_tokens: int, tokens: int, now: float) -> None:
        self._state = state
        self._prompt_tokens = prompt_tokens
        self._charged = tokens
        self._waits = True
        state.admit(prompt_tokens, tokens, now)

    def tokenized(self, prompt_tokens: int, now: float) -> None:
        """The prompt is known now."""
        more = prompt_tokens - self._prompt_tokens
        self._prompt_tokens = prompt_tokens
        self._state.waiting_tokens += more
        self._charge(self._charged + more, now)

    def started(self, now: float) -> None:
        """There is a first token."""
        if self._waits:
            self._waits = False
            self._state.started(self._prompt_tokens, now)

    def end(self, prompt_tokens: int, output_tokens: int, now: float) -> None:
        """The request is over, and this is what was computed for it. Call it once."""
        self.started(now)
        self._charge(prompt_tokens + output_tokens, now)
        self._state.ended(prompt_tokens, output_tokens, now)

    def _charge(self, tokens: int, now: float) -> None:
        self._state.charge(tokens - self._charged, now)
        self._charged = tokens


class Tenants:
    """All tenants that have had requests and still exist."""

    def __init__(self, metrics: SchedulerMetrics) -> None:
        self._metrics = metrics
        self._states: dict[str, TenantState] = {}

    def __iter__(self) -> Iterator[TenantState]:
        return iter(sorted(self._states.values(), key=lambda state: state.tenant.name))

    def state(self, tenant: Tenant, now: float) -> TenantState:
        """Return a tenant's state under the quotas that it has now."""
        state = self._states.get(tenant.name)
        if state is None:
            state = self._states[tenant.name] = TenantState(tenant, self._metrics, now)
        elif state.tenant is not tenant:
            state.retune(tenant, now)
        return state

    def keep(self, names: Collection[str]) -> None:
        """Forget tenants that are not among these and have nothing going on."""
        self._states = {
            name: state for name, state in self._states.items() if name in names or state.requests_in_flight
        }


def _bucket(former: TokenBucket | None, per_minute: int | None, now: float) -> TokenBucket | None:
    if per_minute is None:
        return None
    if former is None:
        return TokenBucket(per_minute, now)
    former.resize(per_minute, now)
    return former
