"""The report as Markdown: everything but the plots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from octavo_lab.ladder import words
from octavo_lab.ladder.arms import ARMS
from octavo_lab.ladder.config import OVERLOAD, RUNGS, LadderConfig
from octavo_lab.ladder.explain import arm_lines, headlines, paragraphs
from octavo_lab.ladder.figures import Figures
from octavo_lab.ladder.report import Report
from octavo_lab.serve.plan import parse_slo

Rows = Sequence[Sequence[str]]


def as_markdown(report: Report) -> str:
    """Return the report."""
    parts = [
        "# Static against continuous, contiguous against paged",
        *_status(report),
        _summary(report),
        "## Why the figures are what they are",
        *(f"**{title}.** {text}" for title, text in paragraphs(report)),
        "## Arms",
        table(("arm", "capacity, requests/s", "settings"), list(arm_lines(report))),
        *_rungs(report),
        words.LEGEND,
        "## How it was measured",
        table(("", ""), facts(report)),
        *_notes(report),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _status(report: Report) -> list[str]:
    measured = report.measured
    if not measured.partial:
        return []
    total = len(measured.plan.cells) if measured.plan else None
    of = f" of {total}" if total else ""
    return [f"**Partial:** {len(measured.results)}{of} cells have been measured. `--resume` goes on with it."]


def _summary(report: Report) -> str:
    rows = [
        (
            one.what,
            one.measured,
            one.target + ("" if one.met is None else ", met" if one.met else ", **missed**"),
            one.article,
        )
        for one in headlines(report)
    ]
    subject, control = ARMS[report.comparison.subject].title, ARMS[report.comparison.control].title
    return (
        table(("", "measured", "target", "articles, two A10 GPUs"), rows)
        + f"\n\nSubject: {subject}. Control: {control}, tuned. Both were named before anything was measured."
    )


def _rungs(report: Report) -> Iterable[str]:
    for number, (rung, rate) in enumerate(report.rungs.items(), 1):
        rows = [one for one in report.rows() if one.rung == rung]
        if not rows:
            continue
        yield f"## Rung {number}: {RUNGS[rung]}, {rate:.2f} requests/s"
        yield table(LATENCY_HEADER, [latency_row(one) for one in rows])
        yield table(SERVICE_HEADER, [service_row(one) for one in rows])
        yield table(MEMORY_HEADER, [memory_row(one) for one in rows])
        yield table(queue_header(rows), [queue_row(one) for one in rows])


LATENCY_HEADER = (
    "arm",
    "requests",
    "end to end P50",
    "P90",
    "P99",
    "TTFT P50 / P90 / P99",
    "TPOT P50 / P90 / P99",
    "inter-token P50 / P90 / P99",
)
SERVICE_HEADER = (
    "arm",
    "output tokens/s",
    "answered/s",
    "good/s",
    "within SLO",
    "not answered",
    "preemptions",
    "prompt from cache",
    "cost of 1000 tokens",
    "late sends",
)
MEMORY_HEADER = (
    "arm",
    "KV written",
    "KV taken",
    "cached and free",
    "internal fragmentation",
    "external fragmentation",
    "running",
    "worker's memory",
    "GPU memory",
)


def latency_row(one: Figures) -> tuple[str, ...]:
    """Return the latencies of one arm at one rung."""
    return (
        ARMS[one.arm].title,
        f"{one.requests:,}",
        words.quantile(one.e2e.p50),
        words.quantile(one.e2e.p90),
        words.quantile(one.e2e.p99),
        words.three(one.ttft),
        words.three(one.tpot),
        words.three(one.itl),
    )


def service_row(one: Figures) -> tuple[str, ...]:
    """Return what one arm did at one rung."""
    cost = words.MISSING if one.cost_per_1k_tokens is None else f"{one.cost_per_1k_tokens:.5f}"
    return (
        ARMS[one.arm].title,
        words.rate(one.tokens_per_s),
        words.rate(one.requests_per_s),
        words.rate(one.goodput_per_s),
        words.share(one.good_share, 0),
        failures(one),
        f"{one.preemptions:,}",
        words.share(one.cached_share),
        cost,
        f"{one.late_sends:,}",
    )


def failures(one: Figures) -> str:
    """Return what was not answered, by kind."""
    kinds = [f"{count:,} {kind}" for kind, count in sorted(one.outcomes.items()) if kind != "ok"]
    return ", ".join(kinds) or "0"


def memory_row(one: Figures) -> tuple[str, ...]:
    """Return what one arm took of memory at one rung."""
    external = words.share(one.external) if ARMS[one.arm].static else "none matters"
    return (
        ARMS[one.arm].title,
        f"{words.share(one.kv_written.value)}",
        words.share(one.kv_active),
        words.share(one.kv_cached),
        words.share(one.internal),
        external,
        f"{one.running:.1f}",
        words.mib(one.host_bytes),
        words.mib(one.device_bytes),
    )


def queue_header(rows: Sequence[Figures]) -> tuple[str, ...]:
    """Return the header of queue times; buckets are by prompt tokens."""
    return (
        "arm: time in the queue, P50 / P90",
        "all",
        *(f"{name} tokens" for name in rows[0].queue_by_bucket),
    )


def queue_row(one: Figures) -> tuple[str, ...]:
    """Return the queue times of one arm at one rung."""
    return (
        ARMS[one.arm].title,
        *(
            f"{words.short(part.p50)} / {words.short(part.p90)}"
            for part in (one.queue, *one.queue_by_bucket.values())
        ),
    )


def facts(report: Report) -> list[tuple[str, str]]:
    """Return what is fixed and recorded, and what it was judged by."""
    measured = report.measured
    config = measured.config
    here: dict[str, Any] = measured.environments[-1] if measured.environments else {}
    hardware, software, served = (
        here.get("hardware", {}),
        here.get("software", {}),
        _served(measured.environments),
    )
    packages = ", ".join(f"{name} {number}" for name, number in software.get("packages", {}).items())
    gpus = ", ".join(hardware.get("gpus", [])) or "none"
    found = measured.plan
    return [
        ("begun, reported", f"{measured.started_at}, {report.ended_at}"),
        ("preset, budget", f"{config.preset}, {config.budget_s / 60:.0f} min"),
        (
            "hardware",
            (
                f"{hardware.get('cpu')}, {hardware.get('cores')} cores, {hardware.get('memory_gib')} GiB; "
                f"GPUs: {gpus}"
            ),
        ),
        ("software", f"{software.get('os')}, Python {software.get('python')}, {packages}"),
        ("commit", str(software.get("commit"))),
        (
            "model",
            (
                f"{served.get('model', config.model)} (revision {served.get('revision')}), "
                f"{served.get('runner', config.runner)} runner, context {config.context}"
            ),
        ),
        (
            "memory and limits, all arms",
            (
                f"{config.num_blocks} blocks of {config.block_size} tokens, max_num_seqs "
                f"{config.max_num_seqs}, max_num_batched_tokens {config.max_num_batched_tokens}"
            ),
        ),
        ("dataset", str(measured.dataset.get("description"))),
        (
            "arrivals",
            (
                f"{config.process(1.0).__class__.__name__}, open loop, seed {config.seed}: the same times "
                "and requests for all arms of a repeat"
            ),
        ),
        (
            "cells",
            (
                f"{found.repeats if found else config.repeats} repeats, arms in an order drawn anew at "
                f"each rung of each; {_warm_up(config)}; latencies count from the planned time"
            ),
        ),
        ("time in the queue, at most", f"{config.queue_timeout_s:g} s"),
        ("SLO of goodput", str(parse_slo(config.slo))),
        ("price", f"{config.price_per_hour:g} per hour of this machine"),
        ("generator", generator(report)),
    ]


def _warm_up(config: LadderConfig) -> str:
    told = f"{config.warm_up_s:g} s of warm-up"
    if OVERLOAD not in config.rungs:
        return told
    return (
        f"{told}, at the highest rung {config.warm_up_of(OVERLOAD):g} s, which begin with "
        f"{config.backlog} requests at once"
    )


def _served(environments: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return next((one["served"] for one in environments if one.get("served")), {})


def generator(report: Report) -> str:
    """Return what the generator was worth."""
    rows = list(report.rows())
    late = sum(one.late_sends for one in rows)
    total = sum(one.requests for one in rows)
    worst = max((one.max_lateness_s for one in rows), default=0.0)
    busiest = max((one.generator_cpu_share for one in rows), default=0.0)
    return (
        f"{late:,} of {total:,} requests sent more than 10 ms late, at most {words.seconds(worst)}; at "
        f"most {100 * busiest:.0f}% of a core"
    )


def notes(report: Report) -> list[str]:
    """Return what the budget cost, and what did not go as planned."""
    measured = report.measured
    told = list(measured.plan.notes if measured.plan is not None else ())
    if len(measured.environments) > 1:
        told.append(f"measured in {len(measured.environments)} goes (`--resume`)")
    told.extend(f"an attempt that came to nothing: {one}" for one in measured.failures)
    return told


def _notes(report: Report) -> list[str]:
    told = "\n".join(f"- {note}" for note in notes(report))
    return [f"**Notes:**\n\n{told}"] if told else []


def table(header: Sequence[str], rows: Rows) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(row) + " |" for row in (header, *rows)]
    lines.insert(1, "|" + "---|" * len(header))
    return "\n".join(lines)
