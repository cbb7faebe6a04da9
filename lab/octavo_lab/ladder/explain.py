"""What the figures say, in sentences made from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

from octavo_lab.ladder import words
from octavo_lab.ladder.arms import ARMS, CONTROL, SUBJECT
from octavo_lab.ladder.compare import ARTICLES, differs
from octavo_lab.ladder.figures import Figures
from octavo_lab.ladder.report import Report
from octavo_lab.load.statistics import Interval, needed


@dataclass(frozen=True, slots=True)
class Headline:
    """One line of the comparison."""

    what: str
    measured: str
    article: str
    target: str
    met: bool | None
    """None: nothing was promised, or nothing measured."""


def headlines(report: Report) -> list[Headline]:
    """Return the comparison with the articles' figures beside it."""
    one = report.comparison
    ratios = (
        ("throughput when saturated, to the control", one.throughput_ratio, "throughput_ratio", ">=", 1.5),
        ("end-to-end P50 at the control's capacity, to the control", one.p50_ratio, "p50_ratio", "<=", 0.6),
        ("end-to-end P99 at the control's capacity, to the control", one.p99_ratio, "p99_ratio", "<=", 0.5),
    )
    lines = [
        Headline(
            what,
            words.plain(value),
            f"{ARTICLES[key]:.2f}",
            f"{'at least' if sign == '>=' else 'at most'} {target:g}",
            _met(value.value if value else None, sign, target),
        )
        for what, value, key, sign, target in ratios
    ]
    paged, static = one.kv_use_paged, one.kv_use_static
    lines.append(
        Headline(
            "KV memory in use when saturated, paged",
            words.share(paged),
            words.share(ARTICLES["kv_use_paged"], 0),
            "at least 93%",
            _met(paged, ">=", 0.93),
        )
    )
    lines.append(
        Headline(
            "KV memory in use when saturated, control",
            words.share(static),
            words.share(ARTICLES["kv_use_static"], 0),
            "none",
            None,
        )
    )
    return lines


def _met(value: float | None, sign: str, target: float) -> bool | None:
    if value is None:
        return None
    return value >= target if sign == ">=" else value <= target


def paragraphs(report: Report) -> list[tuple[str, str]]:
    """Return (title, text): why the figures are what they are, and differ from the articles'."""
    found = (_throughput(report), _lengths(report), _batching(report), _latency(report), _memory(report))
    return [one for one in found if one is not None]


def _top(report: Report, arm: str) -> Figures | None:
    return report.figures.get((arm, report.comparison.saturated_rung or ""))


def _throughput(report: Report) -> tuple[str, str] | None:
    ratio, best = report.comparison.throughput_ratio, report.comparison.throughput_of_best_static
    if ratio is None:
        return None
    text = (
        f"Saturated, the subject makes {words.plain(ratio)} times the tokens of the control; the articles "
        f"say {ARTICLES['throughput_ratio']:.2f}. "
    )
    told = [f"{step.what}: {_times(step.ratio)}" for step in report.steps if differs(step.ratio)]
    if told:
        text += f"Step by step ({'; '.join(told)}). "
    if len(told) < len(report.steps):
        text += f"{len(report.steps) - len(told)} of {len(report.steps)} steps cannot be told from none. "
    waste = report.comparison.best_static_over_control
    if report.comparison.best_static not in (None, CONTROL):
        best_title = ARMS[report.comparison.best_static or CONTROL].title
        parts = [
            f"{_times(part)} {what}"
            for part, what in (
                (waste, f"is waste of the control that a careful static server avoids ({best_title})"),
                (best, "is what continuous batching over paged memory adds to a server that avoids it"),
            )
            if part is not None and differs(part)
        ]
        if parts:
            text += f"Of the whole, {', and '.join(parts)}."
    return "Throughput", text.rstrip()


def _times(ratio: Interval) -> str:
    return f"x{words.plain(ratio)}"


