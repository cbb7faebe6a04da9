"""Use by tenant and minute: what was used between two moments, kept for a day and no longer."""

from __future__ import annotations

from scheduler_svc.core.usage import UsageSnapshot
from scheduler_svc.observe.usage import UsageHistory, UsageTotals, totals_of


class Scheduler:
    """Something that tenants use, and the time on its wall."""

    def __init__(self) -> None:
        self.now = 1_000_000.0
        self.counts = {"a": (0, 0, 0)}
        self.usage = UsageSnapshot({}, 0.0, 0.0)

    def totals(self) -> UsageTotals:
        return totals_of(self.counts, self.usage)

    def history(self) -> UsageHistory:
        return UsageHistory(self.totals, 2.5, lambda: self.now)


def test_minutes_hold_what_was_used_in_them() -> None:
    scheduler = Scheduler()
    history = scheduler.history()
    scheduler.counts, scheduler.usage = {"a": (1, 10, 20)}, UsageSnapshot({"a": 5.0}, 0.5, 55.0)
    scheduler.now += 60
    history.end_minute()
    scheduler.counts, scheduler.usage = (
        {"a": (1, 10, 20), "b": (2, 3, 4)},
        UsageSnapshot({"a": 5.0, "b": 1.0}, 0.5, 84.0),
    )
    scheduler.now += 30

    whole, running = history.since(3600).minutes

    assert [(one.tenant, one.requests, one.prompt_tokens, one.device_s) for one in whole.tenants] == [
        ("a", 1, 10, 5.0)
    ]
    assert (whole.from_unix_ms, whole.until_unix_ms) == (1_000_000_000, 1_000_060_000)
    assert (whole.idle_device_s, whole.unassigned_device_s) == (55.0, 0.5)
    assert [(one.tenant, one.requests, one.output_tokens, one.device_s) for one in running.tenants] == [
        ("b", 2, 4, 1.0)
    ]
    assert running.until_unix_ms == 1_000_090_000
    assert [minute.until_unix_ms for minute in history.since(25).minutes] == [1_000_090_000]


def test_a_day_is_kept_whatever_comes() -> None:
    scheduler = Scheduler()
    history = scheduler.history()
    for minute in range(3000):
        scheduler.now += 60
        scheduler.usage = UsageSnapshot({"a": float(minute)}, 0.0, 0.0)
        history.end_minute()

    assert len(history.since(float("inf")).minutes) == 24 * 60 + 1


def test_very_many_tenants_shorten_the_past_and_not_the_scheduler() -> None:
    scheduler = Scheduler()
    history = scheduler.history()
    for minute in range(1, 13):
        scheduler.now += 60
        scheduler.usage = UsageSnapshot({f"t{index}": float(minute) for index in range(10_000)}, 0.0, 0.0)
        history.end_minute()

    kept = history.since(float("inf")).minutes
    assert sum(len(minute.tenants) for minute in kept) == 100_000
    assert kept[-2].until_unix_ms == round(scheduler.now * 1000)


def test_a_tenant_that_was_forgotten_and_is_back_uses_nothing_twice() -> None:
    scheduler = Scheduler()
    history = scheduler.history()
    scheduler.counts = {"a": (7, 70, 700)}
    history.end_minute()
    scheduler.counts = {"a": (1, 10, 20)}

    assert not history.since(60).minutes[-1].tenants
