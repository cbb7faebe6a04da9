"""Trials on real processes: one worker, and a scheduler that is started anew for each setting."""

from __future__ import annotations

import argparse
import asyncio
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Self

from octavo import AsyncClient
from octavo.stack import Stack, StackConfig, StackError

from octavo_lab.command import BenchError
from octavo_lab.datasets.load import DatasetConfig, load
from octavo_lab.datasets.tokenizers import ServiceTokenizer
from octavo_lab.load.arrivals import Poisson
from octavo_lab.load.generator import RunLimits, Traffic, generate
from octavo_lab.load.records import Answer, Outcome, RunRecord, TargetRecord
from octavo_lab.load.target import LoadTarget, PlannedRequest, Sink
from octavo_lab.load.targets.octavo import OctavoTarget
from octavo_lab.tune.search import Settings, Trial
from octavo_lab.tune.target import LatencyTarget, trial_of

_WARM_UP_REQUESTS = 8
_READY_S = 1800.0
_PATIENCE_S = 900.0


@dataclass(slots=True)
class ServedTrials(AbstractContextManager["ServedTrials"]):
    """Runs trials on a stack of its own, in a `with` statement."""

    arguments: argparse.Namespace
    """Of the command."""
    target: LatencyTarget
    requests: int
    """Of each trial."""
    _planned: list[PlannedRequest] = field(default_factory=list)
    """The same in every trial."""
    _dataset: str = ""
    _stack: Stack | None = None
    _current: Settings | None = None
    # One loop for all trials: gRPC hands late events to the loop of a call, which must still be open.
    _runner: asyncio.Runner = field(default_factory=asyncio.Runner)
    _runs: int = 0

    def __exit__(self, *error: object) -> None:
        if self._stack is not None:
            self._stack.stop()
        self._runner.close()

    def __call__(self, settings: Settings, rate_per_s: float) -> Trial:
        """Run one trial."""
        endpoint = self._endpoint(settings)
        return self._runner.run(self._trial(endpoint, settings, rate_per_s))

    def measure_rate(self, settings: Settings, requests: int) -> float:
        """Return the requests per second that a setting serves when they all come at once: a first guess."""
        endpoint = self._endpoint(settings)
        run = self._runner.run(self._offer(endpoint, requests, 1000.0 * requests))
        done = sum(one.outcome is Outcome.OK for one in run.requests)
        if not done:
            reasons = sorted({one.reason or one.outcome.value for one in run.requests})
            raise BenchError(f"none of {requests} requests was answered: {', '.join(reasons)}")
        return done / run.ended_s

    def _endpoint(self, settings: Settings) -> str:
        """Return the address of a scheduler with these settings, ready.

        Raises:
            BenchError: it does not start.
        """
        if self._stack is None or self._current != settings:
            try:
                self._stack = self._started(settings)
                self._stack.wait_ready(_READY_S)
            except StackError as error:
                raise BenchError(str(error)) from None
            self._current = settings
            self._runner.run(self._prepare(self._stack.endpoint))
        return self._stack.endpoint

    def _started(self, settings: Settings) -> Stack:
        """Start a stack, or only its scheduler where the worker may stay."""
        stack, current, asked = self._stack, self._current, self.arguments
        # A scheduler lowers the limits of a worker. Whether a latency is kept is ours to judge.
        lowered = [*replace(settings, gpu_memory_utilization=None).flags, "--no-overload-control"]
        memory = settings.gpu_memory_utilization
        if stack and current and current.gpu_memory_utilization == memory:
            stack.restart_scheduler(lowered)
            return stack
        if stack is not None:
            stack.stop()
        largest = Settings(max(asked.max_num_seqs), max(asked.max_num_batched_tokens), memory)
        worker_args = [*largest.flags, *asked.worker_arg]
        self._stack = Stack(StackConfig(model=asked.model, scheduler_args=lowered, worker_args=worker_args))
        self._stack.start()
        return self._stack

    async def _prepare(self, endpoint: str) -> None:
        """Make the requests, once, with the tokenizer of the service; warm it up."""
        asked = self.arguments
        if not self._planned:
            async with AsyncClient(endpoint) as client:
                model = (await client.models())[0]
                config = DatasetConfig(
                    source=asked.dataset,
                    context=min(asked.context or model.max_model_len, model.max_model_len),
                    scale=asked.scale,
                    traces=asked.traces,
                    seed=asked.seed,
                )
                dataset = await load(config, ServiceTokenizer(client, model.id))
            self._dataset = dataset.description
            self._planned = dataset.requests(max(self.requests, _WARM_UP_REQUESTS))
        await self._offer(endpoint, _WARM_UP_REQUESTS, 100.0)

    async def _offer(self, endpoint: str, count: int, rate_per_s: float) -> RunRecord:
        async with OctavoTarget(endpoint) as target:
            return await generate(target, self._traffic(count, rate_per_s), RunLimits(drain_s=600.0))

    def _traffic(self, count: int, rate_per_s: float) -> Traffic:
        # What an earlier trial has left in the prefix cache is of no use to this one.
        self._runs += 1
        terms = {"cache_salt": f"tune-{self._runs}", "queue_timeout": _PATIENCE_S}
        salted = [replace(one, options={**one.options, **terms}) for one in self._planned[:count]]
        seed = self.arguments.seed
        return Traffic(requests=salted, arrivals=Poisson(rate_per_s), seed=seed, dataset=self._dataset)

    async def _trial(self, endpoint: str, settings: Settings, rate_per_s: float) -> Trial:
        target, stop = self.target, asyncio.Event()
        async with OctavoTarget(endpoint) as octavo:
            judge = Judge(octavo, target, target.allowed_misses(self.requests), stop)
            traffic = self._traffic(self.requests, rate_per_s)
            # By then, whatever has not been answered has missed a bound, if there is one.
            run = await generate(judge, traffic, RunLimits(drain_s=120.0), stop=stop)
        return trial_of(settings, rate_per_s, target, run.requests, stopped=stop.is_set())


