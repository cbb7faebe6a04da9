"""Workloads on which the scheduler's core is measured, all in simulation."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from octavo.protocol.keys import chain
from octavo.protocol.steps import KEY_BYTES, Priority, Report

from octavo_lab.sim import (
    Arrival,
    Cell,
    Recorder,
    SimWorkerConfig,
    StepTimes,
    poisson,
    request_of,
)
from scheduler_svc.core import CoreConfig, Effect, NewRequest, Reject, SchedulerCore, SendPlan

TIMES = StepTimes.builtin()
ROOT = bytes(KEY_BYTES)


def percentile(values: Iterable[float], share: float) -> float:
    """Return the value below which a share of the values lies."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]


class TimedCore(SchedulerCore):
    """A core that notes how long its calls take, in seconds of wall time."""

    def __init__(self, config: CoreConfig) -> None:
        super().__init__(config)
        self.report_s: list[float] = []
        self.tick_s: list[float] = []
        self.submit_s: list[float] = []

    def report(self, worker_id: str, report: Report, now: float) -> list[Effect]:
        """Take a report in."""
        began = time.perf_counter()
        effects = super().report(worker_id, report, now)
        self.report_s.append(time.perf_counter() - began)
        return effects

    def tick(self, now: float) -> list[Effect]:
        """Do what is due."""
        began = time.perf_counter()
        effects = super().tick(now)
        self.tick_s.append(time.perf_counter() - began)
        return effects

    def submit(self, spec: NewRequest, now: float) -> list[Effect]:
        """Take a request in."""
        began = time.perf_counter()
        effects = super().submit(spec, now)
        self.submit_s.append(time.perf_counter() - began)
        return effects

    def forget(self) -> None:
        """Begin to measure anew."""
        self.report_s.clear()
        self.tick_s.clear()
        self.submit_s.clear()

    def step_us(self) -> float:
        """Return the median cost of one step, from its report to the next plan, in microseconds."""
        ticks = len(self.tick_s) / len(self.report_s)
        tick_s = statistics.median(self.tick_s) if self.tick_s else 0.0
        return 1e6 * (statistics.median(self.report_s) + ticks * tick_s)


def steady_decode(num_workers: int, num_seqs: int, steps: int) -> TimedCore:
    """Run so many steps of workers that all decode so many sequences, with keys and prefix caching."""
    core = TimedCore(CoreConfig(max_waiting_requests=10**6))
    workers = [
        SimWorkerConfig(
            worker_id=f"w{index}",
            step_times=TIMES,
            num_blocks=80 * num_seqs,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=8192,
        )
        for index in range(num_workers)
    ]
    cell = Cell(core, workers)
    for index in range(num_workers * num_seqs):
        request = request_of(Arrival(0.0, 64 + index % 16, 1000), f"request-{index}", seed=index)
        cell.submit_at(0.001, replace(request, root_key=ROOT))
    hosts = cell.hosts.values()
    cell.loop.run(stop=lambda: all(host.num_steps >= 24 for host in hosts))
    core.forget()
    cell.loop.run(stop=lambda: len(core.report_s) >= steps)
    return core


