"""The report as files: JSON, Markdown that shows its plots, and the same as one page."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from octavo_lab import report as made
from octavo_lab.ladder.config import ARMS, OVERLOAD, RUNGS, LadderConfig
from octavo_lab.ladder.explain import headlines, interval, legend, paragraphs, quantile, short, three
from octavo_lab.ladder.figures import Figures, Latency
from octavo_lab.ladder.plots import Plot, plots
from octavo_lab.ladder.report import LadderReport, to_json
from octavo_lab.load.statistics import Interval
from octavo_lab.report import MISSING, mib, seconds, share
from octavo_lab.serve.plan import parse_slo
from octavo_lab.stored import write_whole

Columns = dict[str, Callable[[Figures], str]]
"""What is told of an arm at a rung, by the head of its column."""


def write(report: LadderReport, folder: Path) -> list[Path]:
    """Write report.json, report.md with its plots, and report.html; return their paths.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # JSON first: it needs nothing but the figures, and the pages can be made from the folder again.
    record, pictures = json.dumps(to_json(report), separators=(",", ":")) + "\n", list[Plot]()
    write_whole(folder / "report.json", record)
    pictures.extend(plots(report))
    for plot in pictures:
        write_whole(folder / plot.file, plot.svg)
    text = as_markdown(report, pictures)
    write_whole(folder / "report.md", text)
    write_whole(folder / "report.html", made.page(text, {plot.file: plot.svg for plot in pictures}))
    return [folder / name for name in ("report.json", "report.md", "report.html")]


def as_markdown(report: LadderReport, pictures: Sequence[Plot]) -> str:
    """Return the report."""
    parts = (
        "# Static against continuous, contiguous against paged",
        *_partial(report),
        *_summary(report),
        *(f"**{plot.title}.** {plot.caption}\n\n![{plot.title}]({plot.file})" for plot in pictures),
        "## Why the figures are what they are",
        *(f"**{title}.** {text}" for title, text in paragraphs(report)),
        "## Arms",
        made.table(("arm", "capacity, requests/s", "settings"), [*_arms(report)]),
        *_rungs(report),
        legend(),
        "## How it was measured",
        made.table(("", ""), _facts(report)),
        *_notes(report),
    )
    return "\n\n".join(parts) + "\n"


def _partial(report: LadderReport) -> Iterator[str]:
    measured = report.measured
    if measured.partial:
        done = f"{len(measured.results)} of {len(measured.plan.cells)}" if measured.plan else "0"
        yield f"**Partial:** {done} cells have been measured. `--resume` goes on with it."


def _summary(report: LadderReport) -> Iterator[str]:
    mark = {None: "", True: ", met", False: ", **missed**"}
    rows = [(one.what, one.measured, one.target + mark[one.met], one.article) for one in headlines(report)]
    yield made.table(("", "measured", "target", "articles, two A10 GPUs"), rows)
    subject, control = ARMS[report.comparison.subject].title, ARMS[report.comparison.control].title
    yield f"Subject: {subject}. Control: {control}, tuned. Both were named before anything was measured."


def _arms(report: LadderReport) -> Iterator[tuple[str, str, str]]:
    found = report.measured.found
    for name in report.measured.config.arms:
        capacity = found.capacities.get(name) if found else None
        static = found.static.get(name) if found else None
        settings = f"batches of {static.batch_size}, timeout {static.timeout_s:g} s" if static else ""
        yield ARMS[name].title, MISSING if capacity is None else f"{capacity:.2f}", settings


def _rate(one: Interval) -> str:
    """Return a rate with its interval, whose lower bound is never below nothing."""
    return interval(Interval(one.value, None if one.low is None else max(0.0, one.low), one.high), ".1f")


def _failures(one: Figures) -> str:
    kinds = [f"{count:,} {kind}" for kind, count in sorted(one.outcomes.items()) if kind != "ok"]
    return ", ".join(kinds) or "0"


_LATENCY: Final[Columns] = {
    "requests": lambda one: f"{one.requests:,}",
    "end to end P50": lambda one: quantile(one.e2e.p50),
    "P90": lambda one: quantile(one.e2e.p90),
    "P99": lambda one: quantile(one.e2e.p99),
    "TTFT P50 / P90 / P99": lambda one: three(one.ttft),
    "TPOT P50 / P90 / P99": lambda one: three(one.tpot),
    "inter-token P50 / P90 / P99": lambda one: three(one.itl),
}
_SERVICE: Final[Columns] = {
    "output tokens/s": lambda one: _rate(one.tokens_per_s),
    "answered/s": lambda one: _rate(one.requests_per_s),
    "good/s": lambda one: _rate(one.goodput_per_s),
    "within SLO": lambda one: share(one.good_share, 0),
    "not answered": _failures,
    "preemptions": lambda one: f"{one.preemptions:,}",
    "prompt from cache": lambda one: share(one.cached_share),
    "cost of 1000 tokens": lambda one: (
        MISSING if one.cost_per_1k_tokens is None else f"{one.cost_per_1k_tokens:.5f}"
    ),
    "late sends": lambda one: f"{one.late_sends:,}",
}
_MEMORY: Final[Columns] = {
    "KV written": lambda one: share(one.kv_written.value),
    "KV taken": lambda one: share(one.kv_active),
    "cached and free": lambda one: share(one.kv_cached),
    "internal fragmentation": lambda one: share(one.internal),
    "external fragmentation": lambda one: share(one.external) if ARMS[one.arm].static else "none matters",
    "running": lambda one: f"{one.running:.1f}",
    "worker's memory": lambda one: mib(one.host_bytes),
    "GPU memory": lambda one: mib(one.device_bytes),
}


