"""What the figures say, in sentences made from them."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from octavo_lab.ladder.arms import ARMS, CONTROL
from octavo_lab.ladder.compare import ARTICLES, differs
from octavo_lab.ladder.figures import Latency, Quantile
from octavo_lab.ladder.report import LadderReport
from octavo_lab.load.statistics import Interval, needed
from octavo_lab.report import MISSING, bounded, seconds, share

# -- figures in words


def interval(one: Interval | None, form: str = ".2f") -> str:
    """Return an estimate with its interval."""
    return MISSING if one is None else bounded(one.value, one.low, one.high, form)


def quantile(one: Quantile) -> str:
    """Return a quantile with its interval, or why there is none."""
    if one.interval is None or one.interval.low is one.interval.high is None:
        return short(one)
    low, high = ("?" if end is None else seconds(end) for end in (one.interval.low, one.interval.high))
    return f"{short(one)} ({low} to {high})"


def short(one: Quantile) -> str:
    """Return a quantile without its interval."""
    if one.over_s is not None:
        return f"> {seconds(one.over_s)}" if one.over_s else "none answered"
    return MISSING if one.interval is None else seconds(one.interval.value)


def three(latency: Latency) -> str:
    """Return P50 / P90 / P99."""
    return " / ".join(map(short, (latency.p50, latency.p90, latency.p99)))


# -- the comparison


@dataclass(frozen=True, slots=True)
class Headline:
    """One line of the comparison."""

    what: str
    measured: str
    article: str
    target: str
    met: bool | None
    """None: nothing was promised, or nothing measured."""


def headlines(report: LadderReport) -> list[Headline]:
    """Return the comparison with the articles' figures beside it."""
    one = report.comparison
    ratios = (
        ("throughput when saturated, to the control", one.throughput_ratio, "throughput_ratio", 1.5),
        ("end-to-end P50 at the control's capacity, to the control", one.p50_ratio, "p50_ratio", 0.6),
        ("end-to-end P99 at the control's capacity, to the control", one.p99_ratio, "p99_ratio", 0.5),
    )
    lines = []
    for what, ratio, key, target in ratios:
        at_least = key == "throughput_ratio"
        met = None if ratio is None else ratio.value >= target if at_least else ratio.value <= target
        wanted = f"{'at least' if at_least else 'at most'} {target:g}"
        lines.append(Headline(what, interval(ratio), f"{ARTICLES[key]:.2f}", wanted, met))
    for of, used, key, wanted in (
        ("paged", one.kv_use_paged, "kv_use_paged", "at least 93%"),
        ("control", one.kv_use_static, "kv_use_static", "none"),
    ):
        met = None if used is None or wanted == "none" else used >= 0.93
        what = f"KV memory in use when saturated, {of}"
        lines.append(Headline(what, share(used), share(ARTICLES[key], 0), wanted, met))
    return lines


def paragraphs(report: LadderReport) -> list[tuple[str, str]]:
    """Return (title, text): why the figures are what they are, and differ from the articles'."""
    found = (_throughput(report), _lengths(report), _batching(report), _latency(report), _memory(report))
    return [one for one in found if one is not None]


def _throughput(report: LadderReport) -> tuple[str, str] | None:
    one = report.comparison
    if one.throughput_ratio is None:
        return None
    said = f"the tokens of the control; the articles say {ARTICLES['throughput_ratio']:.2f}."
    text = [f"Saturated, the subject makes {interval(one.throughput_ratio)} times {said}"]
    told = [f"{change.what}: {_times(change.ratio)}" for change in report.changes if differs(change.ratio)]
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
        parts = [f"{_times(ratio)} {what}" for ratio, what in both if ratio is not None and differs(ratio)]
        if parts:
            text.append(f"Of the whole, {', and '.join(parts)}.")
    return "Throughput", " ".join(text)


def _times(ratio: Interval) -> str:
    return f"x{interval(ratio)}"


def _lengths(report: LadderReport) -> tuple[str, str] | None:
    control, subject = report.compared(report.comparison.saturated_rung)
    one = subject or control
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


def _batching(report: LadderReport) -> tuple[str, str] | None:
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


def _latency(report: LadderReport) -> tuple[str, str] | None:
    control, subject = report.compared(report.comparison.control_rung)
    if control is None or subject is None:
        return None
    told = [
        f"{ARMS[one.arm].title}: end to end {three(one.e2e)}, of which in the queue {three(one.queue)} "
        f"(P50 / P90 / P99; {one.e2e.count} requests)"
        for one in (control, subject)
    ]
    text = f"At {control.rate_per_s:.2f} requests per second, {'; '.join(told)}. "
    if min(control.e2e.count, subject.e2e.count) < needed(0.99):
        text += f"There were fewer than {needed(0.99)} requests, so no P99 is told. "
    text += (
        "In the control a request waits for the batch under way to end and for its own to fill, then for "
        "the longest of its batch before the places are free again. The capacity is the throughput of "
        "whole batches less a tenth; nearer to it the control's queue would be longer, and the ratios "
        "would look better."
    )
    return "Latency", text


def _memory(report: LadderReport) -> tuple[str, str] | None:
    static, paged = report.compared(report.comparison.saturated_rung)
    if paged is None or static is None:
        return None
    config = report.measured.config
    return "KV memory", (
        f"Saturated, {share(paged.kv_written_waited)} of all slots of the paged pool are written: "
        f"{share(paged.kv_active)} are taken, of which {share(paged.internal)} are the "
        f"unwritten ends of last blocks ({config.block_size} tokens each). Of the control's, "
        f"{share(static.kv_written_waited)} are written: {share(static.kv_active)} are "
        f"reserved, of which {share(static.internal)} wait for tokens that have not been generated "
        f"yet, and the rows of {static.running:.0f} requests on average, finished ones included, are all "
        "that a batch holds. The articles put their 46% down to every request being padded to the "
        "greatest length. Here each reservation is exact, since a request's length is known from the "
        "trace: the control is better off than it would be in service."
    )
