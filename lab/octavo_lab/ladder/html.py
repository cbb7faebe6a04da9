"""The report as one page that needs nothing else: tables, sentences, plots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from octavo_lab.ladder import markdown as md
from octavo_lab.ladder import words
from octavo_lab.ladder.arms import ARMS
from octavo_lab.ladder.config import RUNGS
from octavo_lab.ladder.explain import Headline, arm_lines, headlines, paragraphs
from octavo_lab.ladder.plots import plots
from octavo_lab.ladder.report import Report

_STYLE: Final = """
:root { --ink: #1f2328; --soft: #57606a; --line: #d8dee4; --good: #0b6e4f; --bad: #b3261e; --paper: #fff; }
* { box-sizing: border-box; }
body { margin: 0; background: #f6f8fa; color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 40px 24px 80px; }
h1 { font-size: 30px; line-height: 1.2; margin: 0 0 6px; letter-spacing: -0.01em; }
h2 { font-size: 20px; margin: 44px 0 12px; }
h3 { font-size: 15px; margin: 0 0 2px; }
p { margin: 0 0 12px; max-width: 78ch; }
.lead, .soft { color: var(--soft); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr));
  gap: 12px; margin: 24px 0 8px; }
.card, figure, .scroll { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; }
.card { padding: 14px 16px; }
.card .value { font-size: 28px; line-height: 1.15; font-weight: 650; letter-spacing: -0.02em; }
.card .value small { font-size: 13px; font-weight: 400; color: var(--soft); letter-spacing: 0; }
.card .what { color: var(--soft); font-size: 13px; line-height: 1.35; min-height: 4.1em; }
.card .note { font-size: 12.5px; margin-top: 6px; color: var(--soft); }
.met { color: var(--good); font-weight: 600; } .missed { color: var(--bad); font-weight: 600; }
figure { margin: 0 0 18px; padding: 16px 18px; }
figure svg { width: 100%; height: auto; display: block; }
figure svg text { font-family: inherit !important; }
figcaption { color: var(--soft); font-size: 13.5px; margin: 0 0 8px; max-width: 90ch; }
.scroll { overflow-x: auto; margin: 0 0 14px; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 6px 12px; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
td:not(:first-child) { white-space: nowrap; } td:first-child { min-width: 190px; }
.facts td { white-space: normal; } tr:last-child td { border-bottom: 0; }
.warn { background: #fff8e5; border: 1px solid #e7c873; border-radius: 10px; padding: 10px 14px; }
details { margin: 0 0 10px; } summary { cursor: pointer; font-weight: 600; padding: 6px 0; }
"""


def as_html(report: Report) -> str:
    """Return the page."""
    measured = report.measured
    subject, control = ARMS[report.comparison.subject].title, ARMS[report.comparison.control].title
    parts = [
        "<h1>Static against continuous, contiguous against paged</h1>",
        (
            f'<p class="lead">The same traffic, the same model, the same memory. Subject: {escape(subject)}. '
            f"Control: {escape(control)}, tuned. Begun {escape(measured.started_at)}.</p>"
        ),
        *_partial(report),
        '<div class="cards">' + "".join(map(_card, headlines(report))) + "</div>",
        (
            '<p class="soft">The articles\' figures are from Llama-2-13B on two A10 GPUs with ShareGPT; '
            "they are context, not a target.</p>"
        ),
        *(_figure(*plot) for plot in plots(report)),
        "<h2>Why the figures are what they are</h2>",
        *(f"<p><b>{escape(title)}.</b> {escape(text)}</p>" for title, text in paragraphs(report)),
        "<h2>Arms</h2>",
        _table(("arm", "capacity, requests/s", "settings"), list(arm_lines(report))),
        "<h2>All figures</h2>",
        f'<p class="soft">{escape(words.LEGEND)}</p>',
        *_rungs(report),
        "<h2>How it was measured</h2>",
        _table((), md.facts(report), kind="facts"),
        *_notes(report),
    ]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<title>Octavo: the "
        f"ladder</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _partial(report: Report) -> Iterable[str]:
    measured = report.measured
    if measured.partial:
        total = len(measured.plan.cells) if measured.plan else "?"
        yield f'<p class="warn">Partial: {len(measured.results)} of {total} cells have been measured.</p>'


def _card(one: Headline) -> str:
    value, _, interval = one.measured.partition(" (")
    small = (
        f"<br><small>95%: {escape(interval.rstrip(')'))}</small>" if interval else "<br><small>&nbsp;</small>"
    )
    state = ""
    if one.met is not None:
        state = ' · <span class="met">met</span>' if one.met else ' · <span class="missed">missed</span>'
    target = "" if one.target == "none" else f"target {escape(one.target)}{state}<br>"
    return (
        f'<div class="card"><div class="what">{escape(one.what)}</div>'
        f'<div class="value">{escape(value)}{small}</div>'
        f'<div class="note">{target}articles: {escape(one.article)}</div></div>'
    )


def _figure(title: str, caption: str, svg: str) -> str:
    return f"<figure><h3>{escape(title)}</h3><figcaption>{escape(caption)}</figcaption>{svg}</figure>"


def _rungs(report: Report) -> Iterable[str]:
    for number, (rung, rate) in enumerate(report.rungs.items(), 1):
        rows = [one for one in report.rows() if one.rung == rung]
        if not rows:
            continue
        opened = " open" if rung == report.comparison.control_rung else ""
        yield (
            f"<details{opened}><summary>Rung {number}: {escape(RUNGS[rung])}, {rate:.2f} requests/s</summary>"
            + _table(md.LATENCY_HEADER, [md.latency_row(one) for one in rows])
            + _table(md.SERVICE_HEADER, [md.service_row(one) for one in rows])
            + _table(md.MEMORY_HEADER, [md.memory_row(one) for one in rows])
            + _table(md.queue_header(rows), [md.queue_row(one) for one in rows])
            + "</details>"
        )


def _notes(report: Report) -> Iterable[str]:
    items = "".join(f"<li>{escape(note)}</li>" for note in md.notes(report))
    if items:
        yield f"<p><b>Notes:</b></p><ul>{items}</ul>"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    head = "<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in header) + "</tr>" if header else ""
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table class="{kind}">{head}{body}</table></div>'
