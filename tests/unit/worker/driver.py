"""A small scheduler for tests of the engine: it plans what it is told to and audits every report."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from octavo.protocol.keys import chain, root_key
from octavo.protocol.steps import (
    Admit,
    Finished,
    FinishReason,
    Plan,
    Priority,
    Report,
    StallReason,
    StepStatus,
    digest_of,
)
from octavo.sampling import SamplingParams

from tests.unit.worker.shadow_runner import EOS, ShadowRunner, reference
from worker_svc.engine.engine import EngineConfig, WorkerEngine
from worker_svc.engine.faults import Faults

ALL = 1 << 30


@dataclass(eq=False)
class Request:
    """What a client wants, and how far it is."""

    prompt: list[int]
    sampling: SamplingParams
    priority: Priority = Priority.STANDARD
    output: list[int] = field(default_factory=list)
    handle: int | None = None
    """On the worker, as far as reports tell."""
    num_sealed: int = 0
    num_left: int = 0
    """Tokens to prefill."""
    finished: Finished | None = None

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


class Driver:
    def __init__(
        self,
        *,
        block_size: int = 4,
        num_blocks: int = 64,
        max_num_seqs: int = 8,
        max_model_len: int = 64,
        num_host_blocks: int = 0,
        paged: bool = True,
        pin_budget_blocks: int = 0,
        promote_blocks_per_step: int = 64,
        faults: Faults | None = None,
    ) -> None:
        self.config = EngineConfig(
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            eos_token_ids=(EOS,),
            num_host_blocks=num_host_blocks,
            paged=paged,
            pin_budget_blocks=pin_budget_blocks,
            promote_blocks_per_step=promote_blocks_per_step,
            check_integrity=True,
        )
        self.runner = ShadowRunner(block_size)
        self.engine = WorkerEngine(self.runner, self.config, faults)
        self.on_worker: dict[int, Request] = {}
        """Admitted by the reports read so far."""
        self.awaited: dict[int, Request] = {}
        """In a plan, not answered yet."""
        self.device_keys: set[bytes] = set()
        self.host_keys: set[bytes] = set()
        self.failed_step: int | None = None
        self.cancelled: set[int] = set()
        self.met: set[str] = set()
        """Kinds of things that reports have told."""
        self._held: set[int] = set()
        self._handles = itertools.count(1)
        self._next_step = 1
        self._lengths: dict[int, int] = {}
        self._released: dict[int, set[int]] = {}

    # -- plans

    def admit(
        self, *requests: Request, reserve: int | None = None, hold: bool = False, salt: bytes = b""
    ) -> tuple[Admit, ...]:
        """Return admissions of these requests, with handles of their own."""
        admits = []
        for request in requests:
            handle = next(self._handles)
            self.awaited[handle] = request
            if hold:
                self._held.add(handle)
            tokens = request.tokens
            admits.append(
                Admit(
                    handle=handle,
                    token_ids=tokens,
                    prompt_len=len(request.prompt),
                    sampling=request.sampling,
                    keys=tuple(self.keys(tokens, salt)),
                    reserve_tokens=reserve,
                    hold_after_finish=hold,
                    priority=request.priority,
                )
            )
        return tuple(admits)

    def keys(self, tokens: list[int], salt: bytes = b"") -> list[bytes]:
        root = root_key("revision", "", "shadow", self.config.block_size, salt)
        return chain(root, tokens, self.config.block_size)

    def seals(self) -> tuple[tuple[int, int, bytes], ...]:
        """Return the seals of all blocks that the tokens known by now fill."""
        seals = []
        for handle, request in self.on_worker.items():
            keys = self.keys(request.tokens)
            for index in range(request.num_sealed, len(keys)):
                seals.append((handle, index, keys[index]))
            request.num_sealed = len(keys)
        return tuple(seals)

    def plan(
        self,
        admit: Iterable[Admit] = (),
        prefill: Iterable[tuple[int, int]] | None = None,
        *,
        skip: Iterable[int] = (),
        release: Iterable[int] = (),
        seal: Iterable[tuple[int, int, bytes]] | None = None,
        resume_after: int | None = None,
    ) -> Plan:
        """Return the next plan; unless told otherwise it prefills all there is."""
        admit = tuple(admit)
        if prefill is None:
            handles = [handle for handle, request in self.on_worker.items() if request.num_left]
            prefill = [(handle, ALL) for handle in (*handles, *(entry.handle for entry in admit))]
        plan = Plan(
            step=self._next_step,
            admit=admit,
            prefill=tuple(prefill),
            skip=tuple(skip),
            seal=self.seals() if seal is None else tuple(seal),
            release=tuple(release),
            resume_after=resume_after,
        )
        self._next_step += 1
        self._released[plan.step] = set(plan.release)
        return plan

    def cancel(self, *handles: int) -> None:
        self.cancelled.update(handles)
        self.engine.cancel(handles)

    # -- reports

    def step(self, *requests: Request, **how: object) -> Report:
        """Admit requests and run one step."""
        return self.run(self.plan(self.admit(*requests), **how))  # type: ignore[arg-type]

    def run(self, plan: Plan) -> Report:
        """Run a plan and read its report."""
        report = self.engine.run_step(plan, lambda: self.runner.now)
        assert not self.runner.violations, self.runner.violations
        self.read(plan, report)
        return report

    def read(self, plan: Plan, report: Report) -> None:
        """Apply a report to the books and check that it is consistent with all before it."""
        assert report.step == plan.step
        admitted = {entry.handle for entry in report.admitted}
        refused = {entry.handle for entry in report.refused}
        planned = [entry.handle for entry in plan.admit]
        assert admitted.isdisjoint(refused)
        if report.status is StepStatus.SKIPPED:
            assert (admitted, refused, *advances(report)) == (set(), set(), (), (), ())
        else:
            assert sorted((*admitted, *refused)) == planned, "each admission is answered once"
        if report.status is StepStatus.OK:
            self._check_decodes(plan, report)
        for entry in report.admitted:
            request = self.on_worker[entry.handle] = self.awaited[entry.handle]
            cached = entry.cached_tokens + entry.host_cached_tokens
            request.handle, request.num_left = entry.handle, len(request.tokens) - cached
            request.num_sealed = len(self.keys(request.tokens))
            self._lengths[entry.handle] = len(request.tokens)
        for handle in planned:
            del self.awaited[handle]
        for handle, num_tokens in report.prefilled:
            self.on_worker[handle].num_left -= num_tokens
        self._read_tokens(report)
        self._read_ends(plan, report)
        self._read_keys(report)
        assert self.cancelled.isdisjoint(self.on_worker), "cancels apply at the next step boundary"
        assert report.live_count == len(self._lengths)
        assert report.digest == digest_of(self._lengths)
        self._note_cases(report)
        pool = report.pool
        assert pool.free + pool.evictable + pool.active == self.config.num_blocks
        if report.status is StepStatus.FAILED:
            self.failed_step = report.step
            assert advances(report) == ((), (), ())
            assert report.key_events.stored == ()
            assert report.errors

    def _note_cases(self, report: Report) -> None:
        self.met.add(report.status.name)
        self.met.update(reason.name for _, reason in report.stalled)
        self.met.update(entry.reason.name for entry in report.refused)
        self.met.update(entry.reason.name for entry in report.finished)
        self.met.update("hit" for entry in report.admitted if entry.cached_tokens)
        self.met.update("host hit" for entry in report.admitted if entry.host_cached_tokens)
        self.met.update("released" for _ in report.released)

    def _check_decodes(self, plan: Plan, report: Report) -> None:
        """A step without a word about a sequence has decoded it."""
        decoding = {handle for handle, request in self.on_worker.items() if not request.num_left}
        failed = {end.handle for end in report.finished if end.reason is FinishReason.ERROR}
        excused = {*plan.skip, *report.released, *(handle for handle, _ in report.stalled), *self._held}
        assert decoding - excused - failed <= set(report.token_handles)

    def _read_tokens(self, report: Report) -> None:
        assert len(report.token_handles) == len(set(report.token_handles))
        for handle, position, token_id in zip(
            report.token_handles, report.first_positions, report.token_ids, strict=True
        ):
            request = self.on_worker[handle]
            assert request.num_left == 0
            assert position == len(request.tokens), "tokens come without gaps or repeats"
            request.output.append(token_id)
            self._lengths[handle] += 1

    def _read_ends(self, plan: Plan, report: Report) -> None:
        for entry in report.finished:
            request = self.on_worker[entry.handle]
            request.finished = entry
            if entry.reason is FinishReason.STOP:
                assert request.output[-1] == entry.stop_token_id
            if entry.handle not in self._held:
                self._gone(entry.handle)
        for handle in report.released:
            assert handle in self.cancelled or handle in self._released[plan.step]
            self._gone(handle)
        for handle in self._released.pop(plan.step):
            assert handle not in self.on_worker, "what a plan releases is gone with its report"

    def _gone(self, handle: int) -> None:
        request = self.on_worker.pop(handle)
        request.handle = None
        del self._lengths[handle]

    def _read_keys(self, report: Report) -> None:
        events = report.key_events
        self.device_keys -= {*events.demoted, *events.evicted}
        self.host_keys = (self.host_keys | set(events.demoted)) - {*events.evicted, *events.promoted}
        self.device_keys |= {*events.promoted, *events.stored}
        device, host = self.engine.memory.cached_keys()
        assert (self.device_keys, self.host_keys) == (set(device), set(host))

    # -- whole runs

    def reattach(self) -> None:
        """Lose the stream and attach again: the sequences are gone, the cache is not."""
        self.engine.drop_all()
        self.engine.check_integrity()
        for request in (*self.on_worker.values(), *self.awaited.values()):
            request.handle = None
        self.on_worker.clear()
        self.awaited.clear()
        self.cancelled.clear()
        self._held.clear()
        self._lengths.clear()
        self._released.clear()
        self._handles = itertools.count(1)
        self._next_step = 1
        self.failed_step = None
        device, host = self.engine.take_cached_keys()
        self.device_keys, self.host_keys = set(device), set(host)

    def let_copies_land(self) -> None:
        """Run empty steps until nothing is on its way between the tiers."""
        for _ in range(self.runner.copy_polls + 1):
            self.step()

    def expected(self, request: Request) -> list[int]:
        return reference(request.prompt, request.sampling, self.config.max_model_len)

    def finish(self, *requests: Request, steps: int = 500) -> None:
        """Run until these requests have finished, one admission a step, preempting when nothing moves."""
        for _ in range(steps):
            waiting = [r for r in requests if r.finished is None and r.handle is None]
            if not waiting and all(r.finished is not None for r in requests):
                return
            report = self.step(*waiting[:1], resume_after=self.failed_step)
            stuck = any(reason is StallReason.NO_BLOCK for _, reason in report.stalled)
            if stuck and not report.token_ids and not report.prefilled and self.on_worker:
                self.run(self.plan(release=[max(self.on_worker)], resume_after=self.failed_step))
        raise AssertionError(f"not finished after {steps} steps")


def advances(report: Report) -> tuple[tuple[object, ...], ...]:
    return tuple(report.token_ids), report.finished, report.prefilled


def request(
    prompt: Iterable[int],
    max_tokens: int = 8,
    *,
    seed: int = 0,
    priority: Priority = Priority.STANDARD,
    **more: object,
) -> Request:
    """Return a request that goes on to max_tokens unless told otherwise."""
    more.setdefault("ignore_eos", True)
    sampling = SamplingParams(max_tokens=max_tokens, seed=seed, **more)  # type: ignore[arg-type]
    return Request(list(prompt), sampling, priority)
