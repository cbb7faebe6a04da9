"""Records made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from octavo_lab.load.records import (
    GeneratorRecord,
    Offered,
    Outcome,
    RequestMeasurement,
    RunRecord,
    TargetRecord,
    TrafficRecord,
)


def request(number: int, planned_s: float, **fields: Any) -> RequestMeasurement:
    offered = Offered(
        number=number,
        planned_s=planned_s,
        prompt_tokens=10,
        output_tokens=4,
        kind=fields.pop("kind", ""),
    )
    defaults: dict[str, Any] = {
        "sent_s": planned_s,
        "outcome": Outcome.OK,
        "ended_s": planned_s + 1.0,
        "chunk_times_s": (planned_s + 0.4, planned_s + 0.6, planned_s + 0.8, planned_s + 1.0),
        "output_tokens": 4,
    }
    return RequestMeasurement(offered=offered, **{**defaults, **fields})


def run(*requests: RequestMeasurement, **fields: Any) -> RunRecord:
    one = RunRecord(
        target=TargetRecord(kind="octavo", address="127.0.0.1:1", model="demo", details={"workers": 1}),
        traffic=TrafficRecord(
            dataset="by hand", arrivals="by hand", seed=1, offered_rate_per_s=1.0, concurrency=None
        ),
        started_at="2026-01-01T00:00:00+00:00",
        warm_up_s=0.0,
        until_s=10.0,
        ended_s=11.0,
        generator=GeneratorRecord(late_sends=0, max_lateness_s=0.0, cpu_s=0.1),
        requests=requests,
    )
    return replace(one, **fields)
