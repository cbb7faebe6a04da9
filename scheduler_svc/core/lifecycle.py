"""The life of a request in the scheduler: opened, begun, recovered, ended; exactly one end each."""

from __future__ import annotations

import math
from collections import Counter

from octavo.protocol.steps import FinishReason

from scheduler_svc.core.blame import Blamed, is_poison
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.effects import ChoiceTimings, Effect, FinishChoice, LogEvent, Reject, SendCancel
from scheduler_svc.core.errors import CoreError, Reason
from scheduler_svc.core.events import NewRequest
from scheduler_svc.core.fleet import ModelPool
from scheduler_svc.core.model import ModelScheduler
from scheduler_svc.core.request import Prediction, Request, Sequence, SequenceStatus
from scheduler_svc.core.timers import RESOLUTION_S, TimerWheel


class Lifecycle:
    """Owns the live requests and their deadlines; keeps the accounts.

    `arrivals` equals the sum of `outcomes` and the live requests at all times.
    """

    def __init__(self, config: CoreConfig, models: dict[str, ModelScheduler]) -> None:
        self._config = config
        self._models = models
        self.requests: dict[str, Request] = {}
        self.deadlines: TimerWheel[str] = TimerWheel()
        self.arrivals = 0
        self.outcomes: Counter[str] = Counter()

    def find(self, blamed: Blamed) -> Sequence | None:
        """Return a sequence that was blamed for a death, unless it has ended."""
        request = self.requests.get(blamed.request_id)
        if request is None or request.arrival != blamed.arrival:
            return None
        sequence = request.sequences[blamed.choice]
        return sequence if sequence.status is not SequenceStatus.FINISHED else None

    # Beginning -----------------------------------------------------------------------------------

    def refused(self, error: CoreError) -> None:
        """Account for a request that was not taken in."""
        self.arrivals += 1
        self.outcomes[error.reason] += 1

    def open(self, spec: NewRequest, prediction: Prediction | None, now: float) -> None:
        """Take a request into the queue."""
        model = self._models[spec.model]
        pool = model.pool
        block_size = pool.block_size if self._config.prefix_caching else None
        request = Request.from_spec(spec, now, block_size)
        if spec.queue_deadline is not None:
            # No wait at all means: in the next plan or never.
            request.queue_deadline = max(spec.queue_deadline, pool.looks_until(now) + RESOLUTION_S)
        request.prediction = prediction
        model.admission.came_in(request)
        self.arrivals += 1
        self.requests[spec.request_id] = request
        for sequence in request.sequences:
            pool.charges.join(request.tenant)
            if sequence.status is SequenceStatus.WAITING:
                pool.queue.push(sequence)
        self._arm(request)

    def end_finished(self, request_id: str, now: float, out: list[Effect]) -> None:
        """End the choices of a request that had ended before it came here."""
        request = self.requests[request_id]
        for choice in sorted(request.spec.finished_choices):
            self.end_choice(request.sequences[choice], FinishReason.STOP, now, out)

    def started(self, sequence: Sequence, now: float) -> None:
        """A worker has taken a sequence: its wait is over."""
        self._models[sequence.request.spec.model].admission.forecast.waited(sequence, now)
        if len(sequence.request.sequences) == 1:
            self._arm(sequence.request)

    def first_token(self, sequence: Sequence, now: float) -> None:
        """The first token of a sequence, or of its resumption, has come."""
        request = sequence.request
        if sequence.history.first_token_at is None:
            sequence.history.first_token_at = now
        if not request.got_token:
            request.got_token = True
            self._arm(request)
            admission = self._models[request.spec.model].admission
            admission.forecast.first_token(sequence, now)
            admission.first_token(request, now)
        self.release_siblings(request)

    def release_siblings(self, request: Request) -> None:
        """The leader's prompt blocks are published, or never will be: its siblings may be admitted."""
        if len(request.sequences) == 1 or request.leader is None:
            return
        pool = self._models[request.spec.model].pool
        size = pool.block_size
        for sibling in request.sequences:
            if sibling.status is SequenceStatus.HELD and size is not None:
                sibling.transition(SequenceStatus.WAITING)
                prompt_keys = request.leader.keys[: request.prompt_len // size]
                sibling.keys = list(request.spec.resumed_keys.get(sibling.choice, prompt_keys))
                sibling.extend_keys(size)
                shared = min(request.prompt_len, sibling.num_tokens - 1) // size * size
                pool.queue.push_front(sibling, shared_tokens=shared if request.got_token else 0)

    # Going back ----------------------------------------------------------------------------------

    def requeue(self, sequence: Sequence) -> None:
        """A sequence has left its worker without an end: to the front of its class."""
        pool = self._models[sequence.request.spec.model].pool
        sequence.transition(SequenceStatus.WAITING)
        self._refund(sequence, pool)
        # What a sibling shares is still there when it was sent back before it began.
        fresh = sequence.history.started_at is None
        shared = sequence.num_tokens - sequence.waiting.num_tokens if fresh else 0
        pool.queue.push_front(sequence, shared_tokens=shared)

    def settled(self, sequence: Sequence) -> None:
        """A worker has let go of a sequence: if it was preempted it may be admitted elsewhere now."""
        if sequence.status is SequenceStatus.RELEASING:
            self.requeue(sequence)

    def unstart(self, sequence: Sequence) -> None:
        """A worker did not take a sequence after all: its wait goes on as if nothing had been planned."""
        request = sequence.request
        if (
            sequence.num_output_tokens == 0
            and sequence.history.preemptions == 0
            and sequence.history.recoveries == 0
        ):
            sequence.history.started_at = None
            if all(other.history.started_at is None for other in request.sequences):
                request.started = False
                self._arm(request)

    def recover(self, sequence: Sequence, now: float, out: list[Effect]) -> None:
        """The worker of a sequence is gone: it goes on elsewhere, unless it has killed too many."""
        deaths = sequence.deaths
        if is_poison(sequence, self._config.max_worker_deaths):
            error = CoreError(
                Reason.POISON,
                f"quarantined: {deaths.count} workers died at this point of it, {deaths.alone} of them "
                "while they computed nothing else",
                metadata={"deaths": str(deaths.count), "alone": str(deaths.alone)},
            )
            self.end_choice(sequence, FinishReason.ERROR, now, out, error=error)
            return
        sequence.history.recoveries += 1
        self.requeue(sequence)

    # Ending --------------------------------------------------------------------------------------

    def end_choice(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now: float,
        out: list[Effect],
        *,
        stop_token_id: int | None = None,
        error: CoreError | None = None,
    ) -> None:
        """End one choice wherever it is, and tell the client."""
        request = sequence.request
        self._withdraw(sequence, out)
        self._models[request.spec.model].admission.forecast.ended(sequence)
        request.live -= 1
        out.append(
            FinishChoice(
                request_id=request.request_id,
                choice=sequence.choice,
                reason=reason,
                stop_token_id=stop_token_id,
                cached_tokens=sequence.history.cached_tokens,
                completion_tokens=max(0, sequence.num_output_tokens),
                timings=_timings(sequence, now),
                error=error,
                last=request.live == 0,
            )
        )
        if request.live == 0:
            self._close(request, error, reason.name, now, out)
        elif sequence is request.leader:
            self.release_siblings(request)

    def end_request(
        self,
        request: Request,
        reason: FinishReason,
        error: CoreError | None,
        now: float,
        out: list[Effect],
    ) -> None:
        """End all of a request. One that has shown nothing yet is refused as a whole."""
        untouched = not request.got_token and request.live == len(request.sequences)
        if error is not None and untouched:
            for sequence in request.sequences:
                self._withdraw(sequence, out)
            request.live = 0
            out.append(Reject(request.request_id, error))
            self._close(request, error, reason.name, now, out)
            return
        # Siblings that were held must not be let go by the end of their leader.
        for sequence in reversed(request.sequences):
            if sequence.status is not SequenceStatus.FINISHED:
                self.end_choice(sequence, reason, now, out, error=error)

    def expire(self, request_id: str, now: float, out: list[Effect]) -> None:
        """A timer of a request has fired: end it for the deadline that has passed."""
        request = self.requests.get(request_id)
        if request is None:
            return
        error = _missed_deadline(request, now)
        if error is None:
            self._arm(request)
            return
        out.append(
            LogEvent(
                "request_expired",
                {"request_id": request_id, "reason": error.reason, "waited_s": now - request.arrival},
            )
        )
        self.end_request(request, FinishReason.DEADLINE, error, now, out)

    # Inside --------------------------------------------------------------------------------------

    def _withdraw(self, sequence: Sequence, out: list[Effect]) -> None:
        """Take a sequence from wherever it is; a worker that knows it is told."""
        pool = self._models[sequence.request.spec.model].pool
        worker_id = sequence.binding.worker_id
        was = sequence.status
        sequence.transition(SequenceStatus.FINISHED)
        if was is SequenceStatus.WAITING:
            pool.queue.remove(sequence)
        elif was is SequenceStatus.RUNNING and worker_id is not None:
            pool.workers[worker_id].cancel(sequence)
            out.append(SendCancel(worker_id, (sequence.binding.handle,)))
        self._refund(sequence, pool)
        pool.charges.leave(sequence.request.tenant)

    def _refund(self, sequence: Sequence, pool: ModelPool) -> None:
        """Take back the charge for prefill that was not computed."""
        if sequence.binding.num_charged_tokens:
            pool.charges.charge(sequence.request.tenant, -sequence.binding.num_charged_tokens)
            sequence.binding.num_charged_tokens = 0

    def _close(
        self, request: Request, error: CoreError | None, outcome: str, now: float, out: list[Effect]
    ) -> None:
        del self.requests[request.request_id]
        self.deadlines.disarm(request.request_id)
        self.outcomes[error.reason if error is not None else outcome] += 1
        admission = self._models[request.spec.model].admission
        event = admission.closed(request, error.reason if error is not None else None, now)
        if event is not None:
            out.append(event)

    def _arm(self, request: Request) -> None:
        """Set the one timer of a request to the next deadline that it can miss."""
        spec = request.spec
        at = spec.deadline if spec.deadline is not None else math.inf
        if not request.got_token and spec.ttft_deadline is not None:
            at = min(at, spec.ttft_deadline)
        if not request.started and request.queue_deadline is not None:
            at = min(at, request.queue_deadline)
        if at < math.inf:
            self.deadlines.arm(request.request_id, at)
        else:
            self.deadlines.disarm(request.request_id)


def _missed_deadline(request: Request, now: float) -> CoreError | None:
    """Return the error for the deadline that has passed, if any: the reason tells the phase."""
    spec = request.spec
    waited = f"after {now - request.arrival:.3f} s"
    passed = [("queue timeout", request.queue_deadline)] if not request.started else []
    passed += [("TTFT deadline", spec.ttft_deadline)] if not request.got_token else []
    passed += [("deadline", spec.deadline)]
    name = next((name for name, at in passed if at is not None and now >= at), None)
    if name is None:
        return None
    if request.got_token:
        reason, phase, where = Reason.DEADLINE_RUNNING, "decode", "while it ran"
    elif request.started:
        reason, phase, where = Reason.TTFT_DEADLINE, "prefill", "before the first token"
    else:
        reason = Reason.QUEUE_TIMEOUT if name == "queue timeout" else Reason.DEADLINE_QUEUED
        phase, where = "queued", "in the queue"
    return CoreError(
        reason, f"the {name} passed {waited}, {where}", metadata={"phase": phase, "deadline": name}
    )


def _timings(sequence: Sequence, now: float) -> ChoiceTimings:
    arrival = sequence.request.arrival
    first = sequence.history.first_token_at
    tokens = sequence.num_output_tokens - len(sequence.request.spec.resumed.get(sequence.choice, ()))
    return ChoiceTimings(
        queue_s=(sequence.history.started_at if sequence.history.started_at is not None else now) - arrival,
        ttft_s=first - arrival if first is not None else None,
        tpot_s=(now - first) / (tokens - 1) if first is not None and tokens > 1 else 0.0,
        total_s=now - arrival,
        preemptions=sequence.history.preemptions,
        recoveries=sequence.history.recoveries,
    )
