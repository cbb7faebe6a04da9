"""Holds a core to its promises, from the outside: every effect is checked as it comes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from octavo.protocol.steps import FinishReason, Plan

from octavo_lab.sim.audit import InvariantError, check_core, check_nothing_sleeps, check_order, require
from octavo_lab.sim.host import WorkerHost
from octavo_lab.sim.tokens import stream_of, token_at
from scheduler_svc.core import (
    DetachWorker,
    Effect,
    EmitTokens,
    FinishChoice,
    LogEvent,
    NewRequest,
    Reject,
    RequestAccepted,
    SchedulerCore,
    SendPlan,
    TokenDelta,
)
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
        self._sent: dict[str, tuple[int, int]] = {}
        """The last step and handle that a worker has been sent since it came up."""
        self._planned: set[tuple[int, int]] = set()
        """(seed, choice) of what some plan has admitted."""
        self._submitting: str | None = None
        self.num_tokens = 0

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
                self._plan(effect.worker_id, effect.plan, dead, now)
            elif isinstance(effect, FinishChoice):
                self._finish(effect)
            elif isinstance(effect, Reject):
                self._reject(effect)
            elif isinstance(effect, RequestAccepted):
                self._accepted(effect)
            elif isinstance(effect, DetachWorker):
                self._sent.pop(effect.worker_id, None)
            elif isinstance(effect, LogEvent) and effect.name in {"worker_up", "worker_lost"}:
                self._sent.pop(str(effect.fields["worker_id"]), None)
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
        require(not live.accepted, "a request is accepted once", effect.request_id)
        live.accepted = True

    def _tokens(self, delta: TokenDelta) -> None:
        live = self._of(delta.request_id, "tokens")
        choice = live.choices.get(delta.choice)
        name = (delta.request_id, delta.choice)
        if choice is None or not live.accepted:
            raise InvariantError(f"tokens for {name}, which is not open")
        for token in delta.token_ids:
            expected = token_at(choice.stream, choice.length)
            if token != expected:
                raise InvariantError(f"{name}: {token} at position {choice.length}, must be {expected}")
            choice.length += 1
            self.num_tokens += 1
        require(choice.length <= choice.most, "nobody gets more than max_tokens", name)

    def _finish(self, effect: FinishChoice) -> None:
        live = self._of(effect.request_id, "FinishChoice")
        name = (effect.request_id, effect.choice)
        choice = live.choices.pop(effect.choice, None)
        if choice is None:
            raise InvariantError(f"{name} ended twice")
        sent, billed = choice.length - len(live.spec.prompt_token_ids), effect.completion_tokens
        require(billed == sent, "what is sent is billed", (name, billed, sent))
        full = effect.reason is not FinishReason.LENGTH or choice.length == choice.most
        require(full, "nobody is cut before max_tokens", (name, choice.length, choice.most))
        require(effect.last == (not live.choices), "the last choice says so", (name, len(live.choices)))
        if effect.last:
            self._close(effect.request_id)

    def _reject(self, effect: Reject) -> None:
        if self._submitting != effect.request_id:
            live = self._of(effect.request_id, "Reject")
            whole = len(live.choices) == (live.spec.sampling.n or 1)
            require(whole, "nobody is rejected after a choice has ended", effect.request_id)
            self._close(effect.request_id)

    def _close(self, request_id: str) -> None:
        del self._live[request_id]
        self._ended.add(request_id)

    # Workers -------------------------------------------------------------------------------------

    def _note_passed(
        self, sequence: Sequence, worker: WorkerState, reason: str, figures: dict[str, object]
    ) -> None:
        self._passed.setdefault(worker.worker_id, set()).add(sequence)

    def _plan(self, worker_id: str, plan: Plan, dead: set[str], now: float) -> None:
        """Check a plan; no other worker may still have what it admits, unless its stream is dead."""
        last_step, last_handle = self._sent.get(worker_id, (0, 0))
        if plan.step != last_step + 1:
            raise InvariantError(f"{worker_id}: plan {plan.step} after {last_step}")
        fresh = []
        for admit in plan.admit:
            seed, handle = admit.sampling.seed or 0, admit.handle
            require(handle > last_handle, "handles ascend", (worker_id, handle, last_handle))
            last_handle = handle
            # Siblings, and whoever was planned before, stand in front of their class.
            if not admit.choice and (seed, 0) not in self._planned:
                fresh.append(handle)
            self._planned.add((seed, admit.choice))
            for host in self.hosts.values():
                other = host.session and host.worker_id != worker_id and host.worker_id not in dead
                clear = not other or not host.machine.has(seed, admit.choice)
                require(clear, "nobody is on two workers", (worker_id, host.worker_id, handle))
        self._sent[worker_id] = plan.step, last_handle
        if fresh and self._core.config.policy == "fcfs" and self._core.config.static is None:
            check_order(self._core, worker_id, fresh, self._passed.get(worker_id, set()), now)

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
