"""The figures of the moment, for status and metrics."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.protocol.steps import Geometry, PoolReport, Priority

from scheduler_svc.core.admission import AdmissionControl
from scheduler_svc.core.events import AdmissionRequest
from scheduler_svc.core.lifecycle import Lifecycle
from scheduler_svc.core.model import ModelScheduler
from scheduler_svc.core.overload import Caps, Level, Pressure
from scheduler_svc.core.request import Prediction
from scheduler_svc.core.usage import UsageSnapshot


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """The waiting of one class of one model."""

    model: str
    priority: Priority
    waiting: int
    waiting_tokens: int
    oldest_wait_s: float


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """One attached worker."""

    worker_id: str
    model: str
    draining: bool
    running: int
    pool: PoolReport
    geometry: Geometry
    step_s: float
    steps: int
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class OverloadSnapshot:
    """The degradation of one model: its level, the inputs, and what follows from them."""

    model: str
    level: Level
    half_open: bool
    pressure: Pressure
    expected: Prediction | None
    """What a newcomer of the standard class has to expect."""
    caps: Caps | None


@dataclass(frozen=True, slots=True)
class CoreSnapshot:
    """Queues, workers, and accounts that close: arrivals == sum(outcomes) + live requests."""

    queues: tuple[QueueSnapshot, ...]
    workers: tuple[WorkerSnapshot, ...]
    arrivals: int
    live_requests: int
    outcomes: dict[str, int]
    usage: UsageSnapshot
    overload: tuple[OverloadSnapshot, ...] = ()
    """One per model; empty when the ladder is off."""


def take_snapshot(
    lifecycle: Lifecycle, models: dict[str, ModelScheduler], usage: UsageSnapshot, now: float
) -> CoreSnapshot:
    """Collect the figures of the moment."""
    queues = []
    workers = []
    for name, model in models.items():
        for priority, queue in model.pool.queue.classes.items():
            oldest = queue.oldest_arrival()
            waited = now - oldest if oldest is not None else 0.0
            queues.append(QueueSnapshot(name, priority, len(queue), queue.num_tokens, waited))
        for worker in model.pool.workers.values():
            workers.append(
                WorkerSnapshot(
                    worker_id=worker.worker_id,
                    model=name,
                    draining=worker.draining,
                    running=worker.num_seqs,
                    pool=worker.blocks.pool,
                    geometry=worker.info.geometry,
                    step_s=worker.pace.last_step_s,
                    steps=worker.pace.num_steps,
                    max_num_seqs=worker.max_num_seqs,
                    max_num_batched_tokens=worker.token_budget,
                )
            )
    return CoreSnapshot(
        tuple(queues),
        tuple(workers),
        lifecycle.arrivals,
        len(lifecycle.requests),
        dict(lifecycle.outcomes),
        usage,
        tuple(
            _overload(name, model.admission, now)
            for name, model in models.items()
            if model.admission.controller
        ),
    )


def _overload(model: str, admission: AdmissionControl, now: float) -> OverloadSnapshot:
    assert admission.controller is not None
    with admission.forecast.question():
        expected = admission.predict(AdmissionRequest(), now)
    return OverloadSnapshot(
        model=model,
        level=admission.level,
        half_open=admission.level is Level.OPEN and admission.controller.breaker.half_open,
        pressure=admission.pressure,
        expected=expected,
        caps=admission.caps(),
    )
