"""Holds a core to its promises, from the outside: every effect is checked as it comes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from octavo.protocol.steps import Admit, FinishReason, Plan

from octavo_lab.sim.audit import InvariantError, check_core, check_nothing_sleeps, check_order, require
from octavo_lab.sim.host import WorkerHost
from octavo_lab.sim.tokens import stream_of, token_at
from scheduler_svc.core.core import SchedulerCore
from scheduler_svc.core.effects import (
    DetachWorker,
    Effect,
    EmitTokens,
    FinishChoice,
    LogEvent,
    Reject,
    RequestAccepted,
    SendPlan,
    TokenDelta,
)
from scheduler_svc.core.events import NewRequest
from scheduler_svc.core.request import Sequence
from scheduler_svc.core.worker import WorkerState


@dataclass(slots=True)
class _Choice:
    """What a client has got of one choice."""

    stream: int
    length: int
    """Prompt and output tokens so far."""
    most: int
    """Length that it may reach."""


@dataclass(slots=True)
class _Live:
    spec: NewRequest
    accepted: bool = False
    choices: dict[int, _Choice] = field(default_factory=dict)


@dataclass(slots=True)
class _Session:
    """What has been sent to a worker since it came up."""

    last_step: int = 0
    last_handle: int = 0


class Monitor:
    """Raises `InvariantError` at the first effect that no core may have.

    Each request ends exactly once, and so does each of its choices; tokens come in order, each once
    (a token is a function of its position); plans are numbered without a gap and handles ascend; nobody
    is admitted while another worker still has it; under fcfs nobody is passed over in silence; the
    accounts close, and every so often all books of the core are verified from scratch. Every request of
    a run needs a seed of its own.
    """

    def __init__(self, core: SchedulerCore, audit_every: int = 64) -> None:
        self._core = core
        self.hosts: Mapping[str, WorkerHost] = {}
        """Set: what the workers hold is checked as well."""
        self._passed: dict[str, set[Sequence]] = {}
        """In this event: whom each worker's plans passed over, with a reason."""
        core.explain_to(self._note_passed)
        self._audit_every = audit_every
        """Events between two looks into the core, which cost more than all the rest."""
        self._events = 0
        self._live: dict[str, _Live] = {}
        self._ended: set[str] = set()
        self._sessions: dict[str, _Session] = {}
        self._planned: set[tuple[int, int]] = set()
        """(seed, choice) of what some plan has admitted."""
        self._submitting: str | None = None
        self.num_tokens = 0
        self.num_ended = 0

    def submitted(self, spec: NewRequest, now: float) -> None:
        """A request is about to be submitted."""
        if spec.request_id in self._live:
            # Its refusal must not be taken for the end of its namesake.
            self._submitting = spec.request_id
            return
        self._ended.discard(spec.request_id)
        self._live[spec.request_id] = live = _Live(spec)
        prompt = len(spec.prompt_token_ids)
        for choice in range(spec.sampling.n or 1):
            live.choices[choice] = _Choice(
                stream_of(spec.sampling.seed or 0, choice),
                prompt + len(spec.resumed.get(choice, ())),
                prompt + (spec.sampling.max_tokens or 0),
            )

    def effects(self, effects: list[Effect], now: float) -> None:
        """Check what an event has led to."""
        dead = {effect.worker_id for effect in effects if isinstance(effect, DetachWorker)}
        for effect in effects:
            if isinstance(effect, EmitTokens):
                for delta in effect.deltas:
                    self._tokens(delta)
            elif isinstance(effect, SendPlan):
                self._plan(effect.worker_id, effect.plan, now)
                self._settled(effect.worker_id, effect.plan, dead)
            elif isinstance(effect, FinishChoice):
                self._finish(effect)
            elif isinstance(effect, Reject):
                self._reject(effect)
            elif isinstance(effect, RequestAccepted):
                self._accepted(effect)
            elif isinstance(effect, DetachWorker):
                self._sessions.pop(effect.worker_id, None)
            elif isinstance(effect, LogEvent) and effect.name in {"worker_up", "worker_lost"}:
                self._sessions.pop(str(effect.fields["worker_id"]), None)
        self._submitting = None
        self._passed.clear()
        self._accounts()
        self._events += 1
        if self._events % self._audit_every == 0:
            check_core(self._core)
            check_nothing_sleeps(self._core, now)

    # Requests ------------------------------------------------------------------------------------

    def _of(self, request_id: str, what: str) -> _Live:
        live = self._live.get(request_id)
        if live is None:
            known = "has ended" if request_id in self._ended else "was never submitted"
            raise InvariantError(f"{what} for {request_id}, which {known}")
        return live

    def _accepted(self, effect: RequestAccepted) -> None:
        live = self._of(effect.request_id, "RequestAccepted")
        if live.accepted:
            raise InvariantError(f"{effect.request_id} was accepted twice")
        live.accepted = True

    def _tokens(self, delta: TokenDelta) -> None:
        live = self._of(delta.request_id, "tokens")
        choice = live.choices.get(delta.choice)
        if choice is None or not live.accepted:
            raise InvariantError(f"tokens for {delta.request_id}/{delta.choice}, which is not open")
        for token in delta.token_ids:
            expected = token_at(choice.stream, choice.length)
            if token != expected:
                raise InvariantError(
                    f"{delta.request_id}/{delta.choice}: token {token} at position {choice.length}, "
                    f"must be {expected}"
                )
            choice.length += 1
            self.num_tokens += 1
        if choice.length > choice.most:
            raise InvariantError(f"{delta.request_id}/{delta.choice}: more than max_tokens")

    def _finish(self, effect: FinishChoice) -> None:
        live = self._of(effect.request_id, "FinishChoice")
        name = f"{effect.request_id}/{effect.choice}"
        choice = live.choices.pop(effect.choice, None)
        if choice is None:
            raise InvariantError(f"{name} ended twice")
        got = choice.length - len(live.spec.prompt_token_ids)
        if effect.completion_tokens != got:
            raise InvariantError(f"{name}: {effect.completion_tokens} tokens billed, {got} sent")
        if effect.reason is FinishReason.LENGTH and choice.length != choice.most:
            raise InvariantError(f"{name}: cut at {choice.length} of {choice.most} tokens")
        if effect.last != (not live.choices):
            raise InvariantError(f"{name}: last={effect.last} with {len(live.choices)} choices left")
        if effect.last:
            self._close(effect.request_id)

    def _reject(self, effect: Reject) -> None:
        if self._submitting == effect.request_id:
            return
        live = self._of(effect.request_id, "Reject")
        if len(live.choices) != (live.spec.sampling.n or 1):
            raise InvariantError(f"{effect.request_id} was rejected after a choice had ended")
        self._close(effect.request_id)

    def _close(self, request_id: str) -> None:
        del self._live[request_id]
        self._ended.add(request_id)
        self.num_ended += 1

    # Workers -------------------------------------------------------------------------------------

    def _note_passed(
        self, sequence: Sequence, worker: WorkerState, reason: str, figures: dict[str, object]
    ) -> None:
        self._passed.setdefault(worker.worker_id, set()).add(sequence)

    def _plan(self, worker_id: str, plan: Plan, now: float) -> None:
        session = self._sessions.setdefault(worker_id, _Session())
        if plan.step != session.last_step + 1:
            raise InvariantError(f"{worker_id}: plan {plan.step} after {session.last_step}")
        session.last_step = plan.step
        fresh = []
        for admit in plan.admit:
            self._admit(worker_id, session, admit)
            # Siblings, and whoever was planned before, stand in front of their class.
            name = (admit.sampling.seed or 0, admit.choice)
            if not admit.choice and name not in self._planned:
                fresh.append(admit.handle)
            self._planned.add(name)
        if fresh and self._core.config.policy == "fcfs" and self._core.config.static is None:
            check_order(self._core, worker_id, fresh, self._passed.get(worker_id, set()), now)

    def _settled(self, worker_id: str, plan: Plan, dead: set[str]) -> None:
        """No other worker may still have what a plan admits; one whose stream is dead does not count."""
        for admit in plan.admit:
            for host in self.hosts.values():
                if host.session and host.worker_id != worker_id and host.worker_id not in dead:
                    seed = admit.sampling.seed or 0
                    require(
                        not host.machine.has(seed, admit.choice),
                        "nobody is on two workers",
                        (worker_id, host.worker_id, admit.handle),
                    )

    def _admit(self, worker_id: str, session: _Session, admit: Admit) -> None:
        if admit.handle <= session.last_handle:
            raise InvariantError(f"{worker_id}: handle {admit.handle} after {session.last_handle}")
        session.last_handle = admit.handle

    # Books ---------------------------------------------------------------------------------------

    def _accounts(self) -> None:
        lifecycle = self._core._lifecycle  # noqa: SLF001 # a monitor looks inside
        ended = sum(lifecycle.outcomes.values())
        if lifecycle.arrivals != ended + len(lifecycle.requests):
            raise InvariantError(
                f"{lifecycle.arrivals} arrivals, {ended} outcomes, {len(lifecycle.requests)} live"
            )
        if len(lifecycle.requests) != len(self._live):
            raise InvariantError(f"{len(lifecycle.requests)} live requests, {len(self._live)} not ended")
