"""Workloads on which the scheduler's core is measured, all in simulation."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from octavo.protocol.keys import chain
from octavo.protocol.steps import KEY_BYTES, Priority
from octavo.steptimes import StepTimes

from octavo_lab.sim import Recorder, SimCell, SimWorkerConfig, poisson, request_of
from octavo_lab.sim.cell import SimObserver
from octavo_lab.traces import TraceRequest
from scheduler_svc.core import CoreConfig, Effect, NewRequest, Reject, SchedulerCore, SendPlan

TIMES = StepTimes.builtin()
ROOT = bytes(KEY_BYTES)
UNBOUNDED = 10**6
"""Length of a queue that takes everything."""
Range = tuple[int, int]


class TimedCore(SchedulerCore):
    """A core that notes how long its calls take: seconds of wall time, by the name of the call."""

    def __init__(self, config: CoreConfig) -> None:
        super().__init__(config)
        self.took_s: dict[str, list[float]] = {"report": [], "tick": [], "submit": []}
        for name, times in self.took_s.items():
            setattr(self, name, partial(_timed, times, getattr(self, name)))

    def forget(self) -> None:
        """Begin to measure anew."""
        for times in self.took_s.values():
            times.clear()

    def step_us(self) -> float:
        """Return the median cost of one step, from its report to the next plan, in microseconds."""
        report_s, tick_s = self.took_s["report"], self.took_s["tick"]
        ticks = len(tick_s) / len(report_s)
        return 1e6 * (statistics.median(report_s) + ticks * statistics.median(tick_s or [0.0]))


def _timed(times: list[float], call: Callable[..., list[Effect]], *args: object) -> list[Effect]:
    began = time.perf_counter()
    effects = call(*args)
    times.append(time.perf_counter() - began)
    return effects


def cell_of(core: SchedulerCore, num_workers: int, *observers: SimObserver, **config: Any) -> SimCell:
    """Return a cell of workers that are all alike; `config` is of SimWorkerConfig."""
    workers = [SimWorkerConfig(worker_id=f"w{i}", step_times=TIMES, **config) for i in range(num_workers)]
    return SimCell(core, workers, observers=observers)


def traffic(
    rng: random.Random, rate_per_s: float, seconds: float, prompt_tokens: Range, output_tokens: Range
) -> Iterator[TraceRequest]:
    """Yield Poisson arrivals for so long, with lengths drawn evenly from ranges."""
    for at in itertools.takewhile(lambda at: at < seconds, poisson(rate_per_s, rng)):
        prompt, output = (a if a == b else rng.randint(a, b) for a, b in (prompt_tokens, output_tokens))
        yield TraceRequest(at, prompt, output)


def steady_decode(num_workers: int, num_seqs: int, steps: int) -> TimedCore:
    """Run so many steps of workers that all decode so many sequences, with keys and prefix caching."""
    core = TimedCore(CoreConfig(max_waiting_requests=UNBOUNDED))
    room = {"num_blocks": 80 * num_seqs, "max_num_seqs": num_seqs, "max_num_batched_tokens": 8192}
    cell = cell_of(core, num_workers, **room)
    for index in range(num_workers * num_seqs):
        request = request_of(TraceRequest(0.0, 64 + index % 16, 1000), f"request-{index}", seed=index)
        cell.submit_at(0.001, replace(request, root_key=ROOT))
    hosts = cell.hosts.values()
    cell.loop.run(stop=lambda: all(host.num_steps >= 24 for host in hosts))
    core.forget()
    cell.loop.run(stop=lambda: len(core.took_s["report"]) >= steps)
    return core


def admit_us(num_workers: int, num_requests: int) -> float:
    """Return the median cost of submitting a request to a fleet of which half is busy and half is idle."""
    core = TimedCore(CoreConfig(max_waiting_requests=UNBOUNDED))
    cell = cell_of(core, num_workers)
    for index in range(num_workers // 2):
        cell.submit_at(0.001, request_of(TraceRequest(0.0, 64, 4000), f"busy-{index}", seed=index))
    cell.loop.run(until=1.0)
    core.forget()
    rng = random.Random(7)
    opening = [rng.randrange(1000) for _ in range(256)]
    for index in range(num_requests):
        tokens = [*opening, *(rng.randrange(1000) for _ in range(256))]
        request = request_of(TraceRequest(0.0, len(tokens), 8), f"new-{index}", seed=UNBOUNDED + index)
        keyed: dict[str, Any] = {"prompt_keys": tuple(chain(ROOT, tokens, 16)), "root_key": ROOT}
        cell.submit_at(1.0 + index * 0.002, replace(request, prompt_token_ids=tokens, **keyed))
    cell.loop.run(until=1.0 + num_requests * 0.002)
    return 1e6 * statistics.median(core.took_s["submit"])


class WaitWatch:
    """Notes who starts when, to judge how often higher classes pass requests; seeds tell who is who."""

    def __init__(self, config: CoreConfig) -> None:
        self._config = config
        self._due_at: dict[int, float] = {}
        """When they come of age."""
        self._passed: set[int] = set()
        """Those of lower classes, which others may pass."""
        self._left_at: dict[int, float] = {}
        """When they began to run or were refused."""
        self._starts: list[tuple[float, int]] = []

    def submitted(self, spec: NewRequest, now: float) -> None:
        """A request has been sent."""
        seed = spec.sampling.seed or 0
        self._due_at[seed] = now + self._config.aging_s[spec.priority]
        if spec.priority is not Priority.INTERACTIVE:
            self._passed.add(seed)

    def effects(self, effects: list[Effect], now: float) -> None:
        """Note starts and refusals."""
        for effect in effects:
            if isinstance(effect, Reject):
                self._left_at.setdefault(int(effect.request_id), now)
            elif isinstance(effect, SendPlan):
                for admit in effect.plan.admit:
                    self._left_at.setdefault(admit.sampling.seed or 0, now)
                    self._starts.append((now, admit.sampling.seed or 0))

    def over_bound(self) -> list[float]:
        """Return, of each that came of age and then started, the starts since then over what is promised.

        Docs/scheduler.md promises at most `stride * (1 + those due before it)`.
        """
        found = []
        for number, (now, seed) in enumerate(self._starts, start=1):
            due_at = self._due_at[seed]
            if seed in self._passed and due_at <= now:
                self._passed.remove(seed)
                since = bisect_left(self._starts, (due_at, 0))
                ahead = sum(
                    at <= due_at and self._left_at.get(other, due_at) >= due_at
                    for other, at in self._due_at.items()
                )
                found.append((number - since) / (self._config.aging_stride * ahead))
        return found


def waits_over_bound(seconds: float) -> list[float]:
    """Flood two workers with interactive requests beside a few of the other classes, and watch these."""
    watch = WaitWatch(config := CoreConfig(max_waiting_requests=60))
    cell = cell_of(SchedulerCore(config), 2, watch, max_num_seqs=8)
    rng, seeds = random.Random(3), itertools.count(1)
    for priority, rate in ((Priority.INTERACTIVE, 60.0), (Priority.STANDARD, 0.4), (Priority.BATCH, 0.2)):
        for arrival in traffic(rng, rate, seconds, (20, 200), (5, 60)):
            request = request_of(arrival, str(seed := next(seeds)), seed)
            paced = priority is not Priority.INTERACTIVE
            cell.submit_at(arrival.at, replace(request, priority=priority, paced=paced))
    cell.loop.run(until=seconds)
    return watch.over_bound()


def gaps_under_prompts(target_itl_s: float | None, seconds: float) -> list[float]:
    """Return the times between tokens of 16 long answers while prompts keep arriving."""
    recorder, core = Recorder(gaps=True), SchedulerCore(CoreConfig(target_itl_s=target_itl_s))
    cell = cell_of(core, 1, recorder, max_num_batched_tokens=2048)
    for index in range(16):
        cell.submit_at(0.0, request_of(TraceRequest(0.0, 64, 4000), f"long-{index}", seed=index))
    for index, arrival in enumerate(traffic(random.Random(5), 0.5, seconds, (100, 2000), (8, 8))):
        cell.submit_at(2.0 + arrival.at, request_of(arrival, f"prompt-{index}", seed=100 + index))
    cell.loop.run(until=2.0)
    recorder.token_gaps_s.clear()
    cell.loop.run(until=2.0 + seconds)
    return recorder.token_gaps_s


def beside_long_prompts(
    short: Priority, long: Priority | None, seconds: float, load: float = 0.25
) -> tuple[float, float, float]:
    """Return the P99 TTFT of prompts under 200 tokens and of those of 8,000, and the tokens per second.

    One worker of the demo model; half of the prompt tokens are of long ones, if they have a class.
    """
    recorder, core = Recorder(), SchedulerCore(CoreConfig(max_waiting_requests=UNBOUNDED))
    cell = cell_of(core, 1, recorder, num_blocks=8192)
    half = load * 1500.0
    kinds: list[tuple[Priority, float, int, Range]] = [(short, half / 220, 1, (50, 200))]
    if long is not None:
        kinds.append((long, half / 8000, 10**6, (8000, 8000)))
    for priority, rate, first, prompt_tokens in kinds:
        arrivals = traffic(random.Random(first), rate, seconds, prompt_tokens, (32, 32))
        for index, arrival in enumerate(arrivals, start=first):
            request = replace(request_of(arrival, f"r{index}", index), priority=priority)
            cell.submit_at(1.0 + arrival.at, request)
    cell.loop.run(until=seconds)
    done = [one for one in recorder.results.values() if one.ttft_s is not None]
    seen = [one for one in done if one.arrival > seconds / 10]
    p99s = [
        float(
            np.quantile([one.ttft_s for one in seen if (one.prompt_tokens > 200) is is_long] or [0.0], 0.99)
        )
        for is_long in (False, True)
    ]
    return p99s[0], p99s[1], sum(one.prompt_tokens + one.output_tokens for one in done) / seconds


def policy_cell(policy: str, num_workers: int = 2) -> tuple[SimCell, Recorder]:
    """Return workers of 16 sequences under a policy, with a queue that takes everything."""
    recorder, core = Recorder(), SchedulerCore(CoreConfig(policy=policy, max_waiting_requests=UNBOUNDED))
    return cell_of(core, num_workers, recorder, max_num_seqs=16), recorder


def tenant_ttft_s(policy: str, num_workers: int, *, flood: bool, seconds: float) -> list[float]:
    """Return the times to first token of a tenant's modest traffic, while another floods or not."""
    (cell, recorder), seeds = policy_cell(policy, num_workers), itertools.count(1)
    for index, (tenant, rate) in enumerate((("modest", 8.0), ("flood", 60.0))[: 1 + flood], start=1):
        for arrival in traffic(random.Random(index), rate, seconds, (50, 250), (20, 60)):
            request = request_of(arrival, f"r{(seed := next(seeds))}", seed)
            cell.submit_at(arrival.at, replace(request, tenant=tenant))
    cell.loop.run(until=seconds)
    return [
        result.ttft_s
        for result in recorder.results.values()
        if result.tenant == "modest" and result.ttft_s is not None and result.arrival > seconds / 10
    ]


def _mixed(number: int, at: float, rng: random.Random) -> NewRequest:
    """Return a request of middling size."""
    return request_of(TraceRequest(at, rng.randint(50, 400), rng.randint(10, 100)), f"r{number}", number)


def capacity_per_s(seconds: float) -> float:
    """Return the mixed requests that two workers finish per second when there are always more."""
    (cell, recorder), rng = policy_cell("fcfs"), random.Random(9)
    for number in range(int(30 * seconds)):
        cell.submit_at(0.0, _mixed(number, 0.0, rng))
    cell.loop.run(until=seconds)
    return len(recorder.completed) / seconds


def deadlines_met(policy: str, rate_per_s: float, seconds: float) -> float:
    """Return the share of mixed requests that end before their deadline on two workers."""
    (cell, recorder), rng = policy_cell(policy), random.Random(9)
    for number, at in enumerate(itertools.takewhile(lambda at: at < seconds, poisson(rate_per_s, rng))):
        deadline = at + rng.choice([6.0, 12.0, 30.0]) * rng.uniform(0.8, 1.2)
        cell.submit_at(at, replace(_mixed(number, at, rng), deadline=deadline))
    cell.loop.run()
    return len(recorder.completed) / len(recorder.results)
