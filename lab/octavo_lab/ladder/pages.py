"""The report as files: JSON, Markdown that shows its plots, and the same as one page.

What the figures say is put into sentences of `words.toml`.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from octavo_lab import report as made
from octavo_lab.ladder.config import ARMS, CONTROL, OVERLOAD, RUNGS
from octavo_lab.ladder.figures import Figures, Latency, Quantile
from octavo_lab.ladder.plots import plots
from octavo_lab.ladder.report import ARTICLES, LadderReport, differs, to_json
from octavo_lab.load.statistics import Interval, needed
from octavo_lab.report import MISSING, bounded, mib, seconds, share
from octavo_lab.serve.plan import parse_slo
from octavo_lab.stored import write_whole

_WORDS: Final = tomllib.loads((resources.files("octavo_lab.ladder") / "words.toml").read_text("utf-8"))
Columns = dict[str, Callable[[Figures], str]]
"""What is told of an arm at a rung, by the head of its column."""


def write(report: LadderReport, folder: Path) -> list[Path]:
    """Write report.json, report.md with its plots, and report.html, or raise OSError; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    # JSON first: it needs nothing but the figures, and the pages can be made from the folder again.
    write_whole(folder / "report.json", json.dumps(to_json(report), separators=(",", ":")) + "\n")
    pictures, shown = dict[str, str](), list[str]()
    for name, rate, svg in plots(report):
        pictures[f"{name}.svg"] = svg
        write_whole(folder / f"{name}.svg", svg)
        words = _WORDS["plots"][name]
        caption = _said(words["caption"], rate=rate)
        shown.append(f"**{words['title']}.** {caption}\n\n![{words['title']}]({name}.svg)")
    text = _as_markdown(report, shown)
    write_whole(folder / "report.md", text)
    write_whole(folder / "report.html", made.page(text, pictures))
    return [folder / name for name in ("report.json", "report.md", "report.html")]


def _as_markdown(report: LadderReport, pictures: Sequence[str]) -> str:
    parts = (
        "# Static against continuous, contiguous against paged",
        *_summary(report),
        *pictures,
        "## Why the figures are what they are",
        *(f"**{title}.** {text}" for title, text in paragraphs(report)),
        "## Arms",
        made.table(("arm", "capacity, requests/s", "settings"), [*_arms(report)]),
        *_rungs(report),
        _said(_WORDS["legend"], missing=MISSING, p99=needed(0.99), p90=needed(0.9), p50=needed(0.5)),
        "## How it was measured",
        made.table(("", ""), _facts(report)),
        *_notes(report),
    )
    return "\n\n".join(parts) + "\n"


def _said(text: str, **filled_in: object) -> str:
    """Return a text of `words.toml` on one line, with its names filled in."""
    return " ".join(text.split()).format(**filled_in)


# -- figures in words


def _interval(one: Interval | None, form: str = ".2f") -> str:
    return MISSING if one is None else bounded(one.value, one.low, one.high, form)


def _rate(one: Interval) -> str:
    """Return a rate with its interval, whose lower bound is never below nothing."""
    return _interval(Interval(one.value, None if one.low is None else max(0.0, one.low), one.high), ".1f")


def _quantile(one: Quantile) -> str:
    """Return a quantile with its interval, or why there is none."""
    if one.interval is None or one.interval.low is one.interval.high is None:
        return _short(one)
    low, high = ("?" if end is None else seconds(end) for end in (one.interval.low, one.interval.high))
    return f"{_short(one)} ({low} to {high})"


def _short(one: Quantile) -> str:
    """Return a quantile without its interval."""
    if one.over_s is not None:
        return f"> {seconds(one.over_s)}" if one.over_s else "none answered"
    return MISSING if one.interval is None else seconds(one.interval.value)


def _three(latency: Latency) -> str:
    """Return P50 / P90 / P99."""
    return " / ".join(map(_short, (latency.p50, latency.p90, latency.p99)))


# -- the comparison, and why it is what it is


Headline = tuple[str, str, str, str, bool | None]
"""What, as measured here, target, as the articles have it, and whether the target is met; None: who knows."""


def headlines(report: LadderReport) -> list[Headline]:
    """Return the comparison with the articles' figures beside it."""
    one = report.comparison
    lines: list[Headline] = []
    for what, ratio, key, target in (
        ("throughput when saturated, to the control", one.throughput_ratio, "throughput_ratio", 1.5),
        ("end-to-end P50 at the control's capacity, to the control", one.p50_ratio, "p50_ratio", 0.6),
        ("end-to-end P99 at the control's capacity, to the control", one.p99_ratio, "p99_ratio", 0.5),
    ):
        at_least = key == "throughput_ratio"
        met = None if ratio is None else ratio.value >= target if at_least else ratio.value <= target
        wanted = f"{'at least' if at_least else 'at most'} {target:g}"
        lines.append((what, _interval(ratio), wanted, f"{ARTICLES[key]:.2f}", met))
    for of, used, key, least in (
        ("paged", one.kv_use_paged, "kv_use_paged", 0.93),
        ("control", one.kv_use_static, "kv_use_static", None),
    ):
        met = None if used is None or least is None else used >= least
        what, wanted = f"KV memory in use when saturated, {of}", f"at least {least:.0%}" if least else "none"
        lines.append((what, share(used), wanted, share(ARTICLES[key], 0), met))
    return lines


