"""Quotas with a clock that the test moves."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
from octavo.keys import Quotas, Tenant

from scheduler_svc.errors import ServiceError
from scheduler_svc.observe.metrics import SchedulerMetrics
from scheduler_svc.requests.tenants import (
    QuotaLease,
    RefusalPace,
    Tenants,
    TenantState,
    TextLease,
    TokenEstimate,
)


def state(**quotas: int) -> TenantState:
    return Tenants(SchedulerMetrics()).state(Tenant("acme", quotas=Quotas(**quotas)), 0.0)


def take(
    tenant: TenantState, now: float, prompt: int = 10, output: int | None = 10, **more: int
) -> QuotaLease:
    return tenant.take(TokenEstimate(prompt, output, **more), now)


def end(lease: QuotaLease, prompt: int, output: int, now: float) -> None:
    """End a request of which so much was computed."""
    lease.computed(prompt, output, now)
    lease.end(now)


def refusal(tenant: TenantState, now: float, prompt: int = 10, output: int = 10, **more: int) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        take(tenant, now, prompt, output, **more)
    assert caught.value.reason == "QUOTA_EXCEEDED"
    return caught.value


def test_without_quotas_everything_fits_and_is_counted() -> None:
    tenant = state()
    leases = [take(tenant, 0.0) for _ in range(1000)]
    assert (tenant.requests_in_flight, tenant.waiting_requests, tenant.waiting_tokens) == (1000, 1000, 10_000)
    for lease in leases:
        lease.started(1.0)
        end(lease, 10, 3, 2.0)
    assert (tenant.requests_in_flight, tenant.waiting_requests, tenant.waiting_tokens) == (0, 0, 0)
    assert (tenant.prompt_tokens, tenant.output_tokens) == (10_000, 3000)


def test_requests_in_flight_are_bounded_until_one_ends_and_the_delay_follows_their_pace() -> None:
    tenant = state(requests_in_flight=2)
    first, _ = take(tenant, 0.0), take(tenant, 0.0)
    error = refusal(tenant, 0.0)
    assert error.metadata == {"tenant": "acme", "quota": "requests_in_flight", "limit": "2"}
    assert error.retry_after_s == pytest.approx(1.0, abs=0.01)
    end(first, 10, 10, 0.5)
    take(tenant, 0.5)
    assert refusal(tenant, 0.5).retry_after_s == pytest.approx(0.5, rel=0.1), "one in half a second so far"
    tenant = state(requests_in_flight=2)
    take(tenant, 0.5)
    now = 0.5
    for _ in range(200):
        lease = take(tenant, now)
        now += 0.25
        end(lease, 10, 10, now)
    take(tenant, now)
    delay = refusal(tenant, now).retry_after_s
    assert delay == pytest.approx(0.25, rel=0.1)


def test_quota_holds_when_requests_are_taken_as_of_their_arrival() -> None:
    tenant = state(requests_per_minute=600)
    taken = 0
    for tick in range(6000):
        now = tick / 100
        for at in (now, max(0.0, now - 0.05)):
            while tenant.refusal(TokenEstimate(1, 1), at) is None:
                take(tenant, at)
                taken += 1
    # A minute's worth at once, and what came back meanwhile.
    assert 1190 <= taken <= 1200


def test_requests_per_minute_come_back_evenly_and_the_delay_is_exact() -> None:
    tenant = state(requests_per_minute=30)
    for _ in range(30):
        end(take(tenant, 0.0), 1, 1, 0.0)
    error = refusal(tenant, 0.5)
    assert error.metadata["quota"] == "requests_per_minute"
    assert error.retry_after_s is not None
    with pytest.raises(ServiceError):
        take(tenant, 0.5 + error.retry_after_s - 0.01)
    take(tenant, 0.5 + error.retry_after_s)


def test_tokens_per_minute_are_settled_with_what_was_computed() -> None:
    tenant = state(tokens_per_minute=6000)
    lease = take(tenant, 0.0, prompt=1000, output=4000)
    error = refusal(tenant, 0.0, prompt=1000, output=500)
    assert error.metadata["quota"] == "tokens_per_minute"
    assert error.retry_after_s == pytest.approx(5.0, abs=0.01)
    lease.tokenized(500, 0.0)
    end(take(tenant, 0.0, prompt=1000, output=500), 0, 0, 0.0)
    end(lease, 400, 100, 0.0)
    take(tenant, 0.0, prompt=5000, output=500)


def test_tokens_that_were_estimated_too_low_are_made_up_for() -> None:
    tenant = state(tokens_per_minute=600)
    lease = take(tenant, 0.0, prompt=1, output=1)
    lease.tokenized(1500, 0.0)
    lease.started(0.0)
    end(lease, 1500, 300, 0.0)
    error = refusal(tenant, 0.0, prompt=10, output=90)
    assert error.retry_after_s == pytest.approx(130, abs=0.1)


def test_request_larger_than_a_minutes_tokens_runs_when_nothing_is_taken() -> None:
    tenant = state(tokens_per_minute=600)
    end(take(tenant, 0.0, prompt=5000, output=1000), 5000, 0, 0.0)
    refusal(tenant, 60.0, prompt=5000)
    take(tenant, 560.0, prompt=5000)


def test_output_without_a_bound_is_estimated_from_experience() -> None:
    tenant = state(tokens_per_minute=10_000)
    for _ in range(60):
        lease = take(tenant, 0.0, 1, None)
        lease.started(0.0)
        end(lease, 1, 8, 0.0)
    for _ in range(800):
        take(tenant, 0.0, 1, None)
    with pytest.raises(ServiceError):
        take(tenant, 0.0, 3000, None)


def test_waiting_requests_and_tokens_are_bounded_until_the_first_token() -> None:
    tenant = state(waiting_requests=3, waiting_tokens=100)
    leases = [take(tenant, 0.0, prompt=30) for _ in range(3)]
    assert refusal(tenant, 0.0).metadata["quota"] == "waiting_requests"
    leases[0].started(0.0)
    assert refusal(tenant, 0.0, prompt=50).metadata["quota"] == "waiting_tokens"
    take(tenant, 0.0, prompt=40)


def test_choices_count_as_requests_and_more_than_may_ever_be_are_named_in_the_refusal() -> None:
    tenant = state(requests_in_flight=8, waiting_requests=6)
    lease = take(tenant, 0.0, choices=4)
    assert (tenant.requests_in_flight, tenant.waiting_requests) == (4, 4)
    assert refusal(tenant, 0.0, choices=3).metadata["quota"] == "waiting_requests"
    lease.started(0.0)
    assert refusal(tenant, 0.0, choices=5).metadata["quota"] == "requests_in_flight"
    with pytest.raises(ServiceError) as caught:
        take(tenant, 0.0, choices=7)
    assert caught.value.reason == "INVALID_REQUEST"
    assert [field for field, _ in caught.value.violations] == ["sampling.n"]
    end(lease, 10, 40, 0.0)
    assert (tenant.requests_in_flight, tenant.waiting_requests, tenant.over_quota) == (0, 0, 2)


def test_what_is_computed_is_charged_as_it_comes_and_once() -> None:
    tenant = state(tokens_per_minute=6000)
    lease = take(tenant, 0.0, prompt=100, output=100)
    for _ in range(50):
        lease.computed(0, 100, 0.0)
    # 5,000 of its 200 are computed: nobody waits for the end to find out.
    assert refusal(tenant, 0.0, prompt=600, output=500).retry_after_s == pytest.approx(1.0, abs=0.01)
    lease.end(0.0)
    assert refusal(tenant, 0.0, prompt=600, output=500).retry_after_s == pytest.approx(1.0, abs=0.01)
    take(tenant, 0.0, prompt=500, output=500)


def test_resumed_tokens_are_reserved_and_wait_as_a_prompt_does() -> None:
    tenant = state(tokens_per_minute=6000, waiting_tokens=2000)
    lease = take(tenant, 0.0, prompt=100, output=5000, resumed=4000)
    assert tenant.waiting_tokens == 4100
    assert refusal(tenant, 0.0).metadata["quota"] == "waiting_tokens"
    lease.started(0.0)
    assert refusal(tenant, 0.0, prompt=500, output=500).metadata["quota"] == "tokens_per_minute"
    take(tenant, 0.0, prompt=500, output=400)


def test_what_is_computed_after_the_end_is_charged_to_the_tenant() -> None:
    tenants = Tenants(SchedulerMetrics())
    tenant = tenants.state(Tenant("acme", quotas=Quotas(tokens_per_minute=600)), 0.0)
    take(tenant, 0.0).end(0.0)
    tenants.charge_late("acme", 500, 50, 0.0)
    tenants.charge_late("gone", 1, 1, 0.0)
    assert (tenant.prompt_tokens, tenant.output_tokens) == (500, 50)
    assert refusal(tenant, 0.0, prompt=50, output=50).retry_after_s == pytest.approx(5.0, abs=0.01)


def test_tokenizers_are_charged_by_the_byte() -> None:
    tenant = state(tokenizer_bytes_per_minute=6000)
    tenant.check_text(6000, 0.0)
    TextLease(tenant, 6000, lambda: 0.0).charge(6000)
    assert tenant.text_bytes == 6000
    with pytest.raises(ServiceError) as caught:
        tenant.check_text(100, 0.0)
    assert caught.value.metadata == {"tenant": "acme", "quota": "tokenizer_bytes_per_minute", "limit": "6000"}
    assert refusal(tenant, 0.0, text_bytes=100).metadata["quota"] == "tokenizer_bytes_per_minute"
    take(tenant, 1.0, text_bytes=100)


def test_texts_that_wait_for_a_tokenizer_take_of_the_quota_and_give_it_back() -> None:
    tenant = state(tokenizer_bytes_per_minute=6000)
    waiting = TextLease(tenant, 5000, lambda: 0.0)
    with pytest.raises(ServiceError, match="tokenizer bytes per minute"):
        tenant.check_text(2000, 0.0)
    waiting.end()
    tenant.check_text(6000, 0.0)

    smaller = TextLease(tenant, 6000, lambda: 0.0)
    smaller.charge(4000)
    smaller.end()
    tenant.check_text(2000, 0.0)
    assert tenant.text_bytes == 4000


def test_flood_of_refusals_is_answered_at_a_pace_and_a_few_at_once() -> None:
    pace = RefusalPace()
    pauses = [pace.pause_s(5.0) for _ in range(2000)]
    assert pauses[:100] == [0.0] * 100
    assert pauses[199] == pytest.approx(1.0)
    assert max(pauses) == 10.0
    assert pace.pause_s(60.0) == 0.0
    assert pace.pause_s(120.0, refusals=300) == pytest.approx(2.0)
    assert pace.pause_s(122.0, refusals=0) == 0.0


def test_credits_of_all_paced_sessions_together_keep_to_the_quotas() -> None:
    tenant, unused, rng = state(waiting_requests=4), [0] * 40, random.Random(5)

    def top_up(session: int) -> None:
        more = tenant.grantable(unused[session])
        assert more is not None
        unused[session] += more
        tenant.credits += more

    sessions = [partial(top_up, session) for session in range(40)]
    for session in sessions:
        tenant.join(session)
    for session in sessions:
        session()
    assert sum(unused) == tenant.credits == 4
    started: set[int] = set()
    for _ in range(400):
        session = rng.choice([index for index in range(40) if unused[index]])
        unused[session] -= 1
        lease = take(tenant, 0.0)
        tenant.credits -= 1
        assert tenant.waiting_requests + tenant.credits <= 4
        started.add(session)
        lease.started(0.0)
    assert len(started) == 40, "room goes around"
    for session, left in zip(sessions, unused, strict=True):
        unused[sessions.index(session)] = 0
        tenant.leave(session, left)
    assert not tenant.is_paced


def test_prompt_larger_than_the_waiting_tokens_may_wait_alone() -> None:
    tenant = state(waiting_tokens=100)
    lease = take(tenant, 0.0, prompt=500)
    refusal(tenant, 0.0, prompt=1)
    lease.started(0.0)
    take(tenant, 0.0, prompt=500)


def test_refusal_takes_nothing_from_the_quotas() -> None:
    tenant = state(requests_in_flight=1, requests_per_minute=10, tokens_per_minute=1000)
    lease = take(tenant, 0.0)
    for _ in range(1000):
        refusal(tenant, 0.0)
    end(lease, 0, 0, 0.0)
    for _ in range(9):
        end(take(tenant, 0.0), 0, 0, 0.0)
    assert refusal(tenant, 0.0).metadata["quota"] == "requests_per_minute"
    assert (tenant.arrivals, tenant.over_quota) == (1011, 1001)


def test_new_quotas_hold_for_what_is_going_on_already() -> None:
    tenants = Tenants(SchedulerMetrics())
    old = Tenant("acme", quotas=Quotas(requests_per_minute=100))
    tenant = tenants.state(old, 0.0)
    leases = [take(tenant, 0.0) for _ in range(50)]
    new = replace(old, quotas=Quotas(requests_per_minute=60, requests_in_flight=50))
    assert tenants.state(new, 0.0) is tenant
    assert refusal(tenant, 0.0).metadata["quota"] == "requests_in_flight"
    end(leases[0], 0, 0, 0.0)
    for _ in range(10):
        end(take(tenant, 0.0), 0, 0, 0.0)
    assert refusal(tenant, 0.0).metadata["quota"] == "requests_per_minute"
    tenants.state(old, 0.0)
    take(tenant, 0.0)


def test_tenants_that_are_gone_are_forgotten_when_nothing_of_them_runs() -> None:
    tenants = Tenants(SchedulerMetrics())
    for index in range(1000):
        end(take(tenants.state(Tenant(f"t{index}"), 0.0), 0.0), 0, 0, 0.0)
    live = take(tenants.state(Tenant("live"), 0.0), 0.0)
    tenants.keep({"t1", "new"})
    assert [one.tenant.name for one in tenants] == ["live", "t1"]
    end(live, 0, 0, 0.0)
    tenants.keep({"t1"})
    assert [one.tenant.name for one in tenants] == ["t1"]


def test_books_close_and_long_run_rates_keep_to_the_quotas_under_any_traffic() -> None:
    rng = random.Random(7)
    tenant = state(requests_in_flight=20, requests_per_minute=600, tokens_per_minute=30_000)
    live: list[tuple[QuotaLease, int]] = []
    delays: list[float] = []
    now, served, tokens = 0.0, 0, 0
    while now < 1800:
        now += rng.expovariate(50)
        try:
            live.append((take(tenant, now, rng.randint(1, 100), rng.choice((None, 20, 50))), 0))
            served += 1
        except ServiceError as error:
            delays.append(error.retry_after_s or 0.0)
        if live and rng.random() < 0.6:
            lease, _ = live.pop(rng.randrange(len(live)))
            prompt, output = rng.randint(1, 300), rng.randint(0, 80)
            lease.tokenized(prompt, now)
            if rng.random() < 0.9:
                lease.started(now)
            end(lease, prompt, output, now)
            tokens += prompt + output
        assert tenant.requests_in_flight == len(live) <= 20
        assert tenant.waiting_requests <= len(live)
    for lease, _ in live:
        end(lease, 0, 0, now)
    assert (tenant.requests_in_flight, tenant.waiting_requests, tenant.waiting_tokens) == (0, 0, 0)
    assert 0 < min(delays) <= max(delays) < 3600
    assert served <= 600 + 10 * 1800
    # What is under way may overdraw by what was estimated too low.
    assert tokens <= 30_000 + 500 * 1800 + 20 * 400
