"""The requests of a plan log, for the simulator: what came, when, and how much it generated then."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

from octavo.v1.planlog_pb2 import PlanLogEntry

from scheduler_svc.core import Effect, FinishChoice, NewRequest, SchedulerCore
from scheduler_svc.planlog.convert import request_from_proto
from scheduler_svc.planlog.replay import replay


class _Requests:
    """Collects requests and the lengths of what they generated while a log is replayed."""

    def __init__(self) -> None:
        self.submitted: list[tuple[float, NewRequest]] = []
        self.output_tokens: Counter[str] = Counter()

    def passed_over(self) -> None:
        """Nothing is asked of the core."""

    def before(self, core: SchedulerCore, entry: PlanLogEntry) -> None:
        """Note a request."""
        if entry.WhichOneof("event") == "submit":
            self.submitted.append((entry.now, request_from_proto(entry.submit)))

    def after(self, core: SchedulerCore, entry: PlanLogEntry, effects: list[Effect]) -> None:
        """Note how much a choice has generated."""
        for effect in effects:
            if isinstance(effect, FinishChoice) and effect.reason.is_complete:
                longest = max(self.output_tokens[effect.request_id], effect.completion_tokens)
                self.output_tokens[effect.request_id] = longest


def replayed_requests(path: Path) -> list[tuple[float, NewRequest]]:
    """Return the requests of a log that were answered in full, with their times from the first one on.

    Each is to generate as much as its longest choice did then. Deadlines are left out: they are
    moments of the past.

    Raises:
        PlanLogError: it is no plan log, or another version's.
        OSError: it cannot be read.
    """
    requests = _Requests()
    replay(path, requests)
    answered = [(at, spec) for at, spec in requests.submitted if requests.output_tokens[spec.request_id]]
    return [
        (
            at - answered[0][0],
            replace(
                spec,
                sampling=replace(
                    spec.sampling,
                    max_tokens=requests.output_tokens[spec.request_id],
                    min_tokens=None,
                    ignore_eos=True,
                    stop_token_ids=(),
                ),
                queue_deadline=None,
                ttft_deadline=None,
                deadline=None,
                resumed={},
            ),
        )
        for at, spec in answered
    ]
