"""Why a request waited: an observer of a replay that writes down its story."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from octavo.v1.planlog_pb2 import PlanLogEntry

from scheduler_svc.core import (
    Effect,
    FinishChoice,
    LogEvent,
    Reject,
    RequestAccepted,
    SchedulerCore,
    SendPlan,
)
from scheduler_svc.core.planning import Explain
from scheduler_svc.core.request import Request, Sequence, SequenceStatus
from scheduler_svc.core.worker import WorkerState

Figures = dict[str, object]

_TEXTS: dict[str, str] = {
    "max_num_seqs": "no place: {running} of {max_num_seqs} sequences run",
    "token_budget": "the step's token budget is used up",
    "plan_bytes": "the plan has {bytes} bytes of admissions, more than {max_bytes}",
    "blocks": "needs {needed} blocks with {watermark} kept free, {available} are available",
    "better_worker": "left for {worker}: its first token comes sooner there",
    "too_big_for_worker": "can reach more tokens than the {max_model_len} that the worker holds",
    "no_adapter": "the worker has no adapter {adapter}",
    "too_late": "its first token would take {predicted_s:.3f} s, its deadline leaves {left_s:.3f} s",
    "isolated": "on trial for {deaths} worker deaths, or beside who is: kept apart",
    "max_partial_prefills": "{todo} tokens to prefill, too many prefills are spread over steps already",
    "behind": "{ahead} of {waiting} wait ahead; the plan stopped at {stopped_at}: {because}",
    "not_reached": "{ahead} of {waiting} wait ahead; the plan took none of it",
    "no_worker": "{ahead} of {waiting} wait ahead; no worker is attached",
}


@dataclass(slots=True)
class Line:
    """One line of the story: an event, or plans in a row that passed the request over for one reason."""

    at_s: float
    """Seconds since the request arrived."""
    until_s: float
    plans: int
    worker_id: str
    step: int | None
    choice: int | None
    what: str
    """accepted, waits, admitted, first token, preempted, recovered, finished, refused."""
    why: str
    """For people."""
    reason: str = ""
    """For programs: the core's word for what it waited for."""


class Waits:
    """How long each request waited until it was first admitted, or until it ended."""

    def __init__(self) -> None:
        self._arrivals: dict[str, float] = {}
        self._waits: dict[str, float] = {}

    def longest(self, count: int = 5) -> list[tuple[str, float]]:
        """Return those that waited longest: request ids and seconds."""
        return heapq.nlargest(count, self._waits.items(), key=lambda item: item[1])

    def passed_over(self) -> None:
        """Nothing is asked of the core."""

    def before(self, core: SchedulerCore, entry: PlanLogEntry) -> None:
        """Note an arrival."""
        if entry.WhichOneof("event") == "submit":
            self._arrivals[entry.submit.request_id] = entry.now

    def after(self, core: SchedulerCore, entry: PlanLogEntry, effects: list[Effect]) -> None:
        """Note who has ended, and how long that one had waited."""
        for effect in effects:
            if isinstance(effect, FinishChoice):
                self._waits[effect.request_id] = effect.timings.queue_s
            elif isinstance(effect, Reject) and effect.request_id in self._arrivals:
                self._waits[effect.request_id] = entry.now - self._arrivals[effect.request_id]


