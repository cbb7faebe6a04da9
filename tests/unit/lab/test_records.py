from __future__ import annotations

import json

import pytest
from octavo_lab.load.records import Outcome, from_json, to_json

from tests.unit.lab.runs import request, run


def test_json_loses_nothing() -> None:
    one = run(
        request(0, 0.25, kind="short", prompt_tokens=11, cached_tokens=0, queue_s=0.125, preemptions=2),
        request(1, 0.5, outcome=Outcome.REFUSED, chunk_times_s=(), output_tokens=0, reason="QUEUE_FULL"),
        interrupted=True,
        name="paged",
    )
    assert from_json(json.loads(json.dumps(to_json(one)))) == one


@pytest.mark.parametrize("record", [{}, {"format": 2}, {"format": 1}, {"format": 1, "requests": [1]}])
def test_what_is_no_record_is_refused(record: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="record of a run"):
        from_json(record)


def test_latencies_count_from_the_planned_time() -> None:
    late = request(0, 1.0, sent_s=3.0, chunk_times_s=(4.0, 4.5, 6.0), output_tokens=6, ended_s=6.5)
    assert late.lateness_s == 2.0
    assert late.ttft_s == 3.0
    assert late.e2e_s == 5.5
    assert late.tpot_s == pytest.approx(2.0 / 5)
    assert late.gaps_s == (0.5, 1.5)


def test_what_did_not_happen_has_no_latency() -> None:
    silent = request(0, 1.0, chunk_times_s=(), output_tokens=0)
    single = request(0, 1.0, chunk_times_s=(2.0,), output_tokens=1)
    assert (silent.ttft_s, silent.tpot_s, silent.gaps_s) == (None, None, ())
    assert (single.ttft_s, single.tpot_s, single.gaps_s) == (1.0, None, ())


def test_only_the_window_is_measured() -> None:
    one = run(request(0, 1.0), request(1, 2.0), request(2, 11.0), warm_up_s=1.5)
    assert [item.offered.number for item in one.measured] == [1]
    assert one.window_s == 8.5
