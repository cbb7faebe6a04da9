from __future__ import annotations

import pytest
from octavo_lab.load.records import GeneratorRecord, Outcome
from octavo_lab.load.summary import Slo, by_kind, summarize

from tests.unit.lab.runs import request, run


def test_figures_of_a_run_by_hand() -> None:
    summary = summarize(
        run(
            request(0, 0.0, cached_tokens=5, prompt_tokens=20),
            request(1, 2.0, cached_tokens=0, prompt_tokens=20),
            request(2, 4.0, outcome=Outcome.TIMEOUT, reason="QUEUE_TIMEOUT", chunk_times_s=()),
        )
    )
    assert summary.requests == 3
    assert summary.outcomes == {"ok": 2, "timeout": 1, "refused": 0, "oom": 0, "error": 0, "abandoned": 0}
    assert summary.reasons == {"QUEUE_TIMEOUT": 1}
    assert summary.requests_per_s == pytest.approx(0.2)
    assert summary.output_tokens == 8
    assert summary.prompt_tokens == 40
    assert summary.cached_share == pytest.approx(5 / 40)
    assert summary.makespan_output_tokens_per_s == pytest.approx(8 / 3)
    assert summary.ttft_s.mean == pytest.approx(0.4)
    assert summary.tpot_s.mean == pytest.approx(0.2)
    assert summary.itl_s.count == 6
    assert summary.queue_s.count == 0


def test_steady_throughput_counts_the_tokens_that_came_within_the_window() -> None:
    before = request(0, 1.0, chunk_times_s=(1.5, 2.5), output_tokens=10, ended_s=2.5)
    after = request(1, 9.0, chunk_times_s=(9.5, 10.5), output_tokens=10, ended_s=10.5)
    failed = request(2, 5.0, chunk_times_s=(5.5,), output_tokens=10, outcome=Outcome.ERROR)
    cut = request(3, 5.0, chunk_times_s=(5.5,), output_tokens=3, outcome=Outcome.ABANDONED)
    summary = summarize(run(before, after, failed, cut, warm_up_s=2.0))
    assert summary.output_tokens_per_s == pytest.approx((5 + 5 + 3) / 8)


def test_goodput_counts_failures_against_the_service() -> None:
    requests = [
        request(0, 1.0),
        request(1, 2.0, chunk_times_s=(4.0, 4.1), output_tokens=2, ended_s=4.1),  # first token late
        request(2, 3.0, chunk_times_s=(3.1, 3.9), output_tokens=2, ended_s=3.9),  # second token late
        request(3, 4.0, outcome=Outcome.REFUSED, chunk_times_s=(), output_tokens=0),
    ]
    summary = summarize(run(*requests), Slo(ttft_s=0.5, tpot_s=0.25))
    assert summary.goodput_per_s == pytest.approx(0.1)
    assert summary.good_share == pytest.approx(0.25)
    assert summary.slo == "TTFT 500 ms, TPOT 250 ms"


def test_an_answer_of_one_token_breaks_no_bound_on_the_time_between_tokens() -> None:
    assert Slo(tpot_s=0.001).met_by(request(0, 0.0, chunk_times_s=(0.5,), output_tokens=1))
    assert not Slo(e2e_s=0.5).met_by(request(0, 0.0))


def test_no_p99_from_fewer_than_500_requests_however_many_tokens() -> None:
    few = [request(number, number / 100) for number in range(499)]
    assert summarize(run(*few)).itl_s.p99 is None
    assert summarize(run(*few)).e2e_s.p99 is None
    enough = summarize(run(*few, request(499, 4.99)))
    assert enough.itl_s.p99 == pytest.approx(0.2)
    assert enough.e2e_s.p99 == pytest.approx(1.0)


def test_late_sends_are_told() -> None:
    # Those before the window, such as a backlog that is sent at once, are not among the requests.
    generator = GeneratorRecord(late_sends=2, max_lateness_s=0.7, cpu_s=0.0)
    requests = (request(0, 0.0, sent_s=0.7), request(1, 1.0, sent_s=1.5), request(2, 2.0))
    summary = summarize(run(*requests, generator=generator, warm_up_s=0.5))
    assert (summary.requests, summary.late_sends) == (2, 1)
    assert summary.lateness_s.max == 0.5


def test_nothing_measured_gives_zeros_and_not_an_error() -> None:
    summary = summarize(run())
    assert (summary.requests, summary.output_tokens_per_s, summary.good_share) == (0, 0.0, 0.0)


def test_by_kind_sorts_the_window() -> None:
    kinds = by_kind(run(request(0, 1.0, kind="long"), request(1, 2.0, kind="a"), request(2, 12.0, kind="a")))
    assert {kind: [one.offered.number for one in of] for kind, of in kinds.items()} == {"a": [1], "long": [0]}
