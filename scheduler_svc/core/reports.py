"""Reads a worker's report into the books."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from octavo.protocol.steps import (
    GRAMMAR_ERROR,
    FinishReason,
    RefuseReason,
    Report,
    StallReason,
    StepStatus,
)

from scheduler_svc.core import bisection
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.effects import (
    ChargeTenant,
    Effect,
    EmitEmbedding,
    EmitPromptLogprobs,
    EmitTokens,
    LogEvent,
    SendCancel,
    TokenDelta,
)
from scheduler_svc.core.errors import CoreError, ProtocolViolationError, Reason
from scheduler_svc.core.fleet import ModelPool
from scheduler_svc.core.lifecycle import Lifecycle
from scheduler_svc.core.pipeline import InFlight
from scheduler_svc.core.policies import POLICIES
from scheduler_svc.core.request import Sequence, SequenceStatus
from scheduler_svc.core.usage import UsageBooks
from scheduler_svc.core.worker import WorkerState

_FINISHED = SequenceStatus.FINISHED
_OTHERS_AT_WORK = {StallReason.PROMOTING, StallReason.COMPILING}
"""What a worker waits for while it has nothing to compute."""
_new = tuple.__new__
_SLOW_DOWN = 0.95
_SPEED_UP = 1.01


class ReportReader:
    """Applies reports. What a worker says of handles that are gone is normal and changes nothing."""

    def __init__(self, config: CoreConfig, lifecycle: Lifecycle, usage: UsageBooks) -> None:
        self._config = config
        self._lifecycle = lifecycle
        self._usage = usage
        self._charging = POLICIES[config.policy].charges_tenants
        self._holds_finished = config.static is not None and config.static.hold_finished

    def read(
        self, worker: WorkerState, pool: ModelPool, report: Report, now: float, out: list[Effect]
    ) -> None:
        """Apply a report.

        Raises:
            ProtocolViolationError: it is not the one that is due, or the books differ.
        """
        flight = worker.settle(report.step)
        self._usage.charge(worker, report, now)
        if report.status is not StepStatus.OK:
            self._undo(worker, flight, report.status)
        if report.admitted or report.prefilled:
            self._admitted(worker, pool, report, now, out)
        if report.refused:
            self._refused(worker, pool, report, now, out)
        if report.prompt_logprobs or report.embeddings:
            self._read_off(worker, report, out)
        if report.token_handles:
            self._tokens(worker, pool, report, now, out)
            if worker.suspects:
                worker.clear_proven()
        if report.finished:
            self._finished(worker, report, now, out)
        self._released(worker, flight, report)
        if report.stalled:
            self._stalled(worker, report, now)
        self._outcome(worker, pool, flight, report, now, out)
        self._keys(worker, pool, report)
        worker.blocks.pool = report.pool
        worker.pipeline.last_report_at = now
        worker.pace.num_steps += 1
        self._audit(worker, report)

    def _admitted(
        self,
        worker: WorkerState,
        pool: ModelPool,
        report: Report,
        now: float,
        out: list[Effect],
    ) -> None:
        if report.admitted:
            worker.backoff.num_refusals = 0
        for entry in report.admitted:
            sequence = worker.sequences.get(entry.handle)
            if sequence is None:
                continue
            worker.live.admitted(entry.handle, sequence.num_tokens)
            cached = entry.cached_tokens + entry.host_cached_tokens
            sequence.binding.num_computed_tokens = cached
            sequence.binding.num_believed_tokens = 0
            # What a cache had is free.
            sequence.settle(cached)
            worker.blocks.hold_keys(sequence, entry.cached_tokens // worker.block_size)
            if sequence.status is SequenceStatus.FINISHED:
                if entry.handle not in report.released:
                    # The cancel came before the plan that admitted it, and was forgotten.
                    worker.cancel(sequence)
                    out.append(SendCancel(worker.worker_id, (entry.handle,)))
                continue
            if sequence.history.first_token_at is None:
                sequence.history.cached_tokens = min(cached, sequence.prompt_len)
            self._lifecycle.started(sequence, now)
        for handle, tokens in report.prefilled:
            sequence = worker.sequences.get(handle)
            if sequence is not None:
                sequence.binding.num_computed_tokens += tokens
                self._charge_prefill(sequence, pool, out)

    def _refused(
        self, worker: WorkerState, pool: ModelPool, report: Report, now: float, out: list[Effect]
    ) -> None:
        """What was refused goes back to where it stood; what a runner cannot do at all has failed."""
        # What no step can do says nothing of the room for others.
        if not report.admitted and any(e.reason is not RefuseReason.UNSUPPORTED for e in report.refused):
            worker.backoff.refused(now)
        for entry in report.refused:
            sequence = worker.sequences.get(entry.handle)
            if sequence is None:
                continue
            worker.forget(sequence)
            if entry.reason is RefuseReason.DRAINING:
                pool.stop_using(worker, now)
            if sequence.status is not SequenceStatus.RUNNING:
                self._lifecycle.settled(sequence)
            elif entry.reason is RefuseReason.UNSUPPORTED:
                error = CoreError(Reason.UNSUPPORTED, entry.detail or "not supported by the model runner")
                self._lifecycle.end_choice(sequence, FinishReason.ERROR, now, out, error=error)
            else:
                sequence.waiting.trust_hits = False
                self._lifecycle.unstart(sequence)
                self._lifecycle.requeue(sequence)

    def _read_off(self, worker: WorkerState, report: Report, out: list[Effect]) -> None:
        """Pass on what was read off prompts, of log probabilities what was not passed on before."""
        for handle, (first, logprobs) in report.prompt_logprobs.items():
            sequence = worker.sequences.get(handle)
            if sequence is None or sequence.status is _FINISHED:
                continue
            request = sequence.request
            known = request.num_scored
            if not 1 <= first <= known or first + len(logprobs) > request.prompt_len:
                problem = f"{len(logprobs)} scores at {first} of {request.prompt_len} after {known}"
                raise ProtocolViolationError(f"handle {handle}: {problem}")
            if new := logprobs[known - first :]:
                request.num_scored = known + len(new)
                out.append(EmitPromptLogprobs(request.request_id, known, new))
        for handle, values in report.embeddings.items():
            sequence = worker.sequences.get(handle)
            if sequence is not None and sequence.status is not _FINISHED:
                out.append(EmitEmbedding(sequence.request_id, values))

    def _tokens(
        self, worker: WorkerState, pool: ModelPool, report: Report, now: float, out: list[Effect]
    ) -> None:
        """Take new tokens in. This loop is the scheduler's hottest: one turn per sequence and step."""
        decoding, size, logprobs = worker.decoding.get, worker.block_size, report.logprobs
        deltas: list[TokenDelta] = []
        decoded = digest = 0
        try:
            for handle, first, ids in zip(
                report.token_handles, report.first_positions, _runs_of(report), strict=True
            ):
                sequence = decodes = decoding(handle)
                if sequence is None:
                    sequence = worker.sequences.get(handle)
                    if sequence is None:
                        continue
                tokens = sequence.token_ids
                if first != len(tokens):
                    raise ProtocolViolationError(f"handle {handle}: token at {first} after {len(tokens)}")
                tokens.extend(ids)
                count = len(ids)
                digest += handle * count
                if decodes is not None:
                    decoded += count
                else:
                    self._first_token(worker, sequence, report.step, now)
                if (first + count) % size < count:
                    self._fill_block(worker, sequence)
                if decodes is not None or sequence.status is not _FINISHED:
                    found = logprobs.get(handle) if logprobs else None
                    # What NamedTuple's own constructor does, at half its price.
                    deltas.append(_new(TokenDelta, (sequence.request_id, sequence.choice, ids, found)))
                else:
                    self._charge_late(sequence, count, pool, out)
        finally:
            # Also when a later token is not as it should be: what is known here, the client has to get.
            worker.live.add(digest)
            worker.context_tokens += decoded
            if deltas:
                out.append(EmitTokens(deltas))
        if self._charging:
            self._charge(pool, deltas)

    def _charge_prefill(self, sequence: Sequence, pool: ModelPool, out: list[Effect]) -> None:
        owed = sequence.settle(sequence.binding.num_computed_tokens)
        if not owed:
            return
        tenant = sequence.request.tenant
        out.append(ChargeTenant(sequence.request_id, tenant, owed))
        paid = min(owed, sequence.binding.num_charged_tokens)
        sequence.binding.num_charged_tokens -= paid
        pool.charges.charge(tenant, owed - paid)

    def _charge_late(self, sequence: Sequence, count: int, pool: ModelPool, out: list[Effect]) -> None:
        """Output of a choice that had ended when it was computed: nobody gets it, its tenant pays."""
        tenant = sequence.request.tenant
        out.append(ChargeTenant(sequence.request_id, tenant, 0, count))
        pool.charges.charge(tenant, count)

    def _charge(self, pool: ModelPool, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            request = self._lifecycle.requests[delta.request_id]
            pool.charges.charge(request.tenant, len(delta.token_ids))

    def _first_token(self, worker: WorkerState, sequence: Sequence, step: int, now: float) -> None:
        if sequence.status is SequenceStatus.RUNNING:
            worker.start_decoding(sequence, step)
        if sequence.status is not SequenceStatus.FINISHED:
            self._lifecycle.first_token(sequence, now)

    def _fill_block(self, worker: WorkerState, sequence: Sequence) -> None:
        """A block is full: give it its key, and have it published."""
        if not self._config.prefix_caching or not sequence.request.spec.root_key:
            return
        known = len(sequence.keys)
        sequence.extend_keys(worker.block_size)
        if sequence.status is SequenceStatus.RUNNING:
            for index in range(known, len(sequence.keys)):
                worker.pipeline.pending_seals.append((sequence.binding.handle, index, sequence.keys[index]))

    def _finished(self, worker: WorkerState, report: Report, now: float, out: list[Effect]) -> None:
        messages = {handle: error for error in report.errors for handle in error.handles}
        for entry in report.finished:
            sequence = worker.sequences.get(entry.handle)
            if sequence is None:
                continue
            if self._holds_finished:
                # The row is computed until its batch is done; the client has its end now.
                worker.stop(sequence)
                sequence.binding.worker_id = None
            else:
                worker.live.gone(entry.handle, sequence.num_tokens)
                worker.forget(sequence)
            if sequence.status is SequenceStatus.FINISHED:
                continue
            error = None
            if entry.reason is FinishReason.ERROR:
                cause = messages.get(entry.handle)
                detail = f"{cause.kind}: {cause.message}" if cause is not None else "the step failed"
                error = CoreError(Reason.STEP_FAILED, detail)
                if cause is not None and cause.kind == GRAMMAR_ERROR:
                    error = CoreError(Reason.INVALID_GRAMMAR, f"sampling.structured: {cause.message}")
            self._lifecycle.end_choice(
                sequence, entry.reason, now, out, stop_token_id=entry.stop_token_id, error=error
            )

    def _released(self, worker: WorkerState, flight: InFlight, report: Report) -> None:
        for handle in report.released:
            sequence = worker.sequences.get(handle)
            if sequence is None:
                continue
            if sequence.status is SequenceStatus.RUNNING:
                raise ProtocolViolationError(f"handle {handle} was released without being asked")
            worker.live.gone(handle, sequence.num_tokens)
            worker.forget(sequence)
            self._lifecycle.settled(sequence)
        owed = [handle for handle in flight.plan.release if handle in worker.sequences]
        owed.extend(handle for handle, step in worker.cancelled.items() if report.step >= step)
        if owed:
            raise ProtocolViolationError(f"handles {owed} were not released as asked")

    def _stalled(self, worker: WorkerState, report: Report, now: float) -> None:
        for handle, _ in report.stalled:
            sequence = worker.decoding.get(handle)
            if sequence is not None:
                worker.decode_stalled(sequence)
        computed = report.token_handles or report.prefilled
        if not computed and any(reason in _OTHERS_AT_WORK for _, reason in report.stalled):
            worker.backoff.rest(now)

    def _undo(self, worker: WorkerState, flight: InFlight, status: StepStatus) -> None:
        """A step that failed or was skipped has decoded nothing; a skipped one has admitted nothing."""
        skipped = set(flight.plan.skip)
        for handle, sequence in worker.decoding.items():
            if handle not in skipped:
                worker.blocks.delay_growth(sequence)
        if status is StepStatus.SKIPPED:
            worker.pipeline.pending_seals[:0] = flight.plan.seal
            for sequence in flight.admitted:
                if worker.sequences.get(sequence.binding.handle) is not sequence:
                    continue
                worker.forget(sequence)
                if sequence.status is SequenceStatus.RUNNING:
                    self._lifecycle.unstart(sequence)
                    self._lifecycle.requeue(sequence)
                else:
                    self._lifecycle.settled(sequence)

    def _outcome(
        self,
        worker: WorkerState,
        pool: ModelPool,
        flight: InFlight,
        report: Report,
        now: float,
        out: list[Effect],
    ) -> None:
        """Learn from the step, or search for what made it fail."""
        timing = report.timing
        if report.status is StepStatus.OK:
            bisection.step_passed(worker)
            if report.errors:
                out.append(_step_error(worker, report))
            if timing.num_decodes or timing.num_prefill_tokens:
                seconds = (timing.execute_us + timing.overhead_us + timing.copy_us) * 1e-6
                pool.observe(worker, timing, seconds, flight.prefill_pairs)
                worker.pipeline.adapt_lead(timing.bubble_us)
                worker.pace.took(seconds)
                self._adapt_prefill_cap(worker, seconds, timing.num_prefill_tokens)
        elif report.status is StepStatus.FAILED:
            out.append(_step_error(worker, report))
            detail = "; ".join(f"{error.kind}: {error.message}" for error in report.errors)
            for culprit in bisection.step_failed(worker, flight, report.errors):
                error = CoreError(Reason.STEP_FAILED, f"its step fails: {detail}")
                self._lifecycle.end_choice(culprit, FinishReason.ERROR, now, out, error=error)

    def _adapt_prefill_cap(self, worker: WorkerState, seconds: float, prefill_tokens: int) -> None:
        """Latency-critical mode: feedback on the prefill cap from steps that had prefill in them."""
        target = self._config.target_itl_s
        if target is None or not prefill_tokens:
            return
        factor = _SLOW_DOWN if seconds > target else _SPEED_UP
        worker.pace.prefill_cap_factor = min(1.0, max(0.1, worker.pace.prefill_cap_factor * factor))

    def _keys(self, worker: WorkerState, pool: ModelPool, report: Report) -> None:
        events = report.key_events
        index, worker_id = pool.prefixes, worker.worker_id
        if events.evicted:
            index.discard(worker_id, events.evicted)
        if events.promoted:
            index.add(worker_id, events.promoted)
        if events.stored:
            index.add(worker_id, events.stored)
            _hold_prompts(worker, report)

    def _audit(self, worker: WorkerState, report: Report) -> None:
        """Compare the books."""
        pool, total = report.pool, worker.info.geometry.num_blocks
        if pool.free + pool.evictable + pool.active != total:
            raise ProtocolViolationError(
                f"blocks: free {pool.free} + evictable {pool.evictable} + active {pool.active} != {total}"
            )
        if (worker.live.count, worker.live.digest) != (report.live_count, report.digest):
            raise ProtocolViolationError(
                f"books differ after step {report.step}: worker has {report.live_count} sequences, digest "
                f"{report.digest}; scheduler {worker.live.count}, digest {worker.live.digest}"
            )


def _runs_of(report: Report) -> Iterable[tuple[int, ...]]:
    """Return the new tokens of each sequence in turn; nearly always one each."""
    if not report.token_counts:
        return zip(report.token_ids, strict=True)
    ids = iter(report.token_ids)
    return (tuple(islice(ids, count)) for count in report.token_counts)


def _hold_prompts(worker: WorkerState, report: Report) -> None:
    """What a leader has published of its prompt is in use while it runs: its siblings will share it."""
    computed = [worker.sequences[handle] for handle, _ in report.prefilled if handle in worker.sequences]
    for sequence in computed:
        if len(sequence.request.sequences) == 1:
            continue
        stored = frozenset(report.key_events.stored)
        start = end = sequence.binding.num_hit_blocks
        while end < len(sequence.keys) and sequence.keys[end] in stored:
            end += 1
        # Where another computed the same block in the same step, it is open whose was published.
        first = sequence.keys[start : start + 1]
        if sum(first == other.keys[start : start + 1] for other in computed) == 1:
            worker.blocks.hold_keys(sequence, end)


def _step_error(worker: WorkerState, report: Report) -> LogEvent:
    return LogEvent(
        "step_error",
        {
            "worker_id": worker.worker_id,
            "step": report.step,
            "status": report.status.name,
            "errors": [f"{error.kind}: {error.message}" for error in report.errors],
        },
    )
