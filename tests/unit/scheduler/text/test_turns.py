"""Turns among those that have jobs for the tokenizers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from scheduler_svc.text.turns import TokenizerTurns


@dataclass(frozen=True)
class Job:
    lane: str
    size_bytes: int = 100
    since: float = 0.0


def lanes(turns: TokenizerTurns[Job], count: int) -> list[str]:
    jobs = [turns.pop() for _ in range(count)]
    return [job.lane for job in jobs if job is not None]


def test_newcomer_waits_for_no_flood() -> None:
    turns: TokenizerTurns[Job] = TokenizerTurns()
    for _ in range(1000):
        turns.push(Job("flood"))
    assert lanes(turns, 10) == ["flood"] * 10
    turns.push(Job("other"))
    assert "other" in lanes(turns, 2)
    assert len(turns) == 989


def test_lanes_have_as_many_bytes_and_their_jobs_come_in_order() -> None:
    turns: TokenizerTurns[Job] = TokenizerTurns()
    for number in range(1000):
        turns.push(Job("large", 10_000, number))
        turns.push(Job("small", 100, number))
    served: Counter[str] = Counter()
    last: dict[str, float] = {}
    for _ in range(500):
        job = turns.pop()
        assert job is not None
        served[job.lane] += job.size_bytes + 256
        assert job.since > last.get(job.lane, -1)
        last[job.lane] = job.since
    assert abs(served["large"] - served["small"]) <= 2 * 10_256


def test_idle_time_earns_no_credit_and_is_forgotten() -> None:
    turns: TokenizerTurns[Job] = TokenizerTurns()
    for number in range(5000):
        turns.push(Job(f"t{number}"))
        turns.push(Job("steady"))
        turns.pop()
        turns.pop()
    assert len(turns._had) < 200
    turns.push(Job("t0"))
    for _ in range(20):
        turns.push(Job("t0"))
        turns.push(Job("steady"))
    assert lanes(turns, 20).count("t0") <= 11


def test_newest_and_oldest_can_be_taken_out() -> None:
    turns: TokenizerTurns[Job] = TokenizerTurns()
    for number in range(3):
        turns.push(Job("a", since=number))
        turns.push(Job("b", since=10 + number))
    assert turns.pop_newest("a") == Job("a", since=2)
    assert turns.pop_newest("c") is None
    assert [turns.pop_older(1.0), turns.pop_older(1.0), turns.pop_older(1.0)] == [
        Job("a", since=0),
        Job("a", since=1),
        None,
    ]
    assert len(turns) == 3
