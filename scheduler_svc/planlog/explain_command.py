"""What `octavo explain` says of a request, from a plan log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo.cli import output

from scheduler_svc.planlog.account import TimeAccount, TimePart
from scheduler_svc.planlog.explain import RequestStory
from scheduler_svc.planlog.finding import find_request
from scheduler_svc.planlog.replay import replay

_WORDS = {
    "step": "the step that ran when it came",
    "class": "requests of a higher class: {who}",
    "tenant": "requests of another tenant: {who}",
    "own": "earlier requests of its own tenant: {who}",
    "places": "no place: most were held by {who}",
    "blocks": "no KV memory: most was held by {who}",
    "prompt": "a long prompt: {who}",
    "worker": "another worker that was to be better",
    "adapter": "no worker with the adapter {who}",
    "size": "no worker that holds so many tokens",
    "draining": "workers that drain: {who}",
    "no_worker": "no worker",
    "sibling": "the prompt that its choices share",
    "suspect": "a worker that died under it or beside it",
    "late": "a deadline that could not be met",
    "cold": "its prompt, which no cache had",
    "cached": "its prompt, although a cache had most of it",
    "reader": "its client, which read slowly",
    "preempted": "preemption: it was taken off to make room",
    "moved": "a move to another worker: {who}",
    "decode": "its output, token by token",
}


def account_of(path: Path, request_id: str) -> tuple[TimeAccount, RequestStory]:
    """Return where the time of a request went, and its story.

    Raises:
        PlanLogError: it is in no file, or one is no plan log.
        OSError: one cannot be read.
    """
    core_id, files = find_request(path, request_id)
    account, story = TimeAccount(core_id), RequestStory(core_id)
    for file in files:
        replay(file, account, story)
        if account.outcome:
            break
    return account, story


def headline(part: TimePart) -> str:
    """Return in words what a part of its time went into."""
    hold = part.hold
    return _WORDS.get(hold.cause or hold.kind, hold.cause or hold.kind).format(who=hold.who)


def shown(account: TimeAccount) -> str:
    """Return the account as people read it."""
    parts = account.parts
    total_s = account.total_s
    rows = [
        (part.hold.kind, f"{part.seconds:.3f} s", _share(part.seconds, total_s), headline(part), part.text)
        for part in parts
    ]
    rows.append(("in all", f"{total_s:.3f} s", "", account.outcome or "not over at the end of the log", ""))
    text = output.table(("PART", "TIME", "SHARE", "BECAUSE OF", "AS IT WAS LAST"), rows, right=(1, 2))
    if account.level:
        text += f"\n\nIt came at degradation level {account.level}."
    if parts:
        text = f"mostly    {headline(parts[0])}\n\n{text}"
    return text


def as_record(account: TimeAccount, story: RequestStory) -> dict[str, Any]:
    """Return the account for programs."""
    return {
        "request_id": account.request_id,
        "outcome": account.outcome,
        "level": account.level,
        "total_s": account.total_s,
        "parts": [
            {
                "kind": part.hold.kind,
                "cause": part.hold.cause,
                "who": part.hold.who,
                "seconds": part.seconds,
                "text": part.text,
            }
            for part in account.parts
        ],
        "story": story.lines,
    }


def _share(seconds: float, total_s: float) -> str:
    return f"{seconds / total_s:.0%}" if total_s else ""
