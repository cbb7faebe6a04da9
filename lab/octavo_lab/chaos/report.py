"""What a run found: pauses by kind of action, what became of requests, and all that is wrong."""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np

from octavo_lab.chaos.attack import Done
from octavo_lab.chaos.questions import Reply
from octavo_lab.report import MISSING, seconds, table

_LEAST_PAUSE_S: Final = 0.1
_LAG_S: Final = 0.5
"""It takes a fault so long, at most, to strike once it was set."""
_TIMES_CALM: Final = 3.0
"""A stream was touched when its gap is longer than this many times the longest of the calm stack."""


@dataclass(slots=True)
class Findings:
    """A run in figures; `findings` are what should not be, a line for each."""

    settings: dict[str, Any]
    done: Sequence[Done]
    answers: Sequence[Reply]
    began: float
    calm_gap_s: float
    """The longest between two tokens of a stream while nothing was done to the stack."""
    findings: list[str] = field(default_factory=list)
    wrong: int = 0
    leaked: int = 0
    resources: dict[str, Any] = field(default_factory=dict)
    """Bytes and descriptors of each process, before and after."""

    @property
    def failed(self) -> int:
        """Requests that ended with an error, or not at all."""
        return sum(bool(one.error) for one in self.answers)

    @property
    def worst_pause_s(self) -> float:
        """The longest that a stream stood still, whatever the reason."""
        return longest_gap_s(self.answers)

    def pauses(self) -> dict[str, list[float]]:
        """Return, by kind, the seconds from an action to the next token of each stream that it touched.

        A gap in which several things were done is told of the first of them.
        """
        found: dict[str, list[float]] = {one.action.kind: [] for one in self.done if one.target}
        actions = sorted((one for one in self.done if one.target), key=lambda one: one.at)
        times = [one.at for one in actions]
        touched_s = max(_LEAST_PAUSE_S, _TIMES_CALM * self.calm_gap_s)
        for answer in self.answers:
            for last, following in itertools.pairwise(answer.arrivals):
                index = bisect.bisect_left(times, last - _LAG_S)
                if following - last > touched_s and index < len(times) and times[index] < following:
                    found[actions[index].action.kind].append(following - times[index])
        return found

    def as_record(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        pauses = {kind: sorted(round(one, 3) for one in found) for kind, found in self.pauses().items()}
        return {
            "settings": self.settings,
            "requests": self._counts(),
            "failed": self.failed,
            "wrong": self.wrong,
            "leaked": self.leaked,
            "worst_pause_s": self.worst_pause_s,
            "calm_gap_s": self.calm_gap_s,
            "pauses_s": pauses,
            "actions": [
                {**asdict(one.action), "done_at_s": round(one.at - self.began, 2), "target": one.target}
                for one in self.done
            ],
            "resources": self.resources,
            "findings": self.findings,
        }

    def _counts(self) -> dict[str, dict[str, int]]:
        clients = sorted({one.client for one in self.answers})
        counts = {client: Counter[str]() for client in clients}
        for one in self.answers:
            counts[one.client].update(
                requests=1,
                failed=bool(one.error),
                refused=one.refused,
                broken=one.broken,
                tokens=len(one.arrivals),
            )
        return {client: dict(found) for client, found in counts.items()}

    def as_text(self) -> str:
        """Return tables of requests and actions, the processes, and what is wrong."""
        counts = self._counts()
        columns = ("requests", "failed", "refused", "broken", "tokens")
        requests = [(client, *(found[column] for column in columns)) for client, found in counts.items()]
        times = Counter(one.action.kind for one in self.done if one.target)
        actions = []
        for kind, found in sorted(self.pauses().items()):
            told = [MISSING] * 3
            if found:
                p99 = float(np.quantile(found, 0.99))
                told = [seconds(value) for value in (statistics.median(found), p99, max(found))]
            actions.append((kind, times[kind], len(found), *told))
        resources = [
            (name, *(f"{one['mib']:.0f}" for one in pair), *(one["descriptors"] for one in pair))
            for name, pair in self.resources.items()
        ]
        total = sum(found["requests"] for found in counts.values())
        verdict = (
            f"{total} requests: {self.failed} failed, {self.wrong} wrong, {self.leaked} leaked; "
            f"worst pause {seconds(self.worst_pause_s)} (calm: {seconds(self.calm_gap_s)})"
        )
        found_lines = "\n".join(
            (f"Found (logs are in {self.settings.get('logs')}):", *(f"- {one}" for one in self.findings))
        )
        parts = (
            table(("client", *columns), requests),
            table(("action", "times", "pauses", "median", "P99", "worst"), actions),
            table(("process", "MiB before", "after", "descriptors before", "after"), resources),
            verdict,
            found_lines if self.findings else "Nothing found.",
        )
        return "\n\n".join(parts)


def longest_gap_s(answers: Sequence[Reply]) -> float:
    """Return the longest that one of these streams stood still."""
    return max((b - a for one in answers for a, b in itertools.pairwise(one.arrivals)), default=0.0)