class RequestStory:
    """Follows one request through a replay; `lines` is what happened to it."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.lines: list[Line] = []
        self._arrival = 0.0
        self._request: Request | None = None
        self._statuses: dict[int, SequenceStatus] = {}
        self._has_token: set[int] = set()
        self._own: dict[str, tuple[int, str, Figures]] = {}
        """In this call, by worker: choice, reason and figures with which the request was passed over."""
        self._last: dict[str, tuple[str, str, Figures]] = {}
        """In this call, by worker: the last sequence that was passed over."""

    @property
    def waited_s(self) -> float | None:
        """Seconds until it was first admitted, if it was."""
        return next((line.at_s for line in self.lines if line.what == "admitted"), None)

    def passed_over(self) -> Explain:
        """Return what the core calls for each waiting sequence that a plan passes over."""

        def explain(sequence: Sequence, worker: WorkerState, reason: str, figures: Figures) -> None:
            request_id = sequence.request.request_id
            if request_id == self.request_id:
                self._own.setdefault(worker.worker_id, (sequence.choice, reason, figures))
            self._last[worker.worker_id] = (request_id, reason, figures)

        return explain

    def before(self, core: SchedulerCore, entry: PlanLogEntry) -> None:
        """Forget the last call."""
        self._own.clear()
        self._last.clear()
        if entry.WhichOneof("event") == "submit" and entry.submit.request_id == self.request_id:
            self._arrival = entry.now
            self._has_token.clear()

    def after(self, core: SchedulerCore, entry: PlanLogEntry, effects: list[Effect]) -> None:
        """Note what the call meant for the request."""
        now = entry.now - self._arrival
        request = core.find(self.request_id)
        if request is not None:
            self._arrival = request.arrival
            now = entry.now - request.arrival
        self._endings(now, effects)
        self._request = request
        if request is None:
            return
        self._moves(now, request)
        waiting = any(sequence.status is SequenceStatus.WAITING for sequence in request.sequences)
        plans = [effect for effect in effects if isinstance(effect, SendPlan)]
        if waiting and plans:
            self._waits(core, entry.now, now, plans)
        elif waiting and not core.snapshot(entry.now).workers:
            ahead, waiting_in_all = core.queue_position(self.request_id, entry.now) or (0, 0)
            self._wait(now, "", None, None, "no_worker", {"ahead": ahead, "waiting": waiting_in_all})

    def _endings(self, now: float, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, RequestAccepted) and effect.request_id == self.request_id:
                self._event(now, None, "accepted", f"{effect.queue_position} ahead in the queue")
            elif isinstance(effect, Reject) and effect.request_id == self.request_id:
                self._event(now, None, "refused", f"{effect.error.reason}: {effect.error.message}")
            elif isinstance(effect, FinishChoice) and effect.request_id == self.request_id:
                error = f": {effect.error.message}" if effect.error is not None else ""
                why = f"{effect.reason.name}{error}, {effect.completion_tokens} tokens"
                self._event(now, effect.choice, "finished", why)
            elif isinstance(effect, LogEvent) and effect.fields.get("request_id") == self.request_id:
                facts = {key: value for key, value in effect.fields.items() if key != "request_id"}
                self._event(now, None, effect.name, ", ".join(f"{k} {v}" for k, v in facts.items()))

    def _moves(self, now: float, request: Request) -> None:
        """Note admissions, first tokens, and returns to the queue."""
        for sequence in request.sequences:
            choice, status, worker_id = sequence.choice, sequence.status, sequence.binding.worker_id
            before = self._statuses.get(choice)
            if (
                status is SequenceStatus.RUNNING
                and before is not SequenceStatus.RUNNING
                and worker_id is not None
            ):
                keys = f"{sequence.num_tokens} tokens, handle {sequence.binding.handle}"
                self._event(now, choice, "admitted", keys, worker_id, sequence.binding.admitted_step)
            elif status is SequenceStatus.WAITING and before in {
                SequenceStatus.RUNNING,
                SequenceStatus.RELEASING,
            }:
                self._event(now, choice, "waits again", f"{sequence.num_output_tokens} tokens are kept")
            elif status is SequenceStatus.HELD and before is None:
                self._event(now, choice, "held", "until the prompt's blocks of choice 0 are published")
            if sequence.history.first_token_at is not None and choice not in self._has_token:
                self._has_token.add(choice)
                cached = (
                    f"{sequence.history.cached_tokens} of {sequence.prompt_len} prompt tokens were cached"
                )
                self._event(now, choice, "first token", cached, worker_id)
            self._statuses[choice] = status

    def _waits(self, core: SchedulerCore, absolute: float, now: float, plans: list[SendPlan]) -> None:
        position = core.queue_position(self.request_id, absolute)
        if position is None:
            return
        ahead, waiting = position
        for plan in plans:
            worker_id, step = plan.worker_id, plan.plan.step
            if worker_id in self._own:
                choice, reason, figures = self._own[worker_id]
                self._wait(now, worker_id, step, choice, reason, figures)
            elif worker_id in self._last:
                stopped_at, reason, figures = self._last[worker_id]
                because = _text(reason, figures)
                behind = {"ahead": ahead, "waiting": waiting, "stopped_at": stopped_at, "because": because}
                self._wait(now, worker_id, step, None, "behind", behind)
            else:
                self._wait(now, worker_id, step, None, "not_reached", {"ahead": ahead, "waiting": waiting})

    def _wait(
        self, now: float, worker_id: str, step: int | None, choice: int | None, reason: str, figures: Figures
    ) -> None:
        last = self.lines[-1] if self.lines else None
        if last is not None and (last.what, last.reason, last.choice) == ("waits", reason, choice):
            last.until_s, last.plans = now, last.plans + 1
            if last.worker_id != worker_id:
                last.worker_id = "several"
            last.why = _text(reason, figures)
            return
        why = _text(reason, figures)
        self.lines.append(Line(now, now, 1, worker_id, step, choice, "waits", why, reason))

    def _event(
        self,
        now: float,
        choice: int | None,
        what: str,
        why: str,
        worker_id: str | None = None,
        step: int | None = None,
    ) -> None:
        self.lines.append(Line(now, now, 0, worker_id or "", step, choice, what, why))


def _text(reason: str, figures: Figures) -> str:
    """Return a reason of the core for people; one that this page does not know, with its figures."""
    template = _TEXTS.get(reason)
    try:
        return template.format_map(figures) if template is not None else f"{reason}: {figures}"
    except KeyError:
        return f"{reason}: {figures}"