def _summary(report: LadderReport) -> Iterator[str]:
    measured = report.measured
    if measured.partial:
        done = f"{len(measured.results)} of {len(measured.plan.cells)}" if measured.plan else "0"
        yield f"**Partial:** {done} cells have been measured. `--resume` goes on with it."
    mark = {None: "", True: ", met", False: ", **missed**"}
    rows = [(*told, target + mark[met], article) for *told, target, article, met in headlines(report)]
    yield made.table(("", "measured", "target", "articles, two A10 GPUs"), rows)
    subject, control = ARMS[report.comparison.subject].title, ARMS[report.comparison.control].title
    yield f"Subject: {subject}. Control: {control}, tuned. Both were named before anything was measured."


def paragraphs(report: LadderReport) -> list[tuple[str, str]]:
    """Return (title, text): why the figures are what they are, and differ from the articles'."""
    told: dict[str, Mapping[str, object] | None] = {
        "lengths": _lengths(report),
        "batching": _batching(report),
        "latency": _latency(report),
        "memory": _memory(report),
    }
    words = _WORDS["explain"]
    text = _throughput(report)
    return [
        *([("Throughput", text)] if text else ()),
        *((words[name]["title"], _said(words[name]["text"], **one)) for name, one in told.items() if one),
    ]


def _throughput(report: LadderReport) -> str:
    one = report.comparison
    if one.throughput_ratio is None:
        return ""
    article = f"the tokens of the control; the articles say {ARTICLES['throughput_ratio']:.2f}."
    text = [f"Saturated, the subject makes {_interval(one.throughput_ratio)} times {article}"]
    told = [
        f"{change.what}: x{_interval(change.ratio)}" for change in report.changes if differs(change.ratio)
    ]
    if told:
        text.append(f"Step by step ({'; '.join(told)}).")
    if len(told) < len(report.changes):
        untold = len(report.changes) - len(told)
        text.append(f"{untold} of {len(report.changes)} steps cannot be told from none.")
    if one.best_static not in (None, CONTROL):
        title = ARMS[one.best_static or CONTROL].title
        waste = f"is waste of the control that a careful static server avoids ({title})"
        gain = "is what continuous batching over paged memory adds to a server that avoids it"
        both = ((one.best_static_over_control, waste), (one.throughput_of_best_static, gain))
        parts = [
            f"x{_interval(ratio)} {what}" for ratio, what in both if ratio is not None and differs(ratio)
        ]
        if parts:
            text.append(f"Of the whole, {', and '.join(parts)}.")
    return " ".join(text)


def _lengths(report: LadderReport) -> dict[str, object] | None:
    control, subject = report.compared(report.comparison.saturated_rung)
    one = subject or control
    results = [r for r in report.measured.results if one is not None and r.cell.arm == one.arm]
    offered = [request.offered for result in results for request in result.run.measured]
    if not offered:
        return None
    prompt = fmean(request.prompt_tokens for request in offered)
    output = fmean(request.output_tokens for request in offered)
    return {"prompt": prompt, "output": output, "ratio": prompt / output}


def _batching(report: LadderReport) -> dict[str, object] | None:
    found = report.measured.found
    sizes = {
        probe.batch_size: probe.tokens_per_s
        for probe in (found.probes if found else ())
        if probe.arm == CONTROL and probe.kind == "saturated" and probe.batch_size
    }
    if len(sizes) < 2:
        return None
    low, high = min(sizes), max(sizes)
    listed = ", ".join(f"{size}: {rate:.0f}" for size, rate in sorted(sizes.items()))
    gain = sizes[high] / sizes[low]
    why = _said(_WORDS["explain"]["batching"]["little" if gain < 1.5 else "much"])
    return {"listed": listed, "low": low, "high": high, "gain": gain, "why": why}


def _latency(report: LadderReport) -> dict[str, object] | None:
    control, subject = report.compared(report.comparison.control_rung)
    if control is None or subject is None:
        return None
    few = min(control.e2e.count, subject.e2e.count) < needed(0.99)
    p99 = f"There were fewer than {needed(0.99)} requests, so no P99 is told. " if few else ""
    arms = (
        f"{ARMS[one.arm].title}: end to end {_three(one.e2e)}, of which in the queue {_three(one.queue)} "
        f"(P50 / P90 / P99; {one.e2e.count} requests)"
        for one in (control, subject)
    )
    return {"rate": control.rate_per_s, "arms": "; ".join(arms), "p99": p99}


def _memory(report: LadderReport) -> dict[str, object] | None:
    static, paged = report.compared(report.comparison.saturated_rung)
    if paged is None or static is None:
        return None
    told: dict[str, object] = {"block_size": report.measured.config.block_size, "rows": static.running}
    for name, one in (("paged", paged), ("static", static)):
        told[f"{name}_written"] = share(one.kv_written_waited)
        told[f"{name}_taken"] = share(one.kv_active)
        told[f"{name}_unwritten"] = share(one.internal)
    return told