def _lengths(report: Report) -> tuple[str, str] | None:
    one = _top(report, SUBJECT) or _top(report, CONTROL)
    results = [r for r in report.measured.results if one is not None and r.cell.arm == one.arm]
    requests = [request for result in results for request in result.run.measured]
    if not requests:
        return None
    prompt = fmean(request.offered.prompt_tokens for request in requests)
    output = fmean(request.offered.output_tokens for request in requests)
    return "Lengths", (
        f"Requests have {prompt:.0f} prompt and {output:.0f} output tokens on average, "
        f"{prompt / output:.1f} to 1. In ShareGPT, which the articles used, answers are at least as long "
        "as prompts. The computing of a prompt costs every arm the same, except for padding, and only "
        "what happens while tokens are generated can be saved by letting rows leave and join. The more "
        "of the work is prompts, the nearer the arms are to each other."
    )


def _batching(report: Report) -> tuple[str, str] | None:
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
    text = (
        f"The control, saturated, makes so many tokens per second by batch size: {listed}. From {low} to "
        f"{high} rows that is x{gain:.2f}. "
    )
    if gain < 1.5:
        text += (
            "Where a row more costs its own time, as arithmetic does on a few cores, an empty place "
            "costs little; what is lost is what is computed in vain: padding, and rows that have "
            "finished. On a GPU such as the A10 a decode step is bound by reading the weights, a row "
            "more costs almost nothing, and each place that stays empty is lost throughput, whether it "
            "is computed or not."
        )
    else:
        text += "Larger batches pay here, as they do on a GPU: places that stay empty are lost throughput."
    return "What a larger batch is worth", text


def _latency(report: Report) -> tuple[str, str] | None:
    rung = report.comparison.control_rung or ""
    pair = report.figures.get((CONTROL, rung)), report.figures.get((SUBJECT, rung))
    if pair[0] is None or pair[1] is None:
        return None
    told = []
    for arm, one in ((CONTROL, pair[0]), (SUBJECT, pair[1])):
        told.append(
            f"{ARMS[arm].title}: end to end {words.three(one.e2e)}, of which in the queue "
            f"{words.three(one.queue)} (P50 / P90 / P99; {one.e2e.count} requests)"
        )
    text = f"At {pair[0].rate_per_s:.2f} requests per second, {'; '.join(told)}. "
    if pair[0].e2e.count < needed(0.99) or pair[1].e2e.count < needed(0.99):
        text += f"There were fewer than {needed(0.99)} requests, so no P99 is told. "
    text += (
        "In the control a request waits for the batch under way to end and for its own to fill, then for "
        "the longest of its batch before the places are free again. The capacity is the throughput of "
        "whole batches less a tenth; nearer to it the control's queue would be longer, and the ratios "
        "would look better."
    )
    return "Latency", text


def _memory(report: Report) -> tuple[str, str] | None:
    paged, static = _top(report, SUBJECT), _top(report, CONTROL)
    if paged is None or static is None:
        return None
    config = report.measured.config
    return "KV memory", (
        f"Saturated, {words.share(paged.kv_written_waited)} of all slots of the paged pool are written: "
        f"{words.share(paged.kv_active)} are taken, of which {words.share(paged.internal)} are the "
        f"unwritten ends of last blocks ({config.block_size} tokens each). Of the control's, "
        f"{words.share(static.kv_written_waited)} are written: {words.share(static.kv_active)} are "
        f"reserved, of which {words.share(static.internal)} wait for tokens that have not been generated "
        f"yet, and the rows of {static.running:.0f} requests on average, finished ones included, are all "
        "that a batch holds. The articles put their 46% down to every request being padded to the "
        "greatest length. Here each reservation is exact, since a request's length is known from the "
        "trace: the control is better off than it would be in service."
    )


def arm_lines(report: Report) -> Iterator[tuple[str, str, str]]:
    """Yield (title, capacity in requests per second, settings) of each arm."""
    found = report.measured.found
    for name in report.measured.config.arms:
        arm = ARMS[name]
        capacity = f"{found.capacities[name]:.2f}" if found and name in found.capacities else words.MISSING
        settings = ""
        if arm.static and found and name in found.static:
            static = found.static[name]
            settings = f"batches of {static.batch_size}, timeout {static.timeout_s:g} s"
        yield arm.title, capacity, settings
