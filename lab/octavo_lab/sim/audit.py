"""Looks into a core and its workers: are the books right, and does nothing sleep that should work?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from octavo_lab.sim.host import WorkerHost
from scheduler_svc.core.core import SchedulerCore
from scheduler_svc.core.fleet import ModelPool
from scheduler_svc.core.request import Sequence, SequenceStatus
from scheduler_svc.core.worker import WorkerState

# ruff: noqa: SLF001 # an audit looks inside


class InvariantError(AssertionError):
    """The core has broken a promise; the message says which and where."""


def require(holds: bool, promise: str, detail: object = "") -> None:
    """Raise unless a promise is kept."""
    if not holds:
        raise InvariantError(f"{promise}: {detail}")


def check_core(core: SchedulerCore) -> None:
    """Verify the books of a core from scratch."""
    where: dict[Sequence, WorkerState] = {}
    for worker in core._workers.values():
        _check_worker(worker, core.config.window)
        for sequence in worker.sequences.values():
            require(sequence not in where, "a sequence is on one worker at most", sequence.binding.handle)
            where[sequence] = worker
    waiting: set[Sequence] = set()
    for model in core._models.values():
        waiting.update(_check_queue(model.pool))
    for request in core._lifecycle.requests.values():
        live = [s for s in request.sequences if s.status is not SequenceStatus.FINISHED]
        require(len(live) == request.live > 0, "live choices are counted", request.request_id)
        for sequence in live:
            state = (request.request_id, sequence.choice, sequence.status)
            bound = sequence.status in {SequenceStatus.RUNNING, SequenceStatus.RELEASING}
            require(bound == (sequence in where), "who runs is on a worker", state)
            require(
                (sequence.status is SequenceStatus.WAITING) == (sequence in waiting),
                "who waits is queued",
                state,
            )
        if any(s.status is SequenceStatus.HELD for s in live):
            leader = request.sequences[0]
            require(
                leader.status is not SequenceStatus.FINISHED, "who is held has a leader", request.request_id
            )


def _check_worker(worker: WorkerState, window: int) -> None:
    name = worker.worker_id
    size = worker.block_size
    require(len(worker.pipeline.in_flight) <= window, "the window bounds plans in flight", name)
    steps = [flight.plan.step for flight in worker.pipeline.in_flight]
    expected = list(range(worker.pipeline.next_step - len(steps), worker.pipeline.next_step))
    require(steps == expected, "plans in flight are in order", (name, steps))
    growth = [0] * size
    for handle, sequence in worker.decoding.items():
        require(sequence.status is SequenceStatus.RUNNING, "who decodes runs", (name, handle))
        require(sequence.binding.growth_bucket is not None, "who decodes grows", (name, handle))
        if sequence.binding.growth_bucket is not None:
            growth[sequence.binding.growth_bucket] += 1
    require(growth == worker.blocks.growth, "growth is counted", (name, growth, worker.blocks.growth))
    context = sum(sequence.num_tokens for sequence in worker.decoding.values())
    require(context == worker.context_tokens, "context is counted", (name, context, worker.context_tokens))
    running = worker.decoding.keys() | worker.prefilling.keys()
    require(not worker.decoding.keys() & worker.prefilling.keys(), "a sequence is in one phase", name)
    require(running <= worker.sequences.keys(), "who runs is known", name)
    for handle, sequence in worker.sequences.items():
        require(
            sequence.binding.handle == handle or sequence.binding.worker_id != name,
            "handles match",
            (name, handle),
        )
        runs = sequence.status is SequenceStatus.RUNNING and sequence.binding.worker_id == name
        require(runs == (handle in running), "who is bound runs", (name, handle, sequence.status))
    coming = sum(flight.blocks_coming for flight in worker.pipeline.in_flight)
    require(coming == worker.blocks.coming, "blocks on their way are counted", name)
    planned: dict[int, int] = {}
    for flight in worker.pipeline.in_flight:
        for handle, tokens in flight.plan.prefill:
            planned[handle] = planned.get(handle, 0) + tokens
    for handle, sequence in worker.prefilling.items():
        require(
            sequence.binding.num_planned_tokens == planned.get(handle, 0),
            "planned prefill is counted",
            (name, handle),
        )
    alone = worker.sequences and not worker.pipeline.in_flight and worker.pipeline.next_plan_at is None
    require(not alone, "a worker with sequences is never left alone", (name, list(worker.sequences)))


def _check_queue(pool: ModelPool) -> list[Sequence]:
    queue = pool.queue
    waiting = [*queue.order(0.0)]
    require(len(waiting) == len(set(waiting)) == len(queue), "the queue yields each once", len(waiting))
    require(all(s.status is SequenceStatus.WAITING for s in waiting), "who is queued waits")
    tokens = sum(sequence.waiting.num_tokens for sequence in waiting)
    require(tokens == queue.num_tokens, "waiting tokens are counted", (tokens, queue.num_tokens))
    bounded = [s for s in waiting if s.history.started_at is None and not s.request.spec.paced]
    found = (len({s.request for s in bounded}), sum(s.waiting.num_tokens for s in bounded))
    known = (queue.bounded_requests(), queue.bounded_tokens())
    require(found == known, "what the bounds count is counted", (found, known))
    usable = [worker for worker in pool.workers.values() if not worker.draining]
    stranded = {s for s in waiting if usable and not any(pool.can_hold(worker, s) for worker in usable)}
    noted = set().union(*(each.stranded for each in queue.classes.values()))
    require(stranded == noted, "who is stranded is known", (len(stranded), len(noted)))
    tokens = sum(sequence.waiting.num_tokens for sequence in stranded)
    known_tokens = sum(each.stranded_tokens for each in queue.classes.values())
    require(tokens == known_tokens, "their tokens are counted", (tokens, known_tokens))
    fresh = sum(1 for sequence in waiting if sequence.history.started_at is None)
    require(fresh == queue.num_fresh, "fresh ones are counted", (fresh, queue.num_fresh))
    return waiting


def check_nothing_sleeps(core: SchedulerCore, now: float) -> None:
    """Verify that no idle worker sleeps while a request waits that it could run."""
    for pool in (model.pool for model in core._models.values()):
        if not len(pool.queue):
            continue
        left = {s for worker in pool.workers.values() if worker.pipeline.in_flight for s in worker.deferred}
        woken = any(worker.pipeline.next_plan_at is not None for worker in pool.idle.values())
        for worker in pool.workers.values():
            if worker.pipeline.in_flight or worker.draining or worker.pipeline.next_plan_at is not None:
                continue
            for sequence in pool.queue.order(now):
                able = pool.can_hold(worker, sequence) and not sequence.request.is_late(now)
                # Left to a better worker, which will plan soon; or a batch that is not full, with a timer.
                looked_after = sequence in left or (core.config.static is not None and woken)
                names = (worker.worker_id, sequence.request.request_id)
                require(not able or looked_after, "nobody sleeps while work waits", names)


def check_order(
    core: SchedulerCore, worker_id: str, fresh: Iterable[int], passed: set[Sequence], now: float
) -> None:
    """Verify that whoever came before what a plan admits, in its class, was considered first.

    `fresh` are the handles of what is admitted for the first time: all others stood in front.
    """
    worker = core._workers.get(worker_id)
    if worker is None:
        return
    pool = core._models[worker.info.model].pool
    for handle in fresh:
        sequence = worker.sequences.get(handle)
        if sequence is None:
            continue
        for other in pool.queue.classes[sequence.request.priority].by_age():
            if other.request.arrival >= sequence.request.arrival:
                break
            excused = other in passed or other.request.is_late(now) or not pool.can_hold(worker, other)
            names = (worker_id, sequence.request_id, other.request_id)
            require(excused, "nobody is passed over without a reason", names)


def check_ended(core: SchedulerCore, hosts: Mapping[str, WorkerHost]) -> None:
    """Verify that nothing is left when all requests have ended and all is quiet."""
    require(not core._lifecycle.requests, "no request is left", list(core._lifecycle.requests))
    require(len(core._lifecycle.deadlines) == 0, "no deadline is left")
    for worker in core._workers.values():
        require(not worker.sequences, "no handle is left", (worker.worker_id, list(worker.sequences)))
        require(not worker.pipeline.in_flight, "no plan is left", worker.worker_id)
        require(not worker.blocks.active_keys, "no hit is held", worker.worker_id)
        require(not worker.pipeline.pending_seals, "no seal is left", worker.worker_id)
    for host in hosts.values():
        if host.session:
            require(host.machine.quiet, "no block is left", host.worker_id)