# -- tables


def _arms(report: LadderReport) -> Iterator[tuple[str, str, str]]:
    found = report.measured.found
    for name in report.measured.config.arms:
        capacity = found.capacities.get(name) if found else None
        static = found.static.get(name) if found else None
        settings = f"batches of {static.batch_size}, timeout {static.timeout_s:g} s" if static else ""
        yield ARMS[name].title, MISSING if capacity is None else f"{capacity:.2f}", settings


def _failures(one: Figures) -> str:
    kinds = [f"{count:,} {kind}" for kind, count in sorted(one.outcomes.items()) if kind != "ok"]
    return ", ".join(kinds) or "0"


_LATENCY: Final[Columns] = {
    "requests": lambda one: f"{one.requests:,}",
    "end to end P50": lambda one: _quantile(one.e2e.p50),
    "P90": lambda one: _quantile(one.e2e.p90),
    "P99": lambda one: _quantile(one.e2e.p99),
    "TTFT P50 / P90 / P99": lambda one: _three(one.ttft),
    "TPOT P50 / P90 / P99": lambda one: _three(one.tpot),
    "inter-token P50 / P90 / P99": lambda one: _three(one.itl),
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
        waits = []
        for one in rows:
            parts = (one.queue, *one.queue_by_bucket.values())
            short = (f"{_short(part.p50)} / {_short(part.p90)}" for part in parts)
            waits.append((ARMS[one.arm].title, *short))
        buckets = (f"{name} tokens" for name in rows[0].queue_by_bucket)
        yield made.table(("arm: time in the queue, P50 / P90", "all", *buckets), waits)


def _facts(report: LadderReport) -> list[tuple[str, object]]:
    """Return what is fixed and recorded, and what it was judged by."""
    measured, head, rows = report.measured, report.measured.head, [*report.rows()]
    config, here = head.config, head.environments[-1] if head.environments else {}
    hardware, software = here.get("hardware", {}), here.get("software", {})
    served: dict[str, Any] = next((one["served"] for one in head.environments if one.get("served")), {})
    packages = ", ".join(f"{name} {number}" for name, number in software.get("packages", {}).items())
    machine = f"{hardware.get('cpu')}, {hardware.get('cores')} cores, {hardware.get('memory_gib')} GiB"
    model, runner = served.get("model", config.model), served.get("runner", config.runner)
    limits = (
        f"{config.num_blocks} blocks of {config.block_size} tokens, max_num_seqs {config.max_num_seqs}, "
        f"max_num_batched_tokens {config.max_num_batched_tokens}"
    )
    arrivals = f"{type(config.process(1.0)).__name__}, open loop, seed {config.seed}"
    repeats = measured.plan.repeats if measured.plan else config.repeats
    order = f"{repeats} repeats, arms in an order drawn anew at each rung of each"
    warm_up = f"{config.warm_up_s:g} s of warm-up"
    if OVERLOAD in config.rungs:
        warm_up += f", at the highest rung {config.warm_up_of(OVERLOAD):g} s, which begin with "
        warm_up += f"{config.backlog} requests at once"
    late, total = sum(one.late_sends for one in rows), sum(one.requests for one in rows)
    worst = seconds(max((one.max_lateness_s for one in rows), default=0.0))
    busiest = max((one.generator_cpu_share for one in rows), default=0.0)
    generator = f"{late:,} of {total:,} requests sent more than 10 ms late, at most {worst}"
    return [
        ("begun, reported", f"{head.started_at}, {report.ended_at}"),
        ("preset, budget", f"{config.preset}, {config.budget_s / 60:.0f} min"),
        ("hardware", f"{machine}; GPUs: {', '.join(hardware.get('gpus', [])) or 'none'}"),
        ("software", f"{software.get('os')}, Python {software.get('python')}, {packages}"),
        ("commit", software.get("commit")),
        ("model", f"{model} (revision {served.get('revision')}), {runner} runner, context {config.context}"),
        ("memory and limits, all arms", limits),
        ("dataset", head.dataset.get("description")),
        ("arrivals", f"{arrivals}: the same times and requests for all arms of a repeat"),
        ("cells", f"{order}; {warm_up}; latencies count from the planned time"),
        ("time in the queue, at most", f"{config.queue_timeout_s:g} s"),
        ("SLO of goodput", parse_slo(config.slo)),
        ("price", f"{config.price_per_hour:g} per hour of this machine"),
        ("generator", f"{generator}; at most {100 * busiest:.0f}% of a core"),
    ]


def _notes(report: LadderReport) -> Iterator[str]:
    """Yield what the budget cost, and what did not go as planned."""
    head, plan = report.measured.head, report.measured.plan
    told = list(plan.notes if plan is not None else ())
    if len(head.environments) > 1:
        told.append(f"measured in {len(head.environments)} goes (`--resume`)")
    told.extend(f"an attempt that came to nothing: {one}" for one in head.failures)
    if told:
        yield "**Notes:**\n\n" + "\n".join(f"- {note}" for note in told)