@dataclass(slots=True)
class Judge:
    """Counts the requests that miss the latency target, and asks to stop when it is out of reach."""

    target: LoadTarget
    bounds: LatencyTarget
    allowed: int
    """Misses."""
    stop: asyncio.Event
    misses: int = 0

    @property
    def record(self) -> TargetRecord:
        """What is driven."""
        return self.target.record

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        """The target is its owner's to leave."""

    async def ask(self, request: PlannedRequest, sink: Sink) -> Answer:
        """Send a request; see `LoadTarget`. A first token that is late is a miss from that moment on."""
        loop, bounds, late = asyncio.get_running_loop(), self.bounds, False
        noted, began = _Noted(sink, loop), loop.time()

        def look() -> None:
            nonlocal late
            if not noted.times:
                late = True
                self._miss()

        timer = None if bounds.ttft_s is None else loop.call_later(bounds.ttft_s, look)
        try:
            answer = await self.target.ask(request, noted)
        finally:
            if timer is not None:
                timer.cancel()
        if not late:
            times, tokens = noted.times, answer.output_tokens or 0
            ttft_s = times[0] - began if times else None
            tpot_s = (times[-1] - times[0]) / (tokens - 1) if times and tokens > 1 else None
            if answer.outcome is not Outcome.OK or bounds.missed(ttft_s, tpot_s):
                self._miss()
        return answer

    def _miss(self) -> None:
        self.misses += 1
        if self.misses > self.allowed:
            self.stop.set()


@dataclass(slots=True)
class _Noted:
    """Notes when output came, on its way to the sink."""

    sink: Sink
    loop: asyncio.AbstractEventLoop
    times: list[float] = field(default_factory=list)

    def chunk(self) -> None:
        """A message with output has come, now."""
        self.sink.chunk()
        self.times.append(self.loop.time())
