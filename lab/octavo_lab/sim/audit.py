"""Looks into a core and its workers: are the books right, and does nothing sleep that should work?"""

from __future__ import annotations

from collections import Counter
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


def require_same(found: object, known: object, promise: str, where: object = "") -> None:
    """Raise unless a recount gives what the core has in its books."""
    require(found == known, promise, (where, found, known))


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
            status, state = sequence.status, (request.request_id, sequence.choice, sequence.status)
            bound = status in {SequenceStatus.RUNNING, SequenceStatus.RELEASING}
            require(bound == (sequence in where), "who runs is on a worker", state)
            queued = status is SequenceStatus.WAITING
            require(queued == (sequence in waiting), "who waits is queued", state)
        led = request.leader in live or all(s.status is not SequenceStatus.HELD for s in live)
        require(led, "who is held has a leader", request.request_id)


def _check_worker(worker: WorkerState, window: int) -> None:
    name, in_flight, blocks = worker.worker_id, worker.pipeline.in_flight, worker.blocks
    require(len(in_flight) <= window, "the window bounds plans in flight", name)
    steps = [flight.plan.step for flight in in_flight]
    following = worker.pipeline.next_step
    require_same(steps, [*range(following - len(steps), following)], "plans in flight are in order", name)
    for handle, sequence in worker.decoding.items():
        require(sequence.status is SequenceStatus.RUNNING, "who decodes runs", (name, handle))
        require(sequence.binding.growth_bucket is not None, "who decodes grows", (name, handle))
    buckets = Counter(sequence.binding.growth_bucket for sequence in worker.decoding.values())
    growth = [buckets[bucket] for bucket in range(worker.block_size)]
    require_same(growth, blocks.growth, "growth is counted", name)
    context = sum(sequence.num_tokens for sequence in worker.decoding.values())
    require_same(context, worker.context_tokens, "context is counted", name)
    loads: dict[str, list[int]] = {}
    for sequence in worker.decoding.values():
        load = loads.setdefault(sequence.request.tenant, [0, 0])
        load[0] += 1
        load[1] += sequence.num_tokens
    kept = {tenant: [load.decodes, load.context_tokens] for tenant, load in worker.loads.items()}
    require_same(loads, kept, "load is counted by tenant", name)
    running = worker.decoding.keys() | worker.prefilling.keys()
    require(not worker.decoding.keys() & worker.prefilling.keys(), "a sequence is in one phase", name)
    require(running <= worker.sequences.keys(), "who runs is known", name)
    for handle, sequence in worker.sequences.items():
        here = sequence.binding.worker_id == name
        require(sequence.binding.handle == handle or not here, "handles match", (name, handle))
        runs = sequence.status is SequenceStatus.RUNNING and here
        require(runs == (handle in running), "who is bound runs", (name, handle, sequence.status))
    coming = sum(flight.blocks_coming for flight in in_flight)
    require_same(coming, blocks.coming, "blocks on their way are counted", name)
    planned: Counter[int] = Counter()
    for flight in in_flight:
        for handle, tokens in flight.plan.prefill:
            planned[handle] += tokens
    for handle, sequence in worker.prefilling.items():
        known = sequence.binding.num_planned_tokens
        require_same(planned[handle], known, "planned prefill is counted", (name, handle))
    alone = worker.sequences and not in_flight and worker.pipeline.next_plan_at is None
    require(not alone, "a worker with sequences is never left alone", (name, list(worker.sequences)))


def _check_queue(pool: ModelPool) -> list[Sequence]:
    queue, waiting = pool.queue, [*pool.queue.order(0.0)]
    require(len(waiting) == len(set(waiting)) == len(queue), "the queue yields each once", len(waiting))
    require(all(s.status is SequenceStatus.WAITING for s in waiting), "who is queued waits")
    fresh = [s for s in waiting if s.history.started_at is None]
    bounded = [s for s in fresh if not s.request.spec.paced]
    usable = [worker for worker in pool.workers.values() if not worker.draining]
    stranded = {s for s in waiting if usable and not any(pool.can_hold(worker, s) for worker in usable)}
    classes = queue.classes.values()
    require(stranded == set().union(*(each.stranded for each in classes)), "who is stranded is known")
    stranded_tokens = sum(each.stranded_tokens for each in classes)
    require_same(_tokens(waiting), queue.num_tokens, "waiting tokens are counted")
    require_same(len({s.request for s in bounded}), queue.bounded_requests(), "bounded requests are counted")
    require_same(_tokens(bounded), queue.bounded_tokens(), "bounded tokens are counted")
    require_same(_tokens(stranded), stranded_tokens, "tokens of the stranded are counted")
    require_same(len(fresh), queue.num_fresh, "fresh ones are counted")
    return waiting


def _tokens(sequences: Iterable[Sequence]) -> int:
    return sum(sequence.waiting.num_tokens for sequence in sequences)


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
