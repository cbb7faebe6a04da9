"""Where the time of a request went: an observer of a replay that leaves no moment out.

Time goes by from one entry of the log to the next, and all of it goes to what held the request up then. In
whole nanoseconds, so that the parts add up to what it took.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from octavo.protocol.steps import Priority
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
from scheduler_svc.core.request import Sequence, SequenceStatus
from scheduler_svc.core.worker import WorkerState

_NS_PER_S: Final = 1_000_000_000
_BLOCKED_BY_ROOM: Final = {"max_num_seqs": "places", "blocks": "blocks"}
_BLOCKED_BY_PROMPTS: Final = frozenset({"token_budget", "max_partial_prefills", "plan_bytes"})


@dataclass(frozen=True, slots=True)
class Hold:
    """What holds a request up, or has it computed."""

    kind: str
    """waiting, prefill, decode, preempted, moved, delivery."""
    cause: str
    """For programs: step, class, tenant, own, places, blocks, prompt, worker, adapter, size, late, suspect,
    sibling, draining, no_worker; cold and cached of a prefill; otherwise empty."""
    who: str = ""
    """The class, tenant, worker or request that was in front, or why it was moved."""


@dataclass(frozen=True, slots=True)
class TimePart:
    """Time that went into one thing."""

    hold: Hold
    seconds: float
    text: str
    """For people, as it was last."""


@dataclass(slots=True)
class _Choice:
    """One choice on its way."""

    spent_ns: Counter[Hold]
    texts: dict[Hold, str]
    now: Hold
    text: str
    counts: tuple[int, int] = (0, 0)
    """Preemptions and recoveries so far."""
    set_back: Hold | None = None
    """Preempted or moved, and not yet back where it was."""
    beside_ns: Counter[str] | None = None
    """While it decodes: by tenant, the time that others decoded beside it, added up."""


class TimeAccount:
    """Follows one request through a replay; `parts` is where its time went."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.outcome = ""
        """How it ended; empty when it has not, or is not in the log."""
        self.level = 0
        """Degradation level when it was taken in."""
        self.arrived: float | None = None
        self._choices: dict[int, _Choice] = {}
        self._last = 0.0
        self._longest: _Choice | None = None
        """The choice that ended last: its time is that of the request."""
        self._total_ns = 0
        self._ended = 0.0
        self._own: tuple[WorkerState, Sequence, str] | None = None
        self._passed = False
        self._causes: list[str] = []

    @property
    def total_s(self) -> float:
        """From its arrival at the core to its end."""
        return self._total_ns / _NS_PER_S

    @property
    def parts(self) -> list[TimePart]:
        """What its time went into, the most first."""
        choice = self._longest
        if choice is None:
            return []
        found = [
            TimePart(hold, ns / _NS_PER_S, choice.texts[hold]) for hold, ns in choice.spent_ns.items() if ns
        ]
        return sorted(found, key=lambda part: -part.seconds)

    # Of an observer ------------------------------------------------------------------------------

    def passed_over(self) -> Explain:
        """Return what the core calls for each waiting sequence that a plan passes over."""

        def explain(sequence: Sequence, worker: WorkerState, reason: str, _: dict[str, object]) -> None:
            self._passed = True
            if sequence.request.request_id == self.request_id:
                self._own = worker, sequence, reason

        return explain

    def before(self, core: SchedulerCore, entry: PlanLogEntry) -> None:
        """Let the time until this entry go by."""
        self._own, self._passed = None, False
        if entry.WhichOneof("event") == "submit" and entry.submit.request_id == self.request_id:
            self._choices.clear()
            self.arrived, self._last = entry.now, entry.now
            self.outcome = ""
        elapsed_ns = _ns(entry.now) - _ns(self._last)
        self._last = entry.now
        if entry.WhichOneof("event") == "delivered" and entry.delivered.request_id == self.request_id:
            self._delivered(_ns(entry.now) - _ns(self._ended))
        request = core.find(self.request_id)
        for index, choice in self._choices.items():
            choice.spent_ns[choice.now] += elapsed_ns
            choice.texts[choice.now] = choice.text
            if choice.beside_ns is not None and request is not None:
                _count_beside(choice, core, request.sequences[index], elapsed_ns)

    def after(self, core: SchedulerCore, entry: PlanLogEntry, effects: list[Effect]) -> None:
        """Find what holds it up from now on."""
        self._causes = [_said(effect) for effect in effects if isinstance(effect, LogEvent)]
        planned = any(isinstance(effect, SendPlan) for effect in effects)
        for effect in effects:
            self._effect(effect)
        request = core.find(self.request_id)
        if request is None:
            return
        for sequence in request.sequences:
            if sequence.status is SequenceStatus.FINISHED:
                continue
            choice = self._choices.get(sequence.choice)
            if choice is None:
                first = Hold("waiting", "step")
                choice = _Choice(Counter(), {}, first, "for the next step to be planned")
                self._choices[sequence.choice] = choice
            self._look(core, sequence, choice, entry.now, planned=planned)

    # Inside --------------------------------------------------------------------------------------

    def _effect(self, effect: Effect) -> None:
        if isinstance(effect, RequestAccepted) and effect.request_id == self.request_id:
            self.level = effect.level
        elif isinstance(effect, Reject) and effect.request_id == self.request_id:
            self._end(self._choices.get(0), f"{effect.error.reason}: {effect.error.message}")
        elif isinstance(effect, FinishChoice) and effect.request_id == self.request_id:
            error = f": {effect.error.message}" if effect.error is not None else ""
            choice = self._choices.pop(effect.choice, None)
            if choice is not None:
                _name_prefill(choice, effect.cached_tokens)
            self._end(choice, effect.reason.name + error)

    def _end(self, choice: _Choice | None, outcome: str) -> None:
        self.outcome = outcome
        if choice is None:
            return
        self._longest, self._total_ns, self._ended = choice, choice.spent_ns.total(), self._last
        if choice.beside_ns is not None:
            hold = Hold("decode", "")
            choice.texts[hold] = _beside(choice, choice.spent_ns[hold])

    def _delivered(self, late_ns: int) -> None:
        """Its client has taken the end so long after there was one."""
        choice = self._longest
        if choice is not None:
            hold = Hold("delivery", "reader")
            choice.spent_ns[hold] += late_ns
            choice.texts[hold] = "until its client had read it"
            self._total_ns += late_ns

    def _look(
        self, core: SchedulerCore, sequence: Sequence, choice: _Choice, now: float, *, planned: bool
    ) -> None:
        history, worker = sequence.history, core.workers.get(sequence.binding.worker_id or "")
        counts = history.preemptions, history.recoveries
        if counts != choice.counts:
            kind = "preempted" if counts[0] != choice.counts[0] else "moved"
            why = next((cause for cause in self._causes if cause), "its worker drains")
            choice.set_back = Hold(kind, "", why if kind == "moved" else "")
            choice.counts = counts
        if worker is not None and sequence.binding.handle in worker.decoding:
            choice.set_back = None
            if choice.beside_ns is None:
                choice.beside_ns = Counter()
            choice.now, choice.text = Hold("decode", ""), ""
        elif choice.set_back is not None:
            choice.now, choice.text = choice.set_back, _SET_BACK[choice.set_back.kind]
        elif sequence.status is SequenceStatus.RUNNING:
            choice.now = Hold("prefill", "", sequence.binding.worker_id or "")
            choice.text = str(sequence.num_tokens)
        elif sequence.status is SequenceStatus.HELD:
            choice.now, choice.text = Hold("waiting", "sibling"), "for the prompt that choice 0 computes"
        elif planned or self._own or not core.workers:
            choice.now, choice.text = self._waiting(core, sequence, now)

    def _waiting(self, core: SchedulerCore, sequence: Sequence, now: float) -> tuple[Hold, str]:
        """Return what stands in the way of a sequence that waits."""
        if self._own is not None and self._own[1] is sequence:
            worker, _, reason = self._own
            return _passed_over(core, worker, sequence, reason)
        model = sequence.request.spec.model
        workers = [worker for worker in core.workers.values() if worker.info.model == model]
        if not workers:
            return Hold("waiting", "no_worker"), "no worker is attached"
        if all(worker.draining for worker in workers):
            names = ", ".join(sorted(worker.worker_id for worker in workers))
            return Hold("waiting", "draining", names), f"every worker drains: {names}"
        return _behind(core, sequence, now)


