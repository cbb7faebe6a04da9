"""The one task that owns the core: commands in, effects out.

Handlers and worker links leave commands; the driver hands them to the core one after the other and
does what it returns, in order. The inbox needs no bound of its own: each stream has one submission and
one cancellation per request in it at most, each worker its reports for a window of plans.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import structlog
from octavo.protocol.steps import Plan, Report

from scheduler_svc.core.core import SchedulerCore
from scheduler_svc.core.effects import (
    ChargeTenant,
    DetachWorker,
    Effect,
    EmitEmbedding,
    EmitPromptLogprobs,
    EmitTokens,
    FinishChoice,
    LogEvent,
    Reject,
    RequestAccepted,
    SendCancel,
    SendPlan,
)
from scheduler_svc.core.errors import CoreError, Reason
from scheduler_svc.core.events import AdmissionRequest, WorkerInfo
from scheduler_svc.core.overload import Caps, Level
from scheduler_svc.core.snapshot import CoreSnapshot
from scheduler_svc.errors import ServiceError
from scheduler_svc.observe.metrics import SchedulerMetrics
from scheduler_svc.requests.accounts import Accounts
from scheduler_svc.requests.state import RequestState

_log = structlog.get_logger()

_LOOP_TICK_S: Final = 0.001
_LATE_S: Final = 0.01
"""After the end of a request: a client that takes it later is slow."""
_WARNINGS: Final = frozenset(
    {"worker_lost", "step_error", "level_changed", "plan_log_stopped", "plan_log_resumed"}
)


class WorkerConnection(Protocol):
    """What the driver needs of the link to a worker. None of it waits."""

    def send_plan(self, plan: Plan) -> None:
        """Send a plan."""

    def send_cancel(self, handles: tuple[int, ...]) -> None:
        """Send a cancel."""

    def detach(self, reason: str) -> None:
        """Drop the stream; it is attached anew by itself."""


Command = Callable[[float], list[Effect]]
_TOLD: Final[dict[type[Effect], Callable[[RequestState, Any], None]]] = {
    RequestAccepted: RequestState.on_accepted,
    EmitPromptLogprobs: RequestState.on_prompt_logprobs,
    EmitEmbedding: RequestState.on_embedding,
    FinishChoice: RequestState.on_finish,
}
"""What a request is told."""


class CoreDriver:
    """Runs the core."""

    def __init__(self, core: SchedulerCore, accounts: Accounts, metrics: SchedulerMetrics) -> None:
        self._core = core
        self._accounts = accounts
        self._metrics = metrics
        self._clock = accounts.clock
        self.standby_endpoint: Callable[[], str] = lambda: ""
        """Where a request can go that comes too late; empty when that is not known."""
        self._inbox: deque[Command] = deque()
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._requests: dict[str, RequestState] = {}
        self._connections: dict[str, WorkerConnection] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False
        self.on_level: Callable[[], None] = lambda: None
        """Called when the degradation level of a model has changed."""

    # Commands ------------------------------------------------------------------------------------

    def submit(self, state: RequestState) -> None:
        """Hand a request to the core."""
        self._requests[state.core_id] = state
        self._idle.clear()

        def command(now: float) -> list[Effect]:
            state.on_submit()
            return self._core.submit(state.request, now)

        self._post(command)

    def cancel(self, state: RequestState) -> None:
        """The client does not want a request any more, or is gone. One that has ended stays ended."""
        if not state.ended:
            self._post(lambda now: self._core.cancel(state.core_id, now))

    def delivered(self, state: RequestState) -> None:
        """The client has taken the end of a request: when that was late, it is noted."""
        if state.ended_at is not None and self._clock() - state.ended_at > _LATE_S:
            self._post(lambda now: self._core.delivered(state.core_id, now))

    def clock(self) -> float:
        """Return the time, in monotonic seconds."""
        return self._clock()

    def live(self, model: str) -> list[RequestState]:
        """Return the live requests of a model."""
        return [state for state in self._requests.values() if state.request.model == model]

    def move(self, state: RequestState, error: ServiceError) -> None:
        """End a request here with an error after which its client takes it, as far as it is, elsewhere."""
        state.move(error)
        self.cancel(state)

    def move_all(self, error: ServiceError) -> None:
        """End all requests so."""
        for state in self._requests.values():
            self.move(state, error)

    def worker_up(self, info: WorkerInfo, connection: WorkerConnection) -> None:
        """A worker has welcomed us."""

        def command(now: float) -> list[Effect]:
            self._connections[info.worker_id] = connection
            return self._core.worker_up(info, now)

        self._post(command)

    def worker_down(self, worker_id: str, connection: WorkerConnection) -> None:
        """The stream to a worker has ended."""

        def command(now: float) -> list[Effect]:
            if self._connections.get(worker_id) is not connection:
                return []
            del self._connections[worker_id]
            return self._core.worker_down(worker_id, now)

        self._post(command)

    def worker_draining(self, worker_id: str) -> None:
        """A worker takes nothing new."""
        self._post(lambda now: self._core.worker_draining(worker_id, now))

    def report(self, worker_id: str, report: Report) -> None:
        """A worker has answered a plan."""

        def command(now: float) -> list[Effect]:
            effects = self._core.report(worker_id, report, now)
            self._metrics.plan.observe(self._clock() - now)
            return effects

        self._post(command)
        self._accounts.step(worker_id, report.timing)

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self.draining = True
        self._post(self._core.drain)

    def weigh_tenants(self, weights: Mapping[str, float]) -> None:
        """Give tenants these shares under the policy `fair`."""
        self._post(lambda now: self._core.weigh_tenants(weights, now))

    async def wait_idle(self) -> None:
        """Wait until no request is live."""
        await self._idle.wait()

    def refusal_for_load(self, model: str, ask: AdmissionRequest) -> CoreError | None:
        """Return why a request would be refused for load right now. Call it on the event loop only."""
        return self._core.refusal_for_load(model, ask, self._clock())

    @property
    def max_running(self) -> int:
        """Sequences that all workers together can run at once."""
        return self._core.num_seats

    def level_of(self, model: str) -> Level:
        """Return the degradation level of a model. Call it on the event loop only."""
        return self._core.level_of(model)

    def caps(self, model: str) -> Caps | None:
        """Return the limits in force for requests that may be trimmed. Call it on the event loop only."""
        return self._core.caps(model)

    def snapshot(self) -> CoreSnapshot:
        """Return the figures of the moment. Call it on the event loop only."""
        return self._core.snapshot(self._clock())

    # The task ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Drive the core until cancelled. An exception here is a bug, and ends the process."""
        inbox = self._inbox
        while True:
            await self._wake.wait()
            self._wake.clear()
            while inbox:
                command = inbox.popleft()
                self._perform(command(self._clock()))
            now = self._clock()
            due = self._core.next_wakeup()
            if due is not None and due <= now:
                self._perform(self._core.tick(now))
            self._arm()

    def _post(self, command: Command) -> None:
        self._inbox.append(command)
        self._wake.set()

    def _arm(self) -> None:
        """Wake up when the core wants to."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self._core.next_wakeup()
        if due is not None:
            # Rounded up, as uvloop counts in milliseconds: too early, the core would have nothing to do.
            delay_s = math.ceil((due - self._clock()) / _LOOP_TICK_S) * _LOOP_TICK_S
            self._timer = asyncio.get_running_loop().call_later(max(0.0, delay_s), self._wake.set)

    # Effects -------------------------------------------------------------------------------------

    def _perform(self, effects: list[Effect]) -> None:
        """Do what the core wants done, and tell it of the choices that stop strings have ended."""
        if not effects:
            return
        started = self._clock()
        stopped: list[tuple[str, int]] = []
        for effect in effects:
            match effect:
                case EmitTokens():
                    self._emit(effect, effects, stopped)
                case ChargeTenant():
                    self._charge(effect)
                case SendPlan() | SendCancel() | DetachWorker():
                    self._instruct(effect)
                case RequestAccepted() | EmitPromptLogprobs() | EmitEmbedding() | FinishChoice():
                    self._tell(effect.request_id, _TOLD[type(effect)], effect)
                case Reject():
                    error = ServiceError.from_core(effect.error)
                    if effect.error.reason is Reason.DRAINING:
                        error.elsewhere(self.standby_endpoint())
                    self._tell(effect.request_id, RequestState.fail, error)
                case LogEvent():
                    self._log(effect)
        self._metrics.deliver.observe(self._clock() - started)
        for request_id, choice in stopped:
            if request_id in self._requests:
                self._perform(self._core.stop_choice(request_id, choice, self._clock()))

    def _instruct(self, effect: SendPlan | SendCancel | DetachWorker) -> None:
        """Pass on what is for a worker; one whose stream has just ended does not need it any more."""
        connection = self._connections.get(effect.worker_id)
        if connection is None:
            return
        match effect:
            case SendPlan():
                connection.send_plan(effect.plan)
            case SendCancel():
                connection.send_cancel(effect.handles)
            case DetachWorker():
                del self._connections[effect.worker_id]
                connection.detach(effect.reason)

    def _charge(self, charge: ChargeTenant) -> None:
        """Charge what was computed to the request, or to its tenant when the request has ended."""
        state, now = self._requests.get(charge.request_id), self._clock()
        lease = state.account.lease if state is not None else None
        if lease is not None:
            lease.computed(charge.prompt_tokens, charge.output_tokens, now)
        else:
            self._accounts.tenants.charge_late(charge.tenant, charge.prompt_tokens, charge.output_tokens, now)

    def _emit(self, emit: EmitTokens, effects: list[Effect], stopped: list[tuple[str, int]]) -> None:
        """Hand out the tokens of a step."""
        # The stop token of a choice is not shown; the effect that names it comes later in the list.
        last_is_stop = {
            (effect.request_id, effect.choice)
            for effect in effects
            if isinstance(effect, FinishChoice) and effect.stop_token_id is not None
        }
        now = self._clock()
        requests, gaps, count = self._requests, dict[float, int](), 0
        for delta in emit.deltas:
            request_id, choice, token_ids, _ = delta
            state = requests.get(request_id)
            if state is None:
                continue
            count += len(token_ids)
            if (lease := state.account.lease) is not None:
                lease.computed(0, len(token_ids), now)
            try:
                hide_last = (request_id, choice) in last_is_stop
                if state.on_tokens(delta, now, gaps, hide_last=hide_last):
                    stopped.append((request_id, choice))
            except Exception:  # noqa: BLE001 - logged; a bug in there harms this request only
                self._give_up(state)
        for last_at, times in gaps.items():
            self._metrics.inter_token.observe(now - last_at, times)
            self._accounts.recent_itl_s.add(now, now - last_at, times)
        self._metrics.output_tokens.inc(count)
        self._accounts.recent_output_tokens.add(now, count)

    def _tell(self, core_id: str, action: Callable[[RequestState, Any], None], argument: object) -> None:
        """Tell a live request something; a bug in there harms this request only."""
        state = self._requests.get(core_id)
        if state is None:
            return
        try:
            action(state, argument)
        except Exception:  # noqa: BLE001 - logged
            self._give_up(state)
        if state.ended:
            self._forget(core_id)

    def _give_up(self, state: RequestState) -> None:
        _log.exception("request_failed", request_id=state.request_id)
        self._post(lambda now: self._core.cancel(state.core_id, now))
        state.fail(ServiceError("INTERNAL", "the scheduler failed to handle the output"))
        self._forget(state.core_id)

    def _forget(self, core_id: str) -> None:
        self._requests.pop(core_id, None)
        if not self._requests:
            self._idle.set()

    def _log(self, event: LogEvent) -> None:
        fields = dict(event.fields)
        state = self._requests.get(str(fields.get("request_id")))
        if state is not None:
            fields["request_id"] = state.request_id
        if event.name == "worker_lost":
            self._metrics.worker_losses.labels(fields["worker_id"]).inc()
        elif event.name == "level_changed":
            change = (fields["model"], str(fields["former_level"]), str(fields["new_level"]))
            self._metrics.level_changes.labels(*change).inc()
            self.on_level()
        (_log.warning if event.name in _WARNINGS else _log.info)(event.name, **fields)
