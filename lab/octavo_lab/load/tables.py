"""Runs as text that people read."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_uppercase
from typing import Any, Final

from octavo.cli import output

from octavo_lab.load.records import Outcome, RequestMeasurement, RunRecord
from octavo_lab.load.statistics import distribution, needed
from octavo_lab.load.summary import Slo, Summary, by_kind, summarize
from octavo_lab.report import MISSING, milliseconds

_LATENCIES: Final = {
    "time to first token": "ttft_s",
    "time per output token": "tpot_s",
    "inter-token latency": "itl_s",
    "end to end": "e2e_s",
    "in the queue": "queue_s",
}
_FIGURES: Final = {"mean": "mean", "P50": "p50", "P90": "p90", "P99": "p99"}


def as_text(run: RunRecord, slo: Slo) -> str:
    """Return a run as tables."""
    summary = summarize(run, slo)
    rows = []
    for name, attribute in _LATENCIES.items():
        sample = getattr(summary, attribute)
        if sample.count:
            figures = [getattr(sample, figure) for figure in (*_FIGURES.values(), "max")]
            rows.append([name, sample.count, *map(milliseconds, figures)])
    parts = [_facts(run, summary), _table(["ms", "count", *_FIGURES, "max"], rows)]
    if len(kinds := by_kind(run)) > 1:
        parts.append(_kinds(kinds))
    return "\n\n".join([*parts, *_notes(run, summary)])


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    return output.table(header, rows, right=range(1, len(header)))


def _facts(run: RunRecord, summary: Summary) -> str:
    target, traffic = run.target, run.traffic
    failed = [f"{count} {name}" for name, count in summary.outcomes.items() if count and name != "ok"]
    worst_s = summary.lateness_s.max or 0.0
    cpu_share = run.generator.cpu_s / run.ended_s if run.ended_s else 0.0
    rows = {
        "target": f"{target.kind} at {target.address}, {target.model}",
        "dataset": traffic.dataset,
        "arrivals": f"{traffic.arrivals}, seed {traffic.seed}",
        "window": f"{summary.window_s:.1f} s after {run.warm_up_s:g} s of warm-up",
        "requests": ", ".join([f"{summary.requests}: {summary.outcomes['ok']} answered", *failed]),
        "answered per second": f"{summary.requests_per_s:.3f}",
        "output tokens per second": f"{summary.output_tokens_per_s:.1f} within the window",
        "": f"{summary.makespan_output_tokens_per_s:.1f} until the last answer",
        "goodput": f"{summary.goodput_per_s:.3f} per second, {summary.good_share:.1%} ({summary.slo})",
    }
    if summary.cached_share is not None:
        rows["prompt tokens from the cache"] = f"{summary.cached_share:.1%}"
    late = f"{summary.late_sends} sent late, at worst {1000 * worst_s:.1f} ms"
    rows["generator"] = f"{late}; {cpu_share:.0%} of a core"
    if summary.reasons:
        rows["reasons"] = ", ".join(f"{reason} {count}" for reason, count in summary.reasons.items())
    width = max(map(len, rows))
    return "\n".join(f"{output.paint(name.ljust(width), 'dim')}  {value}" for name, value in rows.items())


def _kinds(kinds: dict[str, list[RequestMeasurement]]) -> str:
    rows = []
    for kind, requests in kinds.items():
        queue = distribution([one.queue_s for one in requests if one.queue_s is not None])
        end = distribution([one.e2e_s for one in requests if one.outcome is Outcome.OK])
        figures = map(milliseconds, (queue.p50, queue.p90, end.p50, end.p90))
        rows.append([kind or "(none)", len(requests), end.count, *figures])
    header = ["kind", "requests", "answered", "queue P50", "queue P90", "end to end P50", "end to end P90"]
    return _table(header, rows)


def _notes(run: RunRecord, summary: Summary) -> list[str]:
    notes = []
    if run.interrupted:
        notes.append("Interrupted: these are the requests until then.")
    if summary.e2e_s.count and summary.e2e_s.p99 is None:
        notes.append(
            f"A percentile wants five observations beyond it: no P99 from fewer than {needed(0.99)} requests."
        )
    if summary.late_sends > 0.01 * max(1, summary.requests):
        notes.append("More than 1% of the requests were sent late: the generator was short of CPU.")
    if run.traffic.concurrency is not None:
        notes.append("A closed loop asks a slow target less: its latencies are not those under a given load.")
    return notes


def compared(runs: Sequence[RunRecord], slo: Slo) -> str:
    """Return runs side by side; ratios are those to the first."""
    base, *others = [_comparable(summarize(run, slo)) for run in runs]
    rows = []
    for name, to in base.items():
        if to is not None or any(one[name] is not None for one in others):
            row = [name, _figure(to)]
            for one in others:
                value = one[name]
                row += [_figure(value), MISSING if value is None or not to else f"{value / to:.3f}"]
            rows.append(row)
    first, *names = (_name(run, index) for index, run in enumerate(runs))
    return _table(["", first, *(cell for name in names for cell in (name, "ratio"))], rows)


def _name(run: RunRecord, index: int) -> str:
    return run.name or f"{_letter(index)} ({run.target.kind})"


def _letter(index: int) -> str:
    """Return A to Z, AA, AB, ..."""
    rest, last = divmod(index, len(ascii_uppercase))
    return (_letter(rest - 1) if rest else "") + ascii_uppercase[last]


def _comparable(summary: Summary) -> dict[str, float | None]:
    figures: dict[str, float | None] = {
        "requests": summary.requests,
        "answered": summary.outcomes["ok"],
        "answered per second": summary.requests_per_s,
        "output tokens per second": summary.output_tokens_per_s,
        "goodput per second": summary.goodput_per_s,
        "share within the SLO": summary.good_share,
    }
    for name, attribute in _LATENCIES.items():
        for label, figure in _FIGURES.items():
            value_s = getattr(getattr(summary, attribute), figure)
            figures[f"{name}, {label} (ms)"] = None if value_s is None else 1000 * value_s
    return figures


def _figure(value: float | None) -> str:
    return MISSING if value is None else f"{value:.5g}"


def differences(runs: Sequence[RunRecord]) -> list[str]:
    """Return what sets the traffic of runs apart, in words: then they are hardly comparable."""
    told = []
    first = _asked(runs[0])
    for index, run in enumerate(runs[1:], 1):
        name, asked = _name(run, index), _asked(run)
        for what in first | asked:
            if first.get(what) != asked.get(what):
                told.append(f"{name} had another {what}: {asked.get(what)} instead of {first.get(what)}")
        # What ends a run, a time or a number of requests, is the plan's; the other follows from the service.
        if len(run.requests) != len(runs[0].requests) and round(run.window_s - runs[0].window_s, 1):
            ours, theirs = (
                f"{one.window_s:.1f} s with {len(one.requests)} requests" for one in (runs[0], run)
            )
            told.append(f"{name} had another length: {theirs} instead of {ours}")
    return told


def _asked(run: RunRecord) -> dict[str, Any]:
    """Return what was asked of a service, by name."""
    traffic, details = run.traffic, run.target.details
    return {
        "dataset": traffic.dataset,
        "arrivals": traffic.arrivals,
        "seed": traffic.seed,
        "model": run.target.model,
        "warm-up": f"{run.warm_up_s:g} s",
        # What the targets ask for of themselves; they do not all write it down.
        "temperature": 0.0,
        "ignore_eos": details.get("ignore_eos", True),
        **details.get("options", {}),
    }
