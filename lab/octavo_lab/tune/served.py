"""Trials on real processes: one worker, and a scheduler that is started anew for each setting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from octavo.stack import Stack, StackConfig, StackError

from octavo_lab.command import BenchError
from octavo_lab.load.arrivals import Poisson
from octavo_lab.load.generator import RunLimits, Traffic, generate
from octavo_lab.load.records import Answer, Outcome, RunRecord, TargetRecord
from octavo_lab.load.target import LoadTarget, PlannedRequest, Sink
from octavo_lab.load.targets.octavo import OctavoTarget
from octavo_lab.tune.asked import Asking
from octavo_lab.tune.search import Settings, Trial
from octavo_lab.tune.target import LatencyTarget, trial_of

_WARM_UP_REQUESTS = 8
_READY_S = 1800.0
_PATIENCE_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedConfig:
    """What is started."""

    model: str = "demo"
    max_num_seqs: int = 64
    """The most that is tried: the worker's own limit, which a scheduler may lower."""
    max_num_batched_tokens: int = 2048
    worker_args: tuple[str, ...] = ()
    scheduler_args: tuple[str, ...] = ()
    seed: int = 1


class ServedTrials:
    """Runs trials on a stack of its own, in a `with` statement."""

    def __init__(self, config: ServedConfig, asked: Asking, target: LatencyTarget, requests: int) -> None:
        self._config = config
        self._asked = asked
        self._target = target
        self._requests = requests
        self._stack: Stack | None = None
        self._current: Settings | None = None
        # One loop for all trials: gRPC hands late events to the loop of a call, which must still be open.
        self._runner = asyncio.Runner()
        self._runs = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stack is not None:
            self._stack.stop()
        self._runner.close()

    def endpoint(self, settings: Settings) -> str:
        """Return the address of a scheduler with these settings, ready.

        Raises:
            BenchError: it does not start.
        """
        try:
            return self._ready(settings).endpoint
        except StackError as error:
            raise BenchError(str(error)) from None

    def __call__(self, settings: Settings, rate_per_s: float) -> Trial:
        """Run one trial."""
        endpoint = self.endpoint(settings)
        return self._runner.run(self._trial(endpoint, settings, rate_per_s))

    def measure_rate(self, settings: Settings, requests: int) -> float:
        """Return the requests per second that a setting serves when they all come at once: a first guess."""
        endpoint = self.endpoint(settings)

        async def burst() -> RunRecord:
            async with OctavoTarget(endpoint) as target:
                return await generate(
                    target, self._traffic(requests, 1000.0 * requests), RunLimits(drain_s=600.0)
                )

        run = self._runner.run(burst())
        done = sum(one.outcome is Outcome.OK for one in run.requests)
        if not done:
            reasons = sorted({one.reason or one.outcome.value for one in run.requests})
            raise BenchError(f"none of {requests} requests was answered: {', '.join(reasons)}")
        return done / run.ended_s

    def _ready(self, settings: Settings) -> Stack:
        config = self._config
        stack, current = self._stack, self._current
        arguments = (
            f"--max-num-seqs={settings.max_num_seqs}",
            f"--max-num-batched-tokens={settings.max_num_batched_tokens}",
            # Whether a latency is kept is ours to judge.
            "--no-overload-control",
            *config.scheduler_args,
        )
        if (
            stack is None
            or current is None
            or current.gpu_memory_utilization != settings.gpu_memory_utilization
        ):
            if stack is not None:
                stack.stop()
            self._stack = stack = Stack(
                StackConfig(
                    model=config.model, scheduler_args=arguments, worker_args=self._worker_args(settings)
                )
            )
            stack.start()
        elif current != settings:
            stack.restart_scheduler(arguments)
        else:
            return stack
        self._current = settings
        stack.wait_ready(_READY_S)
        self._runner.run(self._asked.prepare(stack.endpoint, max(self._requests, _WARM_UP_REQUESTS)))
        self._runner.run(self._warm_up(stack.endpoint))
        return stack

    def _worker_args(self, settings: Settings) -> tuple[str, ...]:
        config = self._config
        given = [
            f"--max-num-seqs={config.max_num_seqs}",
            f"--max-num-batched-tokens={config.max_num_batched_tokens}",
        ]
        if settings.gpu_memory_utilization is not None:
            given.append(f"--gpu-memory-utilization={settings.gpu_memory_utilization:g}")
        return (*given, *config.worker_args)

    async def _warm_up(self, endpoint: str) -> None:
        async with OctavoTarget(endpoint) as target:
            await generate(target, self._traffic(_WARM_UP_REQUESTS, 100.0), RunLimits(drain_s=300.0))

    def _traffic(self, count: int, rate_per_s: float) -> Traffic:
        # What an earlier trial has left in the prefix cache is of no use to this one.
        self._runs += 1
        terms = {"cache_salt": f"tune-{self._runs}", "queue_timeout": _PATIENCE_S}
        salted = [replace(one, options={**one.options, **terms}) for one in self._asked.requests(count)]
        return Traffic(
            requests=salted,
            arrivals=Poisson(rate_per_s),
            seed=self._config.seed,
            dataset=self._asked.description,
        )

    async def _trial(self, endpoint: str, settings: Settings, rate_per_s: float) -> Trial:
        target, stop = self._target, asyncio.Event()
        async with OctavoTarget(endpoint) as octavo:
            judge = Judge(octavo, target, target.allowed_misses(self._requests), stop)
            traffic = self._traffic(self._requests, rate_per_s)
            # By then, whatever has not been answered has missed a bound, if there is one.
            run = await generate(judge, traffic, RunLimits(drain_s=120.0), stop=stop)
        return trial_of(settings, rate_per_s, target, run.requests, stopped=stop.is_set())