def _rungs(report: LadderReport) -> Iterator[str]:
    for number, (rung, rate) in enumerate(report.rungs.items(), 1):
        rows = report.at(rung)
        if not rows:
            continue
        yield f"## Rung {number}: {RUNGS[rung]}, {rate:.2f} requests/s"
        for columns in (_LATENCY, _SERVICE, _MEMORY):
            told = [(ARMS[one.arm].title, *(tell(one) for tell in columns.values())) for one in rows]
            yield made.table(("arm", *columns), told)
        buckets = [f"{name} tokens" for name in rows[0].queue_by_bucket]
        waits = [
            (ARMS[one.arm].title, *map(_wait, (one.queue, *one.queue_by_bucket.values()))) for one in rows
        ]
        yield made.table(("arm: time in the queue, P50 / P90", "all", *buckets), waits)


def _wait(part: Latency) -> str:
    return f"{short(part.p50)} / {short(part.p90)}"


def _facts(report: LadderReport) -> list[tuple[str, object]]:
    """Return what is fixed and recorded, and what it was judged by."""
    measured, head = report.measured, report.measured.head
    config, here = head.config, head.environments[-1] if head.environments else {}
    hardware, software = here.get("hardware", {}), here.get("software", {})
    served: dict[str, Any] = next((one["served"] for one in head.environments if one.get("served")), {})
    packages = ", ".join(f"{name} {number}" for name, number in software.get("packages", {}).items())
    machine = f"{hardware.get('cpu')}, {hardware.get('cores')} cores, {hardware.get('memory_gib')} GiB"
    model, runner = served.get("model", config.model), served.get("runner", config.runner)
    order = "arms in an order drawn anew at each rung of each"
    arrivals = f"{type(config.process(1.0)).__name__}, open loop, seed {config.seed}"
    repeats = measured.plan.repeats if measured.plan else config.repeats
    return [
        ("begun, reported", f"{head.started_at}, {report.ended_at}"),
        ("preset, budget", f"{config.preset}, {config.budget_s / 60:.0f} min"),
        ("hardware", f"{machine}; GPUs: {', '.join(hardware.get('gpus', [])) or 'none'}"),
        ("software", f"{software.get('os')}, Python {software.get('python')}, {packages}"),
        ("commit", software.get("commit")),
        ("model", f"{model} (revision {served.get('revision')}), {runner} runner, context {config.context}"),
        ("memory and limits, all arms", _limits(config)),
        ("dataset", head.dataset.get("description")),
        ("arrivals", f"{arrivals}: the same times and requests for all arms of a repeat"),
        ("cells", f"{repeats} repeats, {order}; {_warm_up(config)}; latencies count from the planned time"),
        ("time in the queue, at most", f"{config.queue_timeout_s:g} s"),
        ("SLO of goodput", parse_slo(config.slo)),
        ("price", f"{config.price_per_hour:g} per hour of this machine"),
        ("generator", _generator([*report.rows()])),
    ]


def _limits(config: LadderConfig) -> str:
    blocks = f"{config.num_blocks} blocks of {config.block_size} tokens"
    batch = f"max_num_batched_tokens {config.max_num_batched_tokens}"
    return f"{blocks}, max_num_seqs {config.max_num_seqs}, {batch}"


def _warm_up(config: LadderConfig) -> str:
    told = f"{config.warm_up_s:g} s of warm-up"
    if OVERLOAD not in config.rungs:
        return told
    longer = f"at the highest rung {config.warm_up_of(OVERLOAD):g} s"
    return f"{told}, {longer}, which begin with {config.backlog} requests at once"


def _generator(rows: Sequence[Figures]) -> str:
    """Return what the generator was worth."""
    late, total = sum(one.late_sends for one in rows), sum(one.requests for one in rows)
    worst = seconds(max((one.max_lateness_s for one in rows), default=0.0))
    busiest = max((one.generator_cpu_share for one in rows), default=0.0)
    return (
        f"{late:,} of {total:,} requests sent more than 10 ms late, at most {worst}; at most "
        f"{100 * busiest:.0f}% of a core"
    )


def _notes(report: LadderReport) -> Iterator[str]:
    """Yield what the budget cost, and what did not go as planned."""
    head, plan = report.measured.head, report.measured.plan
    told = list(plan.notes if plan is not None else ())
    if len(head.environments) > 1:
        told.append(f"measured in {len(head.environments)} goes (`--resume`)")
    told.extend(f"an attempt that came to nothing: {one}" for one in head.failures)
    if told:
        yield "**Notes:**\n\n" + "\n".join(f"- {note}" for note in told)
