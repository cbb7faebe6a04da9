"""The scheduler as a state machine: events in, effects out, time as an argument.

Nothing here does I/O, reads a clock or waits. Each public method takes an event, changes the books
and returns what is to be done, in order. `docs/scheduler.md` tells how the parts fit together.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping

from octavo.protocol.steps import FinishReason, Report

from scheduler_svc.core import bisection
from scheduler_svc.core.blame import Blamed, blame, forgive
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.effects import DetachWorker, Effect, LogEvent, Reject, RequestAccepted, SendPlan
from scheduler_svc.core.errors import CoreError, ProtocolViolationError, Reason
from scheduler_svc.core.events import AdmissionRequest, NewRequest, WorkerInfo
from scheduler_svc.core.fleet import ModelPool
from scheduler_svc.core.lifecycle import Lifecycle
from scheduler_svc.core.model import ModelScheduler
from scheduler_svc.core.overload import Caps, Level
from scheduler_svc.core.planning import Explain
from scheduler_svc.core.reports import ReportReader
from scheduler_svc.core.request import Request, Sequence, SequenceStatus
from scheduler_svc.core.snapshot import CoreSnapshot, take_snapshot
from scheduler_svc.core.timers import TimerWheel
from scheduler_svc.core.usage import UsageBooks
from scheduler_svc.core.worker import WorkerState


class SchedulerCore:
    """Decides, for every step of every worker, exactly what runs."""

    def __init__(self, config: CoreConfig, explain: Explain | None = None) -> None:
        self.config = config
        self._explain = explain
        self._models: dict[str, ModelScheduler] = {}
        self._workers: dict[str, WorkerState] = {}
        self._weights = dict(config.tenant_weights)
        self._lifecycle = Lifecycle(config, self._models)
        self._usage = UsageBooks()
        self._reader = ReportReader(config, self._lifecycle, self._usage)
        self._wakeups: list[tuple[float, str]] = []
        self._watchdogs: TimerWheel[str] = TimerWheel()
        self._draining = False
        self._fallen: dict[str, tuple[str, list[Blamed]]] = {}
        """Lost workers: their incarnation, and those suspected of their death while some of them live."""

    # Requests ------------------------------------------------------------------------------------

    def submit(self, spec: NewRequest, now: float) -> list[Effect]:
        """Take a request in, or refuse it."""
        out: list[Effect] = []
        self._expire(now, out)
        model = self._model(spec.model)
        admission = model.admission
        newcomer = AdmissionRequest.of(spec, model.pool.deepest_cached_tokens(spec))
        admission.asked(spec.priority, now)
        error = self._refusal(spec, model, newcomer, now)
        if error is not None:
            self._lifecycle.refused(error)
            out.append(Reject(spec.request_id, error))
            return out
        displaced = admission.displaced(newcomer)
        if displaced is not None:
            why = admission.displacement(now)
            self._lifecycle.end_request(displaced.request, FinishReason.ERROR, why, now, out)
        position = model.pool.queue.num_fresh
        expected = admission.predict(newcomer, now)
        self._lifecycle.open(spec, expected, now)
        wait_s, ttft_s = (expected.wait_s, expected.ttft_s) if expected is not None else (None, None)
        out.append(RequestAccepted(spec.request_id, position, wait_s, ttft_s, int(admission.level)))
        self._lifecycle.end_finished(spec.request_id, now, out)
        self._place_waiting(now, out)
        return out

    def cancel(self, request_id: str, now: float) -> list[Effect]:
        """The client does not want a request any more. An unknown id changes nothing."""
        out: list[Effect] = []
        request = self._lifecycle.requests.get(request_id)
        if request is not None:
            self._lifecycle.end_request(request, FinishReason.CANCELLED, None, now, out)
        return out

    def stop_choice(self, request_id: str, choice: int, now: float) -> list[Effect]:
        """A stop string has ended a choice. An unknown id or an ended choice changes nothing."""
        out: list[Effect] = []
        request = self._lifecycle.requests.get(request_id)
        if request is not None and request.sequences[choice].status is not SequenceStatus.FINISHED:
            self._lifecycle.end_choice(request.sequences[choice], FinishReason.STOP, now, out)
            self._place_waiting(now, out)
        return out

    def delivered(self, request_id: str, now: float) -> list[Effect]:
        """The client has taken the end of a request late. Nothing follows from it: a plan log notes it."""
        return []

    def drain(self, now: float) -> list[Effect]:
        """Refuse new requests from now on; what is here goes on."""
        self._draining = True
        return [LogEvent("scheduler_draining", {"live_requests": len(self._lifecycle.requests)})]

    def weigh_tenants(self, weights: Mapping[str, float], now: float) -> list[Effect]:
        """Give tenants these shares from now on; what they have used stays as it was charged."""
        self._weights.clear()
        self._weights.update(weights)
        return []

    # Workers -------------------------------------------------------------------------------------

    def worker_up(self, info: WorkerInfo, now: float) -> list[Effect]:
        """A worker has welcomed the scheduler."""
        out: list[Effect] = []
        former = self._workers.get(info.worker_id)
        if former is not None:
            self._lose(former, "replaced", now, out, died=former.info.incarnation != info.incarnation)
        incarnation, blamed = self._fallen.pop(info.worker_id, ("", []))
        if incarnation == info.incarnation:
            # Only its stream had broken: nobody killed it.
            for name in blamed:
                if (sequence := self._lifecycle.find(name)) is not None:
                    forgive(sequence, name)
        pool = self._model(info.model).pool
        worker = WorkerState.from_info(info, self.config, now)
        self._workers[info.worker_id] = worker
        pool.add(worker)
        out.append(LogEvent("worker_up", {"worker_id": info.worker_id, "model": info.model}))
        self._plan_ahead(worker, now, out)
        self._place_waiting(now, out)
        return out

    def worker_down(self, worker_id: str, now: float) -> list[Effect]:
        """The stream to a worker has ended, for whatever reason."""
        out: list[Effect] = []
        worker = self._workers.get(worker_id)
        if worker is not None:
            blamed = self._lose(worker, "stream ended", now, out, died=True)
            self._fallen = {name: fallen for name, fallen in self._fallen.items() if self._matters(fallen[1])}
            if self._matters(blamed):
                self._fallen[worker_id] = (worker.info.incarnation, blamed)
            self._place_waiting(now, out)
        return out

    def worker_draining(self, worker_id: str, now: float) -> list[Effect]:
        """A worker takes nothing new; what it runs goes on."""
        out: list[Effect] = []
        worker = self._workers.get(worker_id)
        if worker is not None:
            out.append(LogEvent("worker_draining", {"worker_id": worker_id, "running": worker.num_seqs}))
            model = self._models[worker.info.model]
            model.pool.stop_using(worker, now)
            model.admission.fewer_workers()
            self._place_waiting(now, out)
        return out

    def report(self, worker_id: str, report: Report, now: float) -> list[Effect]:
        """A worker has answered a plan. One from a worker that was let go of changes nothing."""
        out: list[Effect] = []
        worker = self._workers.get(worker_id)
        if worker is None:
            return out
        self._expire(now, out)
        model = self._models[worker.info.model]
        try:
            self._reader.read(worker, model.pool, report, now, out)
        except ProtocolViolationError as violation:
            self._detach(worker, str(violation), now, out, died=False)
        else:
            model.pool.update_load(worker)
            self._watch(worker, now)
            self._plan_ahead(worker, now, out)
        self._place_waiting(now, out)
        return out

    # Time ----------------------------------------------------------------------------------------

    def next_wakeup(self) -> float | None:
        """Return when `tick` is due, or None when nothing waits for time to pass."""
        while self._wakeups:
            at, worker_id = self._wakeups[0]
            worker = self._workers.get(worker_id)
            if worker is not None and worker.pipeline.next_plan_at == at:
                break
            heapq.heappop(self._wakeups)
        times = [self._lifecycle.deadlines.next_at(), self._watchdogs.next_at()]
        times += [model.admission.next_look() for model in self._models.values()]
        if self._wakeups:
            times.append(self._wakeups[0][0])
        return min((at for at in times if at is not None), default=None)

    def tick(self, now: float) -> list[Effect]:
        """Do what is due: deadlines, watchdogs, plans."""
        out: list[Effect] = []
        self._expire(now, out)
        for worker_id in self._watchdogs.expire(now):
            worker = self._workers.get(worker_id)
            if worker is not None and worker.pipeline.in_flight:
                self._detach(worker, "watchdog: no report in time", now, out, died=True)
        while self._wakeups and self._wakeups[0][0] <= now:
            at, worker_id = heapq.heappop(self._wakeups)
            worker = self._workers.get(worker_id)
            if worker is not None and worker.pipeline.next_plan_at == at:
                self._plan_ahead(worker, now, out)
        self._place_waiting(now, out)
        return out

    def snapshot(self, now: float) -> CoreSnapshot:
        """Return the figures of the moment."""
        usage = self._usage.snapshot(list(self._workers.values()), now)
        return take_snapshot(self._lifecycle, self._models, usage, now)

    @property
    def num_seats(self) -> int:
        """Sequences that all workers together can run at once."""
        return sum(model.pool.num_seats for model in self._models.values())

    def level_of(self, model: str) -> Level:
        """Return the degradation level of a model."""
        served = self._models.get(model)
        return served.admission.level if served is not None else Level.NORMAL

    def refusal_for_load(self, model: str, newcomer: AdmissionRequest, now: float) -> CoreError | None:
        """Return why a request that is not tokenized yet would be refused for load. Changes nothing."""
        served = self._models.get(model)
        if served is None:
            return None
        with served.admission.forecast.question():
            return served.admission.refusal(newcomer, now)

    def caps(self, model: str) -> Caps | None:
        """Return the limits in force for requests that may be trimmed. Changes nothing."""
        served = self._models.get(model)
        return served.admission.caps() if served is not None else None

    # For observers -------------------------------------------------------------------------------

    @property
    def observer(self) -> Explain | None:
        """Who is told of the sequences that a plan passes over, if anybody is."""
        return self._explain

    def explain_to(self, explain: Explain | None) -> None:
        """Call `explain` from now on for each waiting sequence that a plan passes over."""
        self._explain = explain
        for model in self._models.values():
            model.planner.explain = explain

    @property
    def requests(self) -> Mapping[str, Request]:
        """The live requests, to be looked at and not changed."""
        return self._lifecycle.requests

    @property
    def workers(self) -> Mapping[str, WorkerState]:
        """The attached workers, to be looked at and not changed."""
        return self._workers

    def find(self, request_id: str) -> Request | None:
        """Return a live request, to be looked at and not changed."""
        return self._lifecycle.requests.get(request_id)

    def queue_position(self, request_id: str, now: float) -> tuple[int, int] | None:
        """Return how many sequences wait ahead of a request and how many wait in all, if it waits."""
        request = self.find(request_id)
        if request is None:
            return None
        queue = self._models[request.spec.model].pool.queue
        for position, sequence in enumerate(queue.order(now)):
            if sequence.request is request:
                return position, len(queue)
        return None

    def ahead_of(self, sequence: Sequence, now: float) -> Iterator[Sequence]:
        """Yield those that stand before one that waits."""
        queue = self._models[sequence.request.spec.model].pool.queue
        return itertools.takewhile(lambda other: other is not sequence, queue.order(now))

    # Inside --------------------------------------------------------------------------------------

    def _model(self, name: str) -> ModelScheduler:
        model = self._models.get(name)
        if model is None:
            model = self._models[name] = ModelScheduler(self.config, self._weights, name, self._explain)
        return model

    def _refusal(
        self, spec: NewRequest, model: ModelScheduler, newcomer: AdmissionRequest, now: float
    ) -> CoreError | None:
        """Return why a request cannot be taken, if so."""
        if spec.request_id in self._lifecycle.requests:
            return CoreError(Reason.DUPLICATE_REQUEST_ID, f"request {spec.request_id!r} is running already")
        if self._draining:
            return CoreError(Reason.DRAINING, "the scheduler is draining", retry_after_s=1.0)
        longest = model.pool.max_model_len
        total = len(spec.prompt_token_ids) + (spec.sampling.max_tokens or 0)
        if longest is not None and total > longest:
            return CoreError(
                Reason.PROMPT_TOO_LONG,
                f"prompt and max_tokens need {total} tokens, the largest worker holds {longest}",
            )
        return model.admission.refusal(newcomer, now)

    def _place_waiting(self, now: float, out: list[Effect]) -> None:
        """Look for an idle worker for what has begun to wait; busy ones look at the queue by themselves."""
        for model in self._models.values():
            unplaced = model.pool.queue.unplaced
            while unplaced:
                sequence = unplaced.pop()
                if sequence.status is SequenceStatus.WAITING:
                    self._place(sequence, model.pool, now, out)

    def _place(self, sequence: Sequence, pool: ModelPool, now: float, out: list[Effect]) -> None:
        """Wake an idle worker for a sequence unless it is better left to a busy one.

        The worker may take others that stand ahead of it: then it is the turn of the next one.
        """
        # Batches of the control arm are not joined, so nothing is left to a busy worker there.
        static = self.config.static is not None
        while sequence.status is SequenceStatus.WAITING:
            worker = pool.idle_for(sequence, now)
            if worker is None:
                return
            better = None if static else pool.better_elsewhere(worker, sequence, now)
            if better is not None:
                sequence.note_better(better.worth_until)
                worker = better.worker
                if worker.pipeline.in_flight:
                    pool.defer(sequence, worker)
                    return
            num_idle = len(pool.idle)
            self._plan_ahead(worker, now, out)
            if len(pool.idle) == num_idle:
                return

    def _plan_ahead(self, worker: WorkerState, now: float, out: list[Effect]) -> None:
        """Send the plans that are due now, and note when the next one is."""
        model = self._models[worker.info.model]
        pool, pipeline = model.pool, worker.pipeline
        pipeline.next_plan_at = None
        while pipeline.has_room(self.config.window):
            # A lead before what is in flight has run.
            due = max(worker.ends_at() - pipeline.lead_s, worker.backoff.rests_until)
            if due > now:
                self._wake(worker, due)
                break
            builder = bisection.plan_trial(worker) or model.planner.plan(worker, now)
            if not worker.draining:
                started = len(builder.admitted) if builder is not None else 0
                model.admission.forecast.drain.planned(started, pool.queue.num_servable, now)
            if worker.deferred:
                pool.end_deferrals(worker, now, all_of_them=builder is None)
            if builder is None:
                wake = model.planner.wake_at(worker, now)
                if wake is not None:
                    self._wake(worker, wake)
                break
            if not pipeline.in_flight:
                self._watch_from(worker, now)
            flight = builder.finish(now)
            out += builder.events
            out.append(SendPlan(worker.worker_id, flight.plan))
            if flight.admitted:
                pool.update_load(worker)
                if pool.idle and len(pool.queue):
                    pool.queue.unplaced.append(next(pool.queue.order(now)))
        pool.note_idle(worker)

    def _wake(self, worker: WorkerState, at: float) -> None:
        worker.pipeline.next_plan_at = at
        heapq.heappush(self._wakeups, (at, worker.worker_id))

    def _watch(self, worker: WorkerState, now: float) -> None:
        """A worker that owes a report has until the watchdog to send it."""
        if worker.pipeline.in_flight:
            self._watch_from(worker, now)
        else:
            self._watchdogs.disarm(worker.worker_id)

    def _watch_from(self, worker: WorkerState, now: float) -> None:
        self._watchdogs.arm(worker.worker_id, now + self.config.step_watchdog_s)

    def _expire(self, now: float, out: list[Effect]) -> None:
        for request_id in self._lifecycle.deadlines.expire(now):
            self._lifecycle.expire(request_id, now, out)
        for model in self._models.values():
            event = model.admission.observe(now)
            if event is not None:
                out.append(event)

    def _matters(self, blamed: list[Blamed]) -> bool:
        """Return whether any of those that are blamed for a death still lives."""
        return any(self._lifecycle.find(name) is not None for name in blamed)

    def _detach(self, worker: WorkerState, reason: str, now: float, out: list[Effect], *, died: bool) -> None:
        """Let go of a worker that still has a stream."""
        out.append(DetachWorker(worker.worker_id, reason))
        self._lose(worker, reason, now, out, died=died)

    def _lose(
        self, worker: WorkerState, reason: str, now: float, out: list[Effect], *, died: bool
    ) -> list[Blamed]:
        """Let go of a worker; what it ran goes back to the front of the queue with its tokens.

        Returns those that are suspected of its death.
        """
        model = self._models[worker.info.model]
        pool = model.pool
        blamed = blame(worker, pool.losses, len(pool.workers), now) if died else []
        del self._workers[worker.worker_id]
        self._usage.left(worker, now)
        pool.remove(worker, now)
        model.admission.fewer_workers()
        self._watchdogs.disarm(worker.worker_id)
        sequences = list(worker.sequences.values())
        fields = {"worker_id": worker.worker_id, "reason": reason, "running": len(sequences)}
        out.append(LogEvent("worker_lost", fields))
        for sequence in sequences:
            worker.forget(sequence)
            if sequence.status is not SequenceStatus.FINISHED:
                self._lifecycle.recover(sequence, now, out)
        if len(pool.queue):
            # What the worker was to be woken for waits for another one now.
            pool.queue.unplaced.extend(itertools.islice(pool.queue.order(now), len(pool.idle)))
        return blamed