def admissions(num_workers: int, num_requests: int) -> TimedCore:
    """Submit requests one by one to a fleet of which half is busy and half is idle."""
    core = TimedCore(CoreConfig(max_waiting_requests=10**6))
    workers = [SimWorkerConfig(worker_id=f"w{index}", step_times=TIMES) for index in range(num_workers)]
    cell = Cell(core, workers)
    for index in range(num_workers // 2):
        cell.submit_at(0.001, request_of(Arrival(0.0, 64, 4000), f"busy-{index}", seed=index))
    cell.loop.run(until=1.0)
    core.forget()
    rng = random.Random(7)
    opening = [rng.randrange(1000) for _ in range(256)]
    for index in range(num_requests):
        tokens = [*opening, *(rng.randrange(1000) for _ in range(256))]
        request = request_of(Arrival(0.0, len(tokens), 8), f"new-{index}", seed=10**6 + index)
        keys = tuple(chain(ROOT, tokens, 16))
        request = replace(request, prompt_token_ids=tokens, prompt_keys=keys, root_key=ROOT)
        cell.submit_at(1.0 + index * 0.002, request)
    cell.loop.run(until=1.0 + num_requests * 0.002)
    return core


@dataclass(slots=True)
class WaitWatch:
    """Counts, for each request that is passed by higher classes, the starts since its turn was due.

    Docs/scheduler.md promises: at most `stride * (1 + those due before it)`.
    """

    core: SchedulerCore
    worst: float = 0.0
    judged: int = 0
    _waiting: dict[int, NewRequest] = field(default_factory=dict)
    _arrivals: dict[int, float] = field(default_factory=dict)
    _due: dict[int, tuple[int, int]] = field(default_factory=dict)
    _starts: int = 0

    def submitted(self, spec: NewRequest, now: float) -> None:
        """A request has been sent."""
        seed = spec.sampling.seed or 0
        self._waiting[seed] = spec
        self._arrivals[seed] = now

    def _due_at(self, seed: int) -> float:
        return self._arrivals[seed] + self.core.config.aging_s[self._waiting[seed].priority]

    def effects(self, effects: list[Effect], now: float) -> None:
        """Count starts, and who has come of age."""
        admits = [a for effect in effects if isinstance(effect, SendPlan) for a in effect.plan.admit]
        for effect in effects:
            if isinstance(effect, Reject):
                self._waiting.pop(int(effect.request_id), None)
        if not admits:
            return
        stride = self.core.config.aging_stride
        for seed, spec in self._waiting.items():
            at = self._due_at(seed)
            if spec.priority is not Priority.INTERACTIVE and seed not in self._due and at <= now:
                ahead = sum(self._due_at(other) <= at for other in self._waiting) - 1
                self._due[seed] = (self._starts, stride * (1 + ahead))
        for admit in admits:
            self._starts += 1
            seed = admit.sampling.seed or 0
            if self._waiting.pop(seed, None) is not None and seed in self._due:
                since, bound = self._due.pop(seed)
                self.worst = max(self.worst, (self._starts - since) / bound)
                self.judged += 1


def aging(seconds: float) -> WaitWatch:
    """Flood two workers with interactive requests beside a few of the other classes."""
    core = SchedulerCore(CoreConfig(max_waiting_requests=60))
    watch = WaitWatch(core)
    workers = [SimWorkerConfig(worker_id=f"w{i}", step_times=TIMES, max_num_seqs=8) for i in range(2)]
    cell = Cell(core, workers, observers=[watch])
    rng = random.Random(3)
    number = itertools.count(1)

    def send(times: Iterator[float], priority: Priority) -> None:
        for at in itertools.takewhile(lambda at: at < seconds, times):
            seed = next(number)
            shape = Arrival(at, rng.randint(20, 200), rng.randint(5, 60))
            paced = priority is not Priority.INTERACTIVE
            request = replace(request_of(shape, str(seed), seed), priority=priority, paced=paced)
            cell.submit_at(at, request)

    send(poisson(60.0, rng), Priority.INTERACTIVE)
    send(poisson(0.4, rng), Priority.STANDARD)
    send(poisson(0.2, rng), Priority.BATCH)
    cell.loop.run(until=seconds)
    return watch


def gaps_under_prompts(target_itl_s: float | None, seconds: float) -> list[float]:
    """Return the times between tokens of 16 long answers while prompts keep arriving."""
    core = SchedulerCore(CoreConfig(target_itl_s=target_itl_s))
    recorder = Recorder(gaps=True)
    worker = SimWorkerConfig(worker_id="w", step_times=TIMES, max_num_batched_tokens=2048)
    cell = Cell(core, [worker], observers=[recorder])
    for index in range(16):
        cell.submit_at(0.0, request_of(Arrival(0.0, 64, 4000), f"long-{index}", seed=index))
    rng = random.Random(5)
    for index, at in enumerate(itertools.takewhile(lambda at: at < seconds, poisson(0.5, rng))):
        shape = Arrival(at, rng.randint(100, 2000), 8)
        cell.submit_at(2.0 + at, request_of(shape, f"prompt-{index}", seed=100 + index))
    cell.loop.run(until=2.0)
    recorder.token_gaps_s.clear()
    cell.loop.run(until=2.0 + seconds)
    return recorder.token_gaps_s


def tenant_ttft_s(
    policy: str, num_workers: int, *, flood: bool, seconds: float, rate_per_s: float
) -> list[float]:
    """Return the times to first token of a tenant's modest traffic, while another floods or not."""
    core = SchedulerCore(CoreConfig(policy=policy, max_waiting_requests=10**6))
    recorder = Recorder()
    workers = [
        SimWorkerConfig(worker_id=f"w{i}", step_times=TIMES, max_num_seqs=16) for i in range(num_workers)
    ]
    cell = Cell(core, workers, observers=[recorder])
    number = itertools.count(1)

    def send(rate: float, tenant: str, seed: int) -> None:
        rng = random.Random(seed)
        for at in itertools.takewhile(lambda at: at < seconds, poisson(rate, rng)):
            key = next(number)
            request = request_of(Arrival(at, rng.randint(50, 250), rng.randint(20, 60)), f"r{key}", key)
            cell.submit_at(at, replace(request, tenant=tenant))

    send(rate_per_s, "modest", 1)
    if flood:
        send(60.0, "flood", 2)
    cell.loop.run(until=seconds)
    return [
        result.ttft_s
        for result in recorder.results.values()
        if result.tenant == "modest" and result.ttft_s is not None and result.arrival > seconds / 10
    ]


def mixed(rng: random.Random) -> Arrival:
    """Return a request of middling size."""
    return Arrival(0.0, rng.randint(50, 400), rng.randint(10, 100))


def two_workers(policy: str, recorder: Recorder) -> Cell:
    """Return two workers under a policy, with a queue that takes everything."""
    core = SchedulerCore(CoreConfig(policy=policy, max_waiting_requests=10**6))
    workers = [SimWorkerConfig(worker_id=f"w{i}", step_times=TIMES, max_num_seqs=16) for i in range(2)]
    return Cell(core, workers, observers=[recorder])


def capacity_per_s(seconds: float) -> float:
    """Return the mixed requests that two workers finish per second when there are always more."""
    recorder = Recorder()
    cell = two_workers("fcfs", recorder)
    rng = random.Random(9)
    for number in range(int(30 * seconds)):
        cell.submit_at(0.0, request_of(mixed(rng), f"r{number}", number))
    cell.loop.run(until=seconds)
    return len(recorder.completed) / seconds


def deadlines_met(policy: str, rate_per_s: float, seconds: float) -> float:
    """Return the share of mixed requests that end before their deadline on two workers."""
    recorder = Recorder()
    cell = two_workers(policy, recorder)
    rng = random.Random(9)
    for number, at in enumerate(itertools.takewhile(lambda at: at < seconds, poisson(rate_per_s, rng))):
        deadline = at + rng.choice([6.0, 12.0, 30.0]) * rng.uniform(0.8, 1.2)
        cell.submit_at(at, replace(request_of(mixed(rng), f"r{number}", number), deadline=deadline))
    cell.loop.run()
    return len(recorder.completed) / len(recorder.results)