def _ns(seconds: float) -> int:
    return round(seconds * _NS_PER_S)


_SET_BACK: Final = {
    "preempted": "off its worker to make room, and computed again",
    "moved": "off its worker, and computed again on another",
}


def _said(event: LogEvent) -> str:
    """Return what a log event says of a move."""
    if event.name == "worker_lost":
        return f"{event.fields['worker_id']} was lost: {event.fields['reason']}"
    return ""


def _name_prefill(choice: _Choice, cached: int) -> None:
    """Say of the prefill whether a cache had the prompt: that is known after its first step."""
    for hold in [hold for hold in choice.spent_ns if hold.kind == "prefill"]:
        tokens = int(choice.texts.pop(hold))
        named = Hold("prefill", "cached" if 2 * cached >= tokens else "cold", hold.who)
        choice.spent_ns[named] = choice.spent_ns.pop(hold)
        found = f"{cached} of them cached" if cached else "none of them cached"
        choice.texts[named] = f"{tokens} tokens on {hold.who}, {found}"


def _passed_over(
    core: SchedulerCore, worker: WorkerState, sequence: Sequence, reason: str
) -> tuple[Hold, str]:
    """Return who or what made a plan pass a sequence over for a reason of the core."""
    name = worker.worker_id
    if reason in _BLOCKED_BY_ROOM:
        what = _BLOCKED_BY_ROOM[reason]
        holders = _owners(worker.sequences.values())
        owner, count = _most(holders)
        size = f"{worker.num_seqs} sequences" if reason == "blocks" else f"{worker.max_num_seqs} places"
        return Hold("waiting", what, owner), f"no {what} on {name}: {count} of its {size} are of {owner}"
    if reason in _BLOCKED_BY_PROMPTS:
        left = {other: max(0, other.left_to_plan) for other in worker.prefilling.values()}
        if left:
            other = max(left, key=lambda one: (left[one], one.num_tokens))
            who = f"the prompt of {other.num_tokens} tokens of {other.request_id}"
            return Hold("waiting", "prompt", other.request_id), f"on {name} behind {who}"
        owner, count = _most(_owners(worker.decoding.values()))
        return Hold("waiting", "places", owner), f"{name} has no tokens left: {count} decodes of {owner}"
    if reason == "no_adapter":
        adapter = sequence.request.spec.adapter or ""
        return Hold("waiting", "adapter", adapter), f"no worker that is here has the adapter {adapter}"
    causes = {
        "better_worker": ("worker", "for another worker, on which it begins sooner"),
        "too_big_for_worker": ("size", f"can reach more tokens than {name} holds"),
        "too_late": ("late", "its deadline cannot be met any more"),
        "isolated": (
            "suspect",
            "kept apart: a worker has died under it, or under one that it would run beside",
        ),
    }
    cause, text = causes.get(reason, (reason, reason))
    return Hold("waiting", cause, name if cause == "size" else ""), text


