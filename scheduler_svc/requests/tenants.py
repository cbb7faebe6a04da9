"""The live requests of each tenant, and whether one more fits its quotas.

Before a request is tokenized, tokens are reserved for it on an estimate, which is corrected as soon as its
prompt is known. What workers report as computed is charged as it comes, to the reservation as long as
that lasts; what is left of it is given back at the end. Each of these costs the same however much is
going on, and only tenants that exist are remembered.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator
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
_REFUSALS_PER_S: Final = 100.0
"""Of one tenant or session, told at once; each costs the service what a small request does."""
_LONGEST_PAUSE_S: Final = 10.0


class TokenEstimate(NamedTuple):
    """About what a request will take."""

    prompt: int
    output: int | None
    """Tokens of each choice, resumed ones included. None when nothing bounds it."""
    choices: int = 1
    resumed: int = 0
    """Output tokens that it comes with, of all choices: they are computed as prompts are."""
    text_bytes: int = 0
    """Input for the tokenizer."""

    @property
    def to_prefill(self) -> int:
        """Tokens to compute before there is a new one."""
        return self.prompt + self.resumed


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


class RefusalPace:
    """How long refusals wait before they are told: not at all, unless a flood of them comes.

    Whoever asks again at once would else take up the service with refusing.
    """

    def __init__(self) -> None:
        self._told_until = -math.inf
        """When those so far have been told, at the pace they are told at."""

    def pause_s(self, now: float, refusals: int = 1) -> float:
        """Return how long to wait with so many more."""
        self._told_until = max(self._told_until, now - 1.0) + refusals / _REFUSALS_PER_S
        return min(_LONGEST_PAUSE_S, max(0.0, self._told_until - now))


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
        self.text_bytes = 0
        """Input that tokenizers have worked on."""
        self._metrics = metrics
        self._mean_output = _OUTPUT_TOKENS
        self._ends = RateEstimator()
        self._starts = RateEstimator()
        self._started_tokens = RateEstimator()
        self._requests = _bucket(None, tenant.quotas.requests_per_minute, now)
        self._tokens = _bucket(None, tenant.quotas.tokens_per_minute, now)
        self._text = _bucket(None, tenant.quotas.tokenizer_bytes_per_minute, now)
        self.credits = 0
        """Requests that its paced sessions may send, and those sent that are not counted yet."""
        self.refusals = RefusalPace()
        self._paced: deque[Callable[[], None]] = deque()
        """What grants each of its paced sessions more."""

    def retune(self, tenant: Tenant, now: float) -> None:
        """Take in what the key file says of the tenant now; what is going on stays counted."""
        self.tenant = tenant
        self._requests = _bucket(self._requests, tenant.quotas.requests_per_minute, now)
        self._tokens = _bucket(self._tokens, tenant.quotas.tokens_per_minute, now)
        self._text = _bucket(self._text, tenant.quotas.tokenizer_bytes_per_minute, now)

    def take(self, estimate: TokenEstimate, now: float) -> QuotaLease:
        """Charge one more request to the quotas and return its lease.

        Raises:
            ServiceError: a quota does not allow it; says which, and when it will.
        """
        error = self.refusal(estimate, now)
        if error is not None:
            self.count_refusal(error)
            raise error
        self.arrivals += 1
        if self._requests is not None:
            self._requests.take(1, now)
        return QuotaLease(self, estimate, self._tokens_of(estimate), now)

    def refusal(self, estimate: TokenEstimate, now: float) -> ServiceError | None:
        """Return which quota a request would pass, and when it will not; None if it fits."""
        quotas = self.tenant.quotas
        most = min(quotas.requests_in_flight or math.inf, quotas.waiting_requests or math.inf)
        if estimate.choices > most:
            problem = f"must be at most {most}, as many requests as tenant {self.tenant.name} may have"
            return ServiceError.invalid(("sampling.n", f"{problem} at once, got {estimate.choices}"))
        found = self._excess(estimate, now)
        return self._exceeded(*found) if found is not None else None

    def check_text(self, size_bytes: int, now: float) -> None:
        """Refuse to tokenize more than the quota allows.

        Raises:
            ServiceError: it is used up; says when this much fits.
        """
        found = self._text_excess(size_bytes, now)
        if found is not None:
            self._metrics.quota_refusals.labels(self.tenant.name, found[0]).inc()
            raise self._exceeded(*found)

    def _exceeded(self, quota: str, limit: int, retry_after_s: float) -> ServiceError:
        return ServiceError(
            "QUOTA_EXCEEDED",
            f"tenant {self.tenant.name} has reached its quota of {limit} {quota.replace('_', ' ')}",
            # Rounded up: who comes back then must not come too early.
            retry_after_s=math.ceil(retry_after_s * 1000 + 1) / 1000,
            metadata={"tenant": self.tenant.name, "quota": quota, "limit": str(limit)},
        )

    def count_refusal(self, error: ServiceError) -> None:
        """Count a request that came and was refused for a quota, or asks for what none allows."""
        self.arrivals += 1
        if error.reason != "QUOTA_EXCEEDED":
            return
        self.over_quota += 1
        self._metrics.quota_refusals.labels(self.tenant.name, error.metadata["quota"]).inc()

    def _tokens_of(self, estimate: TokenEstimate) -> int:
        output = self._mean_output if estimate.output is None else float(estimate.output)
        return estimate.prompt + max(estimate.resumed, round(output * estimate.choices))

    def _excess(self, estimate: TokenEstimate, now: float) -> tuple[str, int, float] | None:
        """Return the quota that one more request would pass, its limit, and when the request fits."""
        quotas, choices, tokens = self.tenant.quotas, estimate.choices, self._tokens_of(estimate)
        limit = quotas.requests_in_flight
        over = self.requests_in_flight + choices - (limit or 0)
        if limit is not None and over > 0:
            return "requests_in_flight", limit, self._ends.time_for(over, now)
        if self._requests is not None and (wait_s := self._requests.wait_s(1, now)) > 0:
            return "requests_per_minute", self._requests.per_minute, wait_s
        if self._tokens is not None and (wait_s := self._tokens.wait_s(tokens, now)) > 0:
            return "tokens_per_minute", self._tokens.per_minute, wait_s
        limit = quotas.waiting_requests
        over = self.waiting_requests + choices - (limit or 0)
        if limit is not None and over > 0:
            return "waiting_requests", limit, self._starts.time_for(over, now)
        limit = quotas.waiting_tokens
        # A prompt that is larger than the quota may wait alone.
        over = self.waiting_tokens + estimate.to_prefill - (limit or 0)
        if limit is not None and self.waiting_tokens and over > 0:
            return "waiting_tokens", limit, self._started_tokens.time_for(over, now)
        return self._text_excess(estimate.text_bytes, now)

    def _text_excess(self, size_bytes: int, now: float) -> tuple[str, int, float] | None:
        if self._text is not None and (wait_s := self._text.wait_s(size_bytes, now)) > 0:
            return "tokenizer_bytes_per_minute", self._text.per_minute, wait_s
        return None

    # Paced sessions ------------------------------------------------------------------------------

    def join(self, top_up: Callable[[], None]) -> None:
        """One more paced session is open; `top_up` is called when there may be more credits for it."""
        self._paced.append(top_up)

    def leave(self, top_up: Callable[[], None], unused: int) -> None:
        """A paced session has ended, with so many unused credits."""
        self._paced.remove(top_up)
        self.credits -= unused
        self._top_up()

    @property
    def is_paced(self) -> bool:
        """It has paced sessions."""
        return bool(self._paced)

    def grantable(self, unused: int) -> int | None:
        """Return how many more credits a paced session may get that has so many; None is without limit.

        A request that may come is as good as here, so that all sessions together keep to the quotas. None
        has more of them unused than its share.
        """
        quotas = self.tenant.quotas
        left = [
            limit - taken
            for limit, taken in (
                (quotas.requests_in_flight, self.requests_in_flight),
                (quotas.waiting_requests, self.waiting_requests),
            )
            if limit is not None
        ]
        if not left:
            return None
        bound = min(quotas.requests_in_flight or math.inf, quotas.waiting_requests or math.inf)
        share = max(1, int(bound) // max(1, len(self._paced)))
        return max(0, min(min(left) - self.credits, share - unused))

    def _top_up(self) -> None:
        for top_up in tuple(self._paced):
            top_up()
        self._paced.rotate(-1)

    # For leases ----------------------------------------------------------------------------------

    def admit(self, choices: int, prompt_tokens: int, tokens: int, now: float) -> None:
        """One more request is live."""
        self.requests_in_flight += choices
        self.waiting_requests += choices
        self.waiting_tokens += prompt_tokens
        self.take_tokens(tokens, now)

    def take_tokens(self, tokens: int, now: float) -> None:
        """Take tokens off the quota; give them back when negative."""
        if self._tokens is not None:
            self._tokens.take(tokens, now)

    def take_text(self, size_bytes: int, now: float) -> None:
        """Take bytes for tokenizers off the quota; give them back when negative."""
        if self._text is not None:
            self._text.take(size_bytes, now)

    def started(self, choices: int, prompt_tokens: int, now: float) -> None:
        """A request waits no more."""
        self.waiting_requests -= choices
        self.waiting_tokens -= prompt_tokens
        self._starts.add(choices, now)
        self._started_tokens.add(prompt_tokens, now)
        self._top_up()

    def ended(self, choices: int, output_tokens: int, now: float) -> None:
        """A request is over; so many output tokens were computed for it."""
        self.requests_in_flight -= choices
        self._ends.add(choices, now)
        if output_tokens:
            self._mean_output += (output_tokens / choices - self._mean_output) * _LEARNING_RATE
        self._top_up()

    def account(self, prompt_tokens: int, output_tokens: int) -> None:
        """Add to what was computed for it in all."""
        self.prompt_tokens += prompt_tokens
        self.output_tokens += output_tokens
        self._metrics.tenant_tokens.labels(self.tenant.name, "prompt").inc(prompt_tokens)
        self._metrics.tenant_tokens.labels(self.tenant.name, "output").inc(output_tokens)


class QuotaLease:
    """What one live request takes of its tenant's quotas, until it ends."""

    __slots__ = ("_choices", "_state", "_taken", "_to_prefill", "_waits", "output_tokens", "prompt_tokens")

    def __init__(self, state: TenantState, estimate: TokenEstimate, tokens: int, now: float) -> None:
        self.prompt_tokens = 0
        """Computed so far: prompt and resumed tokens,"""
        self.output_tokens = 0
        """and output, shown or not."""
        self._state = state
        self._choices = estimate.choices
        self._to_prefill = estimate.to_prefill
        self._taken = tokens
        """Of the quota: what is reserved, or was computed if that is more."""
        self._waits = True
        state.admit(self._choices, self._to_prefill, tokens, now)

    def tokenized(self, to_prefill: int, now: float) -> None:
        """The prompt is known now; with the resumed tokens it has so many."""
        more = to_prefill - self._to_prefill
        self._to_prefill = to_prefill
        self._state.waiting_tokens += more
        self._take(more, now)

    def started(self, now: float) -> None:
        """There is a first token."""
        if self._waits:
            self._waits = False
            self._state.started(self._choices, self._to_prefill, now)

    def computed(self, prompt_tokens: int, output_tokens: int, now: float) -> None:
        """A step has computed this much for the request."""
        self.prompt_tokens += prompt_tokens
        self.output_tokens += output_tokens
        over = self.prompt_tokens + self.output_tokens - self._taken
        if over > 0:
            self._take(over, now)

    def end(self, now: float) -> None:
        """The request is over: what was reserved and not computed is free again. Call it once."""
        self.started(now)
        self._take(self.prompt_tokens + self.output_tokens - self._taken, now)
        self._state.account(self.prompt_tokens, self.output_tokens)
        self._state.ended(self._choices, self.output_tokens, now)

    def _take(self, more: int, now: float) -> None:
        self._taken += more
        self._state.take_tokens(more, now)