class Judge:
    """Counts the requests that miss the latency target, and asks to stop when it is out of reach."""

    def __init__(self, target: LoadTarget, bounds: LatencyTarget, allowed: int, stop: asyncio.Event) -> None:
        self._target = target
        self._bounds = bounds
        self._allowed = allowed
        self._stop = stop
        self._misses = 0

    @property
    def record(self) -> TargetRecord:
        """What is driven."""
        return self._target.record

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The target is its owner's to leave."""

    async def ask(self, request: PlannedRequest, sink: Sink) -> Answer:
        """Send a request; see `LoadTarget`."""
        loop = asyncio.get_running_loop()
        noted = _Noted(sink, loop, self._miss, self._bounds.ttft_s)
        answer = await self._target.ask(request, noted)
        noted.done()
        if not noted.late:
            missed = answer.outcome is not Outcome.OK or self._bounds.missed(
                noted.ttft_s, noted.tpot_s(answer.output_tokens or 0)
            )
            if missed:
                self._miss()
        return answer

    def _miss(self) -> None:
        self._misses += 1
        if self._misses > self._allowed:
            self._stop.set()


class _Noted:
    """Notes when output came, and that the first did not come in time as soon as that is so."""

    def __init__(
        self, sink: Sink, loop: asyncio.AbstractEventLoop, on_late: Callable[[], None], ttft_s: float | None
    ) -> None:
        self.late = False
        self.ttft_s: float | None = None
        self._sink = sink
        self._loop = loop
        self._on_late = on_late
        self._began = loop.time()
        self._last = self._began
        self._timer = loop.call_later(ttft_s, self._is_late) if ttft_s is not None else None

    def chunk(self) -> None:
        """A message with output has come, now."""
        self._sink.chunk()
        self._last = self._loop.time()
        if self.ttft_s is None:
            self.ttft_s = self._last - self._began
            self.done()

    def done(self) -> None:
        """Wait no more."""
        if self._timer is not None:
            self._timer.cancel()

    def tpot_s(self, output_tokens: int) -> float | None:
        """Return the mean time between tokens."""
        if self.ttft_s is None or output_tokens < 2:
            return None
        return (self._last - self._began - self.ttft_s) / (output_tokens - 1)

    def _is_late(self) -> None:
        self.late = True
        self._on_late()
