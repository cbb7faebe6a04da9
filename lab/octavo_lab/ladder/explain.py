"""What the figures say, in sentences made from them and from `words.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from statistics import fmean
from typing import Any, Final

from octavo_lab.ladder.config import ARMS, CONTROL
from octavo_lab.ladder.figures import Figures, Latency, Quantile
from octavo_lab.ladder.report import ARTICLES, LadderReport, differs
from octavo_lab.load.statistics import Interval, needed
from octavo_lab.report import MISSING, bounded, seconds, share

WORDS: Final = tomllib.loads((resources.files("octavo_lab.ladder") / "words.toml").read_text("utf-8"))


def said(text: str, **filled_in: object) -> str:
    """Return a text of `WORDS` on one line, with its names filled in."""
    return " ".join(text.split()).format(**filled_in)


def legend() -> str:
    """Return how the tables are to be read."""
    return said(WORDS["legend"], missing=MISSING, p99=needed(0.99), p90=needed(0.9), p50=needed(0.5))


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
    lines = []
    for what, ratio, key, target in (
        ("throughput when saturated, to the control", one.throughput_ratio, "throughput_ratio", 1.5),
        ("end-to-end P50 at the control's capacity, to the control", one.p50_ratio, "p50_ratio", 0.6),
        ("end-to-end P99 at the control's capacity, to the control", one.p99_ratio, "p99_ratio", 0.5),
    ):
        at_least = key == "throughput_ratio"
        met = None if ratio is None else ratio.value >= target if at_least else ratio.value <= target
        wanted = f"{'at least' if at_least else 'at most'} {target:g}"
        lines.append(Headline(what, interval(ratio), f"{ARTICLES[key]:.2f}", wanted, met))
    for of, used, key, least in (
        ("paged", one.kv_use_paged, "kv_use_paged", 0.93),
        ("control", one.kv_use_static, "kv_use_static", None),
    ):
        met = None if used is None or least is None else used >= least
        what, wanted = f"KV memory in use when saturated, {of}", f"at least {least:.0%}" if least else "none"
        lines.append(Headline(what, share(used), share(ARTICLES[key], 0), wanted, met))
    return lines


def paragraphs(report: LadderReport) -> list[tuple[str, str]]:
    """Return (title, text): why the figures are what they are, and differ from the articles'."""
    found = (_throughput(report), _lengths(report), _batching(report), _latency(report), _memory(report))
    return [one for one in found if one is not None]


def _explained(about: str, **filled_in: object) -> tuple[str, str]:
    words: Mapping[str, Any] = WORDS["explain"][about]
    return words["title"], said(words["text"], **filled_in)


def _throughput(report: LadderReport) -> tuple[str, str] | None:
    one = report.comparison
    if one.throughput_ratio is None:
        return None
    article = f"the tokens of the control; the articles say {ARTICLES['throughput_ratio']:.2f}."
    text = [f"Saturated, the subject makes {interval(one.throughput_ratio)} times {article}"]
    told = [f"{change.what}: x{interval(change.ratio)}" for change in report.changes if differs(change.ratio)]
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
        parts = [f"x{interval(ratio)} {what}" for ratio, what in both if ratio is not None and differs(ratio)]
        if parts:
            text.append(f"Of the whole, {', and '.join(parts)}.")
    return "Throughput", " ".join(text)


def _lengths(report: LadderReport) -> tuple[str, str] | None:
    control, subject = report.compared(report.comparison.saturated_rung)
    one = subject or control
    results = [r for r in report.measured.results if one is not None and r.cell.arm == one.arm]
    offered = [request.offered for result in results for request in result.run.measured]
    if not offered:
        return None
    prompt = fmean(request.prompt_tokens for request in offered)
    output = fmean(request.output_tokens for request in offered)
    return _explained("lengths", prompt=prompt, output=output, ratio=prompt / output)


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
    why = said(WORDS["explain"]["batching"]["little" if gain < 1.5 else "much"])
    return _explained("batching", listed=listed, low=low, high=high, gain=gain, why=why)


def _latency(report: LadderReport) -> tuple[str, str] | None:
    control, subject = report.compared(report.comparison.control_rung)
    if control is None or subject is None:
        return None
    few = min(control.e2e.count, subject.e2e.count) < needed(0.99)
    p99 = f"There were fewer than {needed(0.99)} requests, so no P99 is told. " if few else ""
    arms = f"{_waits(control)}; {_waits(subject)}"
    return _explained("latency", rate=control.rate_per_s, arms=arms, p99=p99)


def _waits(one: Figures) -> str:
    ends = f"end to end {three(one.e2e)}, of which in the queue {three(one.queue)}"
    return f"{ARMS[one.arm].title}: {ends} (P50 / P90 / P99; {one.e2e.count} requests)"


def _memory(report: LadderReport) -> tuple[str, str] | None:
    static, paged = report.compared(report.comparison.saturated_rung)
    if paged is None or static is None:
        return None
    return _explained(
        "memory",
        paged_written=share(paged.kv_written_waited),
        paged_taken=share(paged.kv_active),
        paged_unwritten=share(paged.internal),
        block_size=report.measured.config.block_size,
        static_written=share(static.kv_written_waited),
        static_taken=share(static.kv_active),
        static_unwritten=share(static.internal),
        rows=static.running,
    )