def _behind(core: SchedulerCore, sequence: Sequence, now: float) -> tuple[Hold, str]:
    """Return who stands before a sequence in the queue: the most of them."""
    ahead = Counter((other.request.tenant, other.request.priority) for other in core.ahead_of(sequence, now))
    if not ahead:
        return Hold("waiting", "step"), "for the step that runs"
    (tenant, priority), count = ahead.most_common(1)[0]
    request = sequence.request
    cause = "tenant" if tenant != request.tenant else "own"
    if priority < request.priority:
        cause = "class"
    who = _owner(tenant, priority)
    return Hold("waiting", cause, who), f"{ahead.total()} ahead in the queue, {count} of them of {who}"


def _owner(tenant: str, priority: Priority) -> str:
    return f"{tenant or 'nobody'} ({priority.name.lower()})"


def _owners(sequences: Iterable[Sequence]) -> Counter[str]:
    return Counter(_owner(one.request.tenant, one.request.priority) for one in sequences)


def _most(counts: Counter[str]) -> tuple[str, int]:
    return counts.most_common(1)[0] if counts else ("nobody", 0)


def _count_beside(choice: _Choice, core: SchedulerCore, sequence: Sequence, elapsed_ns: int) -> None:
    worker = core.workers.get(sequence.binding.worker_id or "")
    if worker is None or choice.beside_ns is None or choice.now.kind != "decode":
        return
    for tenant, load in worker.loads.items():
        choice.beside_ns[tenant] += load.decodes * elapsed_ns


def _beside(choice: _Choice, decode_ns: int) -> str:
    """Return beside how many of whom it decoded, on average; itself is one of them."""
    if not decode_ns or not choice.beside_ns:
        return "alone"
    shares = {tenant: ns / decode_ns for tenant, ns in choice.beside_ns.items()}
    whom: Iterable[str] = (
        f"{count:.1f} of {tenant or 'nobody'}" for tenant, count in Counter(shares).most_common(4)
    )
    return f"in a batch of {sum(shares.values()):.1f} on average: {', '.join(whom)}"
