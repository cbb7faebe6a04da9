"""Two stacks that differ in one flag, and what running requests see of long prompts on each.

In each turn a number of short requests is kept running, and a long prompt comes whenever so many of them
have ended: both arms do the same work in the same order, however fast the machine is. Told is the time
between tokens of the short requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Final, Self

from octavo.stack import Stack, StackConfig

from octavo_lab.command import BenchError
from octavo_lab.datasets.corpus import Corpus, open_corpus
from octavo_lab.datasets.tokenizers import ServiceTokenizer
from octavo_lab.load.arrivals import Closed
from octavo_lab.load.generator import Traffic, generate
from octavo_lab.load.records import Answer, Outcome, RunRecord, TargetRecord
from octavo_lab.load.statistics import Distribution, Interval, distribution, quantile_ratio_interval
from octavo_lab.load.target import LoadTarget, PlannedRequest, Sink
from octavo_lab.load.targets.octavo import OctavoTarget

ARMS: Final = {"chunked": "--chunked-prefill", "whole": "--no-chunked-prefill"}
"""Names of the arms, and the flag of the scheduler that makes them."""
_READY_S: Final = 600.0
_QUANTILE: Final = 0.99
_LONG_OUTPUT_TOKENS: Final = 2
Tell = Callable[[str, float], None]
"""Takes what is being done, and how far the whole is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedConfig:
    """What to run."""

    model: str = "demo"
    long_tokens: int = 2048
    """Of each long prompt."""
    requests: int = 510
    """Short requests per arm, all repeats together."""
    repeats: int = 3
    """Turns of each arm."""
    concurrency: int = 16
    """Short requests that run at any time."""
    prompt_tokens: int = 8
    output_tokens: int = 4
    """Of the short requests."""
    every: int = 170
    """Short requests that end from one long prompt to the next."""
    max_num_batched_tokens: int = 512
    """Tokens in a step: the size of the chunks."""
    worker_args: Sequence[str] = ()
    scheduler_args: Sequence[str] = ()
    seed: int = 1

    def __post_init__(self) -> None:
        if min(self.requests, self.repeats, self.concurrency, self.every, self.output_tokens - 1) < 1:
            raise BenchError("counts are positive, and outputs have two tokens or more")
        if self.long_tokens <= self.max_num_batched_tokens:
            raise BenchError("long prompts must not fit into one step, or there is nothing to chunk")
        if self.requests_per_turn < self.every // 2:
            raise BenchError("a turn would end before its first long prompt comes")

    @property
    def requests_per_turn(self) -> int:
        """Short requests of one turn."""
        return -(-self.requests // self.repeats)


@dataclass(slots=True)
class LongPrompt:
    """One long prompt."""

    ttft_s: float | None = None
    outcome: Outcome = Outcome.ABANDONED


@dataclass(slots=True)
class ArmTurns:
    """What was seen of one arm."""

    gaps_s: list[tuple[float, ...]] = field(default_factory=list)
    """Times between tokens, of each short request."""
    long_ttft_s: list[float] = field(default_factory=list)
    failed: int = 0

    def add(self, short: RunRecord, long: Sequence[LongPrompt]) -> None:
        """Take in one turn."""
        done = [one for one in short.requests if one.outcome is Outcome.OK]
        self.gaps_s.extend(one.gaps_s for one in done if one.gaps_s)
        self.long_ttft_s.extend(one.ttft_s for one in long if one.ttft_s is not None)
        self.failed += len(short.requests) - len(done)
        self.failed += sum(one.outcome is not Outcome.OK for one in long)

    @property
    def itl_s(self) -> Distribution:
        """Times between tokens of all short requests."""
        gaps = [gap for request in self.gaps_s for gap in request]
        return distribution(gaps, independent=len(self.gaps_s))

    @property
    def ttft_s(self) -> Distribution:
        """Times to the first token of the long prompts."""
        return distribution(self.long_ttft_s)


@dataclass(frozen=True, slots=True)
class ChunkedResult:
    """Both arms."""

    config: ChunkedConfig
    arms: dict[str, ArmTurns]

    @property
    def ratio(self) -> Interval | None:
        """P99 with chunks over P99 without; None when there are too few requests."""
        chunked, whole = (self.arms[name].gaps_s for name in ("chunked", "whole"))
        return quantile_ratio_interval(chunked, whole, _QUANTILE, seed=self.config.seed)


async def measure(config: ChunkedConfig, tell: Tell) -> ChunkedResult:
    """Start both stacks and let them take turns.

    Raises:
        BenchError: a long prompt does not fit the model.
        StackError: a stack does not start.
    """
    targets: dict[str, OctavoTarget] = {}
    async with AsyncExitStack() as open_things:
        for index, (name, flag) in enumerate(ARMS.items()):
            tell(f"starting the stack with {name} prefill", 0.02 * index)
            batched = ("--max-num-batched-tokens", str(config.max_num_batched_tokens))
            seats = ("--max-num-seqs", str(config.concurrency + 8))
            # Nothing is refused for the stalls that are to be measured.
            patient = ("--queue-timeout-standard-s", "none", "--no-overload-control")
            stack = Stack(
                StackConfig(
                    model=config.model,
                    scheduler_args=(flag, *patient, *config.scheduler_args),
                    worker_args=(*batched, *seats, *config.worker_args),
                )
            )
            # The children of a stack die with the thread that started them: it has to be this one.
            open_things.enter_context(stack)
            await asyncio.to_thread(stack.wait_ready, _READY_S)
            targets[name] = await open_things.enter_async_context(OctavoTarget(stack.endpoint))
        one = targets["whole"]
        corpus = await open_corpus(ServiceTokenizer(one.client, one.record.model), config.seed)
        return await compare(targets, corpus, config, tell)


async def compare(
    targets: Mapping[str, LoadTarget], corpus: Corpus, config: ChunkedConfig, tell: Tell
) -> ChunkedResult:
    """Let targets that were entered take turns."""
    tell("warming up", 0.05)
    for target in targets.values():
        await _warm_up(target, corpus, config)
    arms = {name: ArmTurns() for name in targets}
    for turn in range(config.repeats):
        # Each turn has the other order, so that a drift within a turn hits both.
        order = list(targets)[:: -1 if turn % 2 else 1]
        for place, name in enumerate(order):
            done = (turn * len(order) + place) / (config.repeats * len(order))
            tell(f"turn {turn + 1} of {config.repeats}: {name}", 0.1 + 0.9 * done)
            arms[name].add(*await _turn(targets[name], corpus, config))
    return ChunkedResult(config, arms)


async def _warm_up(target: LoadTarget, corpus: Corpus, config: ChunkedConfig) -> None:
    """Ask for one long prompt, alone: it makes everything as large as it will become."""
    run = await generate(target, Traffic(requests=[_long(corpus, config)], arrivals=Closed(1)))
    if run.requests[0].outcome is not Outcome.OK:
        raise BenchError(f"a long prompt fails: {run.requests[0].reason}")


async def _turn(
    target: LoadTarget, corpus: Corpus, config: ChunkedConfig
) -> tuple[RunRecord, Sequence[LongPrompt]]:
    short = [_short(corpus, config) for _ in range(config.requests_per_turn)]
    async with WithLongPrompts(target, lambda: _long(corpus, config), config.every) as mixed:
        run = await generate(mixed, Traffic(requests=short, arrivals=Closed(config.concurrency)))
    return run, mixed.long


class WithLongPrompts:
    """A target that is asked a long prompt besides, each time that so many requests have ended.

    The first comes after half of that. Leaving waits for those under way: they must not fall into the
    other arm's turn.
    """

    def __init__(self, target: LoadTarget, make: Callable[[], PlannedRequest], every: int) -> None:
        self.long: list[LongPrompt] = []
        self._target = target
        self._make = make
        self._every = every
        self._ended = 0
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def record(self) -> TargetRecord:
        """That of the target."""
        return self._target.record

    async def ask(self, request: PlannedRequest, sink: Sink) -> Answer:
        """Pass it on; see `LoadTarget`."""
        answer = await self._target.ask(request, sink)
        self._ended += 1
        if self._ended % self._every == self._every // 2:
            self._tasks.append(asyncio.create_task(self._ask_long(LongPrompt())))
        return answer

    async def _ask_long(self, prompt: LongPrompt) -> None:
        self.long.append(prompt)
        loop = asyncio.get_running_loop()
        began = loop.time()

        class First:
            def chunk(self) -> None:
                if prompt.ttft_s is None:
                    prompt.ttft_s = loop.time() - began

        prompt.outcome = (await self._target.ask(self._make(), First())).outcome

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            for task in self._tasks:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=error is not None)


def _request(corpus: Corpus, kind: str, tokens: int, output_tokens: int) -> PlannedRequest:
    prompt = corpus.window(tokens)
    return PlannedRequest(prompt=prompt, prompt_tokens=tokens, output_tokens=output_tokens, kind=kind)


def _short(corpus: Corpus, config: ChunkedConfig) -> PlannedRequest:
    return _request(corpus, "short", config.prompt_tokens, config.output_tokens)


def _long(corpus: Corpus, config: ChunkedConfig) -> PlannedRequest:
    return _request(corpus, "long", config.long_tokens, _LONG_OUTPUT_TOKENS)
