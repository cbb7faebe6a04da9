"""A core and simulated workers in lockstep: each test decides which plan is answered when."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from octavo.protocol.keys import chain
from octavo.protocol.steps import KEY_BYTES, Plan, Priority, Report
from octavo.sampling import SamplingParams
from octavo.steptimes import StepTimes
from octavo_lab.sim import Monitor, SimWorker, SimWorkerConfig
from octavo_lab.sim.audit import check_core, check_nothing_sleeps

from scheduler_svc.core import (
    CoreConfig,
    DetachWorker,
    Effect,
    EmitTokens,
    FinishChoice,
    LogEvent,
    NewRequest,
    Reject,
    SchedulerCore,
    SendCancel,
    SendPlan,
)
from scheduler_svc.core.request import Sequence
from scheduler_svc.core.worker import WorkerState

BLOCK = 16
ROOT = bytes(KEY_BYTES)
TIMES = StepTimes.builtin()


def worker(worker_id: str = "w0", **limits: Any) -> SimWorkerConfig:
    """A worker of 64 blocks, 8 places and a budget of 128 tokens, unless told otherwise."""
    limits = {
        "num_blocks": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
        "max_model_len": 512,
        **limits,
    }
    return SimWorkerConfig(worker_id=worker_id, step_times=TIMES, block_size=BLOCK, **limits)


class Desk:
    """Plans pile up at each worker until the test has them answered. Books are audited all the time."""

    def __init__(self, *workers: SimWorkerConfig, **config: Any) -> None:
        self.core = SchedulerCore(CoreConfig(**config))
        self.monitor = Monitor(self.core, audit_every=1)
        self.now = 0.0
        self.workers: dict[str, SimWorker] = {}
        self.plans: dict[str, deque[Plan]] = {}
        self.reports: list[Report] = []
        self.ends: dict[tuple[str, int], FinishChoice] = {}
        self.rejects: dict[str, Reject] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.logs: list[LogEvent] = []
        self.detached: list[DetachWorker] = []
        self._count = 0
        for config_ in workers or (worker(),):
            self.attach(SimWorker(config_))

    # What happens --------------------------------------------------------------------------------

    def attach(self, machine: SimWorker, **info: Any) -> list[Effect]:
        """Bring a worker up; `info` is what it says of itself besides what it is."""
        worker_id = machine.config.worker_id
        self.workers[worker_id] = machine
        self.plans[worker_id] = deque()
        return self._perform(self.core.worker_up(replace(machine.welcome(), **info), self.now))

    def submit(self, prompt: int | Iterable[int] = 20, max_tokens: int = 8, **fields: Any) -> str:
        """Submit a request with a prompt of so many tokens that no other request shares."""
        self.submit_effects(prompt, max_tokens, **fields)
        return str(fields.get("request_id", f"r{self._count}"))

    def submit_effects(
        self, prompt: int | Iterable[int] = 20, max_tokens: int = 8, **fields: Any
    ) -> list[Effect]:
        """Submit a request; return what the core made of it."""
        self._count += 1
        n = fields.pop("n", 1)
        stop = fields.pop("stop_token_ids", ())
        tokens = [self._count * 1000 + i for i in range(prompt)] if isinstance(prompt, int) else list(prompt)
        name = fields.pop("request_id", f"r{self._count}")
        sampling = SamplingParams(n=n, seed=self._count, max_tokens=max_tokens, stop_token_ids=stop)
        spec = NewRequest(
            request_id=name,
            model="sim",
            prompt_token_ids=tokens,
            sampling=sampling,
            prompt_keys=tuple(chain(ROOT, tokens, BLOCK)),
            root_key=ROOT,
            **fields,
        )
        self.monitor.submitted(spec, self.now)
        return self._perform(self.core.submit(spec, self.now))

    def cancel(self, request_id: str) -> list[Effect]:
        return self._perform(self.core.cancel(request_id, self.now))

    def answer(self, worker_id: str = "w0", **changes: Any) -> Report:
        """Let a worker run its oldest plan and report, with changes to the report if any."""
        report = self.run(worker_id)
        report = replace(report, **changes)
        self.report(worker_id, report)
        return report

    def run(self, worker_id: str = "w0") -> Report:
        """Let a worker run its oldest plan; the report is not delivered."""
        report = self.workers[worker_id].run(self.plans[worker_id].popleft())
        self.now += report.timing.execute_us * 1e-6
        return report

    def report(self, worker_id: str, report: Report) -> list[Effect]:
        self.reports.append(report)
        effects = self._perform(self.core.report(worker_id, report, self.now))
        self.tick()
        return effects

    def tick(self, to: float | None = None) -> list[Effect]:
        """Let time pass, and do what is due until then."""
        self.now = max(self.now, to if to is not None else self.now)
        return self._perform(self.core.tick(self.now))

    def wake(self) -> None:
        """Let time pass until the core wants to be woken."""
        at = self.core.next_wakeup()
        assert at is not None, "nothing is due"
        self.tick(at)

    def lose(self, worker_id: str = "w0") -> list[Effect]:
        """Break the stream to a worker; `attach` brings it back."""
        self.plans[worker_id].clear()
        del self.workers[worker_id]
        return self._perform(self.core.worker_down(worker_id, self.now))

    def finish(self) -> None:
        """Answer everything until no request is left."""
        for _ in range(5000):
            busy = [worker_id for worker_id, plans in self.plans.items() if plans]
            if busy:
                for worker_id in busy:
                    if self.plans[worker_id]:
                        self.answer(worker_id)
            elif self.core.next_wakeup() is not None:
                self.wake()
            else:
                break
        assert not self.core._lifecycle.requests
        assert all(machine.quiet for machine in self.workers.values())
        assert not any(state.sequences for state in self.core._workers.values())

    # What there is -------------------------------------------------------------------------------

    def state(self, worker_id: str = "w0") -> WorkerState:
        return self.core._workers[worker_id]

    def sequence(self, request_id: str, choice: int = 0) -> Sequence:
        request = self.core.find(request_id)
        assert request is not None
        return request.sequences[choice]

    def where(self, request_id: str, choice: int = 0) -> str | None:
        """Return the worker that a choice is bound to."""
        return self.sequence(request_id, choice).binding.worker_id

    def admitted(self, worker_id: str = "w0") -> list[str]:
        """Return the requests that plans not answered yet admit."""
        by_seed = {
            (request.spec.sampling.seed, choice.choice): request.request_id
            for request in self.core._lifecycle.requests.values()
            for choice in request.sequences
        }
        return [
            by_seed[admit.sampling.seed, admit.choice]
            for plan in self.plans[worker_id]
            for admit in plan.admit
        ]

    def events(self, name: str) -> list[dict[str, object]]:
        return [event.fields for event in self.logs if event.name == name]

    @property
    def outcomes(self) -> dict[str, int]:
        return {str(reason): count for reason, count in self.core._lifecycle.outcomes.items()}

    def _perform(self, effects: list[Effect]) -> list[Effect]:
        self.monitor.effects(effects, self.now)
        check_core(self.core)
        check_nothing_sleeps(self.core, self.now)
        for effect in effects:
            if isinstance(effect, SendPlan):
                self.plans[effect.worker_id].append(effect.plan)
            elif isinstance(effect, SendCancel):
                self.workers[effect.worker_id].cancel(effect.handles)
            elif isinstance(effect, EmitTokens):
                for delta in effect.deltas:
                    self.tokens.setdefault((delta.request_id, delta.choice), []).extend(delta.token_ids)
            elif isinstance(effect, FinishChoice):
                self.ends[effect.request_id, effect.choice] = effect
            elif isinstance(effect, Reject):
                self.rejects[effect.request_id] = effect
            elif isinstance(effect, LogEvent):
                self.logs.append(effect)
            elif isinstance(effect, DetachWorker):
                self.detached.append(effect)
                self.plans[effect.worker_id].clear()
        return effects


HIGH, NORMAL, LOW = Priority.INTERACTIVE, Priority.STANDARD, Priority.BATCH