class TextLease:
    """What a text for the tokenizer takes of its tenant's quota.

    It is taken at once, so that texts that wait cannot fit together which do not fit one by one, and given
    back if no tokenizer gets to it.
    """

    __slots__ = ("_clock", "_state", "_taken")

    def __init__(self, state: TenantState, size_bytes: int, clock: Callable[[], float]) -> None:
        self._state = state
        self._taken = size_bytes
        self._clock = clock
        state.take_text(size_bytes, clock())

    def charge(self, size_bytes: int) -> None:
        """A tokenizer begins to work on the text, of which there is this much. Call it once at most."""
        self._state.take_text(size_bytes - self._taken, self._clock())
        self._state.text_bytes += size_bytes
        self._taken = 0

    def end(self) -> None:
        """Nothing more comes. Call it once."""
        if self._taken:
            self._state.take_text(-self._taken, self._clock())


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

    def charge_late(self, name: str, prompt_tokens: int, output_tokens: int, now: float) -> None:
        """Charge what was computed of a request that had ended."""
        state = self._states.get(name)
        if state is not None:
            state.take_tokens(prompt_tokens + output_tokens, now)
            state.account(prompt_tokens, output_tokens)

    def keep(self, names: Collection[str]) -> None:
        """Forget tenants that are not among these and have nothing going on."""
        self._states = {
            name: state
            for name, state in self._states.items()
            if name in names or state.requests_in_flight or state.is_paced
        }


def _bucket(former: TokenBucket | None, per_minute: int | None, now: float) -> TokenBucket | None:
    if per_minute is None:
        return None
    if former is None:
        return TokenBucket(per_minute, now)
    former.resize(per_minute, now)
    return former
