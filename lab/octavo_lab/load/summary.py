"""One run in figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from octavo_lab.load.records import LATE_S, Outcome, RequestMeasurement, RunRecord
from octavo_lab.load.statistics import Distribution, distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """What a request must keep to count as good. None: no bound."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def __str__(self) -> str:
        bounds = (("TTFT", self.ttft_s), ("TPOT", self.tpot_s), ("end to end", self.e2e_s))
        told = [f"{name} {bound * 1000:g} ms" for name, bound in bounds if bound is not None]
        return ", ".join(told) or "answered"

    def met_by(self, one: RequestMeasurement) -> bool:
        """Return whether a request was answered within all bounds; what was not measured breaks none."""
        values = ((one.ttft_s, self.ttft_s), (one.tpot_s, self.tpot_s), (one.e2e_s, self.e2e_s))
        return one.outcome is Outcome.OK and all(
            value is None or bound is None or value <= bound for value, bound in values
        )


ANSWERED = Slo()
"""The SLO that every answer meets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures over the requests planned within the window of a run. Times are seconds.

    What is told per second counts what came within the window, of whichever request: what is answered during
    the drain is no rate that was kept up. Latencies are those of requests that were
    answered (`ok`) and count from the planned time.
    """

    requests: int
    """Planned within the window, and sent."""
    window_s: float
    outcomes: Mapping[str, int]
    """Requests by outcome; every outcome is there."""
    reasons: Mapping[str, int]
    """What was not `ok`, by reason."""
    requests_per_s: float
    """Answered within the window, over its length."""
    output_tokens_per_s: float
    """Tokens that came within the window, of whichever request, over its length: the steady state."""
    makespan_output_tokens_per_s: float
    """Tokens of answered requests over the time from the first planned to the last end, drain included:
    what other tools call throughput."""
    prompt_tokens: int
    output_tokens: int
    """Of answered requests."""
    cached_share: float | None
    """Share of their prompt tokens that came from the cache."""
    ttft_s: Distribution
    tpot_s: Distribution
    itl_s: Distribution
    """Over all gaps; a percentile wants as many requests as it would of any other quantity."""
    e2e_s: Distribution
    queue_s: Distribution
    goodput_per_s: float
    """Answered within the window and within the SLO, over its length."""
    good_share: float
    """Share of the requests of the window that met the SLO; those that failed did not."""
    slo: str
    late_sends: int
    """Requests of the window that were sent more than LATE_S after their time."""
    lateness_s: Distribution


def summarize(run: RunRecord, slo: Slo = ANSWERED) -> Summary:
    """Return the figures of a run."""
    measured, window_s = run.measured, run.window_s
    done = [one for one in measured if one.outcome is Outcome.OK]
    outcomes = Counter(one.outcome for one in measured)
    first_s = min((one.offered.planned_s for one in measured), default=run.warm_up_s)
    makespan_s = max((one.ended_s for one in done), default=first_s) - first_s
    answered = [one for one in run.requests if one.outcome is Outcome.OK and run.in_window(one.ended_s)]
    output_tokens = sum(one.output_tokens for one in done)
    told = [one for one in done if one.cached_tokens is not None]
    cached_share = _per(sum(one.cached_tokens or 0 for one in told), sum(map(_prompt_tokens, told)))
    return Summary(
        requests=len(measured),
        window_s=window_s,
        outcomes={outcome.value: outcomes[outcome] for outcome in Outcome},
        reasons=dict(Counter(one.reason or one.outcome for one in measured if one.outcome is not Outcome.OK)),
        requests_per_s=_per(len(answered), window_s),
        output_tokens_per_s=_per(_tokens_within_window(run), window_s),
        makespan_output_tokens_per_s=_per(output_tokens, makespan_s),
        prompt_tokens=sum(map(_prompt_tokens, done)),
        output_tokens=output_tokens,
        cached_share=cached_share if told else None,
        ttft_s=_of_known(one.ttft_s for one in done),
        tpot_s=_of_known(one.tpot_s for one in done),
        itl_s=distribution(
            [gap for one in done for gap in one.gaps_s],
            independent=sum(len(one.chunk_times_s) > 1 for one in done),
        ),
        e2e_s=_of_known(one.e2e_s for one in done),
        queue_s=_of_known(one.queue_s for one in done),
        goodput_per_s=_per(sum(map(slo.met_by, answered)), window_s),
        good_share=_per(sum(map(slo.met_by, measured)), len(measured)),
        slo=str(slo),
        late_sends=sum(one.lateness_s > LATE_S for one in measured),
        lateness_s=_of_known(one.lateness_s for one in measured),
    )


def by_kind(run: RunRecord) -> dict[str, list[RequestMeasurement]]:
    """Return the measured requests by their class or bucket."""
    kinds = sorted({one.offered.kind for one in run.measured})
    return {kind: [one for one in run.measured if one.offered.kind == kind] for kind in kinds}


def _tokens_within_window(run: RunRecord) -> float:
    """Return the tokens that came within the window; those of one request are spread over its messages.

    Requests that the generator cut off at the end of its drain were being served, and count; those that
    failed do not.
    """
    return sum(
        one.output_tokens * sum(map(run.in_window, one.chunk_times_s)) / len(one.chunk_times_s)
        for one in run.requests
        if one.chunk_times_s and one.outcome in (Outcome.OK, Outcome.ABANDONED)
    )


def _prompt_tokens(one: RequestMeasurement) -> int:
    return one.offered.prompt_tokens if one.prompt_tokens is None else one.prompt_tokens


def _of_known(values: Iterable[float | None]) -> Distribution:
    return distribution([value for value in values if value is not None])


def _per(amount: float, whole: float) -> float:
    return amount / whole if whole > 0 else 0.0
