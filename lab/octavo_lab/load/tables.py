"""Runs as text that people read."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_uppercase
from typing import Any, Final

from octavo.cli import output

from octavo_lab.load.records import Outcome, RequestMeasurement, RunRecord
from octavo_lab.load.statistics import Distribution, distribution, needed
from octavo_lab.load.summary import Slo, Summary, by_kind, summarize

_TOO_FEW: Final = "-"
_LATENCIES: Final = (
    ("time to first token", "ttft_s"),
    ("time per output token", "tpot_s"),
    ("inter-token latency", "itl_s"),
    ("end to end", "e2e_s"),
    ("in the queue", "queue_s"),
)


def as_text(run: RunRecord, slo: Slo) -> str:
    """Return a run as tables."""
    summary = summarize(run, slo)
    parts = [_facts(run, summary), _latencies(summary)]
    if len(kinds := by_kind(run)) > 1:
        parts.append(_kinds(kinds))
    parts.extend(_notes(run, summary))
    return "\n\n".join(parts)


def _facts(run: RunRecord, summary: Summary) -> str:
    target, traffic = run.target, run.traffic
    failed = {name: count for name, count in summary.outcomes.items() if count and name != "ok"}
    told = ", ".join(f"{count} {name}" for name, count in failed.items())
    rows: list[tuple[str, str]] = [
        ("target", f"{target.kind} at {target.address}, {target.model}"),
        ("dataset", traffic.dataset),
        ("arrivals", f"{traffic.arrivals}, seed {traffic.seed}"),
        ("window", f"{summary.window_s:.1f} s after {run.warm_up_s:g} s of warm-up"),
        ("requests", f"{summary.requests}: {summary.outcomes['ok']} answered{', ' if told else ''}{told}"),
        ("answered per second", f"{summary.requests_per_s:.3f}"),
        ("output tokens per second", f"{summary.output_tokens_per_s:.1f} within the window"),
        ("", f"{summary.makespan_output_tokens_per_s:.1f} until the last answer"),
        ("goodput", f"{summary.goodput_per_s:.3f} per second, {summary.good_share:.1%} ({summary.slo})"),
    ]
    if summary.cached_share is not None:
        rows.append(("prompt tokens from the cache", f"{summary.cached_share:.1%}"))
    worst = summary.lateness_s.max or 0.0
    late = f"{summary.late_sends} sent late, at worst {1000 * worst:.1f} ms"
    rows.append(("generator", f"{late}; {_cpu_share(run):.0%} of a core"))
    if summary.reasons:
        rows.append(("reasons", ", ".join(f"{reason} {count}" for reason, count in summary.reasons.items())))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{output.paint(name.ljust(width), 'dim')}  {value}" for name, value in rows)


def _cpu_share(run: RunRecord) -> float:
    return run.generator.cpu_s / run.ended_s if run.ended_s else 0.0


def _latencies(summary: Summary) -> str:
    rows = []
    for name, attribute in _LATENCIES:
        sample: Distribution = getattr(summary, attribute)
        if sample.count:
            figures = (sample.mean, sample.p50, sample.p90, sample.p99, sample.max)
            rows.append([name, sample.count, *map(milliseconds, figures)])
    header = ["ms", "count", "mean", "P50", "P90", "P99", "max"]
    return output.table(header, rows, right=range(1, len(header)))


def _kinds(kinds: dict[str, list[RequestMeasurement]]) -> str:
    rows = []
    for kind, requests in kinds.items():
        queue = distribution([one.queue_s for one in requests if one.queue_s is not None])
        end = distribution([one.e2e_s for one in requests if one.outcome is Outcome.OK])
        rows.append(
            [kind or "(none)", len(requests), end.count]
            + [milliseconds(value) for value in (queue.p50, queue.p90, end.p50, end.p90)]
        )
    header = ["kind", "requests", "answered", "queue P50", "queue P90", "end to end P50", "end to end P90"]
    return output.table(header, rows, right=range(1, len(header)))


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


def milliseconds(seconds: float | None) -> str:
    """Return a time in milliseconds with three figures or so; a dash for none."""
    if seconds is None:
        return _TOO_FEW
    ms = 1000 * seconds
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def compared(runs: Sequence[RunRecord], slo: Slo) -> str:
    """Return runs side by side; ratios are those to the first."""
    summaries = [summarize(run, slo) for run in runs]
    rows: list[list[str]] = []
    for name, values in _comparable(summaries):
        cells = [name, _figure(values[0])]
        for value in values[1:]:
            cells += [_figure(value), _ratio(value, values[0])]
        rows.append(cells)
    header = ["", _name(runs[0], 0)]
    for index, run in enumerate(runs[1:], 1):
        header += [_name(run, index), "ratio"]
    return output.table(header, rows, right=range(1, len(header)))


def _name(run: RunRecord, index: int) -> str:
    return run.name or f"{_letter(index)} ({run.target.kind})"


def _letter(index: int) -> str:
    """Return A to Z, AA, AB, ..."""
    rest, last = divmod(index, len(ascii_uppercase))
    return (_letter(rest - 1) if rest else "") + ascii_uppercase[last]


def _comparable(summaries: Sequence[Summary]) -> list[tuple[str, list[float | None]]]:
    rows: list[tuple[str, list[float | None]]] = [
        ("requests", [one.requests for one in summaries]),
        ("answered", [one.outcomes["ok"] for one in summaries]),
        ("answered per second", [one.requests_per_s for one in summaries]),
        ("output tokens per second", [one.output_tokens_per_s for one in summaries]),
        ("goodput per second", [one.goodput_per_s for one in summaries]),
        ("share within the SLO", [one.good_share for one in summaries]),
    ]
    for name, attribute in _LATENCIES:
        samples: list[Distribution] = [getattr(one, attribute) for one in summaries]
        for label, figure in (("mean", "mean"), ("P50", "p50"), ("P90", "p90"), ("P99", "p99")):
            values = [getattr(sample, figure) for sample in samples]
            if any(value is not None for value in values):
                in_ms = [None if value is None else 1000 * value for value in values]
                rows.append((f"{name}, {label} (ms)", in_ms))
    return rows


def _figure(value: float | None) -> str:
    return _TOO_FEW if value is None else f"{value:.5g}"


def _ratio(value: float | None, to: float | None) -> str:
    return _TOO_FEW if value is None or not to else f"{value / to:.3f}"


def differences(runs: Sequence[RunRecord]) -> list[str]:
    """Return what sets the traffic of runs apart, in words: then they are hardly comparable."""
    told = []
    first = _asked(runs[0])
    for index, run in enumerate(runs[1:], 1):
        asked = _asked(run)
        for what in [*first, *(name for name in asked if name not in first)]:
            ours, theirs = first.get(what), asked.get(what)
            if ours != theirs:
                told.append(f"{_name(run, index)} had another {what}: {theirs} instead of {ours}")
        # What ends a run, a time or a number of requests, is the plan's; the other follows from the service.
        if len(run.requests) != len(runs[0].requests) and round(run.window_s - runs[0].window_s, 1):
            told.append(
                f"{_name(run, index)} had another length: {_length(run)} instead of {_length(runs[0])}"
            )
    return told


def _asked(run: RunRecord) -> dict[str, Any]:
    """Return what was asked of a service, by name."""
    traffic, details = run.traffic, run.target.details
    # What the targets ask for of themselves; they do not all write it down.
    options = {
        "temperature": 0.0,
        "ignore_eos": details.get("ignore_eos", True),
        **details.get("options", {}),
    }
    return {
        "dataset": traffic.dataset,
        "arrivals": traffic.arrivals,
        "seed": traffic.seed,
        "model": run.target.model,
        "warm-up": f"{run.warm_up_s:g} s",
        **options,
    }


def _length(run: RunRecord) -> str:
    return f"{run.window_s:.1f} s with {len(run.requests)} requests"
