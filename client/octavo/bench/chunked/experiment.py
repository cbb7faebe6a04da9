"""Two stacks that differ in one flag, and what running requests see of long prompts on each.

In each turn a number of short requests is kept running, and long prompts come at even distances, the
same for both arms. Told is the time between tokens of the short requests.
"""

from __future__ import annotations

import asyncio
import statistics as stats
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Final

from octavo.bench import BenchError
from octavo.bench.datasets.corpus import Corpus, open_corpus
from octavo.bench.datasets.tokenizers import ServiceTokenizer
from octavo.bench.load.arrivals import Closed, Even
from octavo.bench.load.generator import Traffic, generate
from octavo.bench.load.records import Outcome, RunRecord
from octavo.bench.load.statistics import Distribution, Interval, distribution, quantile_ratio_interval
from octavo.bench.load.target import Request, Target
from octavo.bench.load.targets.octavo import OctavoTarget
from octavo.stack import Stack, StackConfig

ARMS: Final = {"chunked": "--chunked-prefill", "whole": "--no-chunked-prefill"}
"""Names of the arms, and the flag of the scheduler that makes them."""
_READY_S: Final = 600.0
_QUANTILE: Final = 0.99
_CALIBRATIONS: Final = 3
_LONG_OUTPUT_TOKENS: Final = 2
_MOST_LONG: Final = 2000
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
    concurrency: int = 8
    """Short requests that run at any time."""
    prompt_tokens: int = 32
    output_tokens: int = 12
    """Of the short requests."""
    spacing: float = 3.0
    """Time from one long prompt to the next, in multiples of what one takes alone."""
    max_num_batched_tokens: int = 512
    """Tokens in a step: the size of the chunks."""
    worker_args: Sequence[str] = ()
    scheduler_args: Sequence[str] = ()
    seed: int = 1

    def __post_init__(self) -> None:
        counts = (self.long_tokens, self.requests, self.repeats, self.concurrency, self.output_tokens - 1)
        if min(counts) < 1 or self.spacing <= 1:
            raise BenchError("counts are positive, outputs have two tokens or more, the spacing is above 1")
        if self.long_tokens <= self.max_num_batched_tokens:
            raise BenchError("long prompts must not fit into one step, or there is nothing to chunk")


@dataclass(slots=True)
class Arm:
    """What was seen of one arm."""

    name: str
    gaps_s: list[tuple[float, ...]] = field(default_factory=list)
    """Times between tokens, of each short request."""
    long_ttft_s: list[float] = field(default_factory=list)
    failed: int = 0

    def add(self, short: RunRecord, long: RunRecord) -> None:
        """Take in one turn."""
        done = [one for one in short.requests if one.outcome is Outcome.OK]
        self.gaps_s.extend(one.gaps_s for one in done if one.gaps_s)
        self.long_ttft_s.extend(one.ttft_s for one in long.requests if one.ttft_s is not None)
        # Long prompts that were under way when the last short request ended are cut off by us.
        ends = [*short.requests, *(one for one in long.requests if one.outcome is not Outcome.ABANDONED)]
        self.failed += sum(one.outcome is not Outcome.OK for one in ends)

    @property
    def itl_s(self) -> Distribution:
        """Times between tokens of all short requests."""
        gaps = [gap for request in self.gaps_s for gap in request]
        return distribution(gaps, independent=len(self.gaps_s))


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both arms."""

    config: ChunkedConfig
    long_alone_s: float
    """Time to the first token of a long prompt that has the machine to itself."""
    arms: dict[str, Arm]

    @property
    def ratio(self) -> Interval | None:
        """P99 with chunks over P99 without; None when there are too few requests."""
        chunked, whole = (self.arms[name].gaps_s for name in ("chunked", "whole"))
        return quantile_ratio_interval(chunked, whole, _QUANTILE, seed=self.config.seed)


async def measure(config: ChunkedConfig, tell: Tell) -> Comparison:
    """Start both stacks and let them take turns.

    Raises:
        BenchError: a long prompt does not fit the model.
        StackError: a stack does not start.
    """
    targets: dict[str, OctavoTarget] = {}
    async with AsyncExitStack() as open_things:
        for index, (name, flag) in enumerate(ARMS.items()):
            tell(f"starting the stack with {name} prefill", 0.02 * index)
            stack = Stack(
                StackConfig(
                    model=config.model,
                    scheduler_args=(flag, "--queue-timeout-standard-s", "none", *config.scheduler_args),
                    worker_args=(
                        *("--max-num-batched-tokens", str(config.max_num_batched_tokens)),
                        *("--max-num-seqs", str(config.concurrency + 8), *config.worker_args),
                    ),
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
    targets: Mapping[str, Target], corpus: Corpus, config: ChunkedConfig, tell: Tell
) -> Comparison:
    """Let targets that were entered take turns."""
    tell("measuring a long prompt alone", 0.05)
    alone_s = 0.0
    for target in targets.values():
        alone_s = await _long_alone_s(target, corpus, config)
    arms = {name: Arm(name) for name in targets}
    for turn in range(config.repeats):
        # Each turn has the other order, so that a drift within a turn hits both.
        order = list(targets)[:: -1 if turn % 2 else 1]
        for place, name in enumerate(order):
            done = (turn * len(order) + place) / (config.repeats * len(order))
            tell(f"turn {turn + 1} of {config.repeats}: {name}", 0.1 + 0.9 * done)
            arms[name].add(*await _turn(targets[name], corpus, config, alone_s * config.spacing))
    return Comparison(config, alone_s, arms)


async def _long_alone_s(target: Target, corpus: Corpus, config: ChunkedConfig) -> float:
    """Return the median; the first, which warms up, does not count."""
    requests = [_long(corpus, config) for _ in range(1 + _CALIBRATIONS)]
    run = await generate(target, Traffic(requests=requests, arrivals=Closed(1)))
    times = [one.ttft_s for one in run.requests[1:] if one.ttft_s is not None]
    if not times:
        raise BenchError(f"a long prompt alone fails: {run.requests[0].reason}")
    return stats.median(times)


async def _turn(
    target: Target, corpus: Corpus, config: ChunkedConfig, every_s: float
) -> tuple[RunRecord, RunRecord]:
    short = [_short(corpus, config) for _ in range(-(-config.requests // config.repeats))]
    long = [_long(corpus, config) for _ in range(_MOST_LONG)]
    over = asyncio.Event()

    async def running() -> RunRecord:
        try:
            return await generate(target, Traffic(requests=short, arrivals=Closed(config.concurrency)))
        finally:
            over.set()

    arriving = Traffic(requests=long, arrivals=Even(1 / every_s))
    runs = await asyncio.gather(running(), generate(target, arriving, stop=over))
    # A prompt that was cut off is computed until its step ends: that must not fall into the other arm's turn.
    last = _short(corpus, config)
    await generate(target, Traffic(requests=[last], arrivals=Closed(1)))
    return runs[0], runs[1]


def _short(corpus: Corpus, config: ChunkedConfig) -> Request:
    return Request(
        prompt=corpus.window(config.prompt_tokens),
        prompt_tokens=config.prompt_tokens,
        output_tokens=config.output_tokens,
        kind="short",
    )


def _long(corpus: Corpus, config: ChunkedConfig) -> Request:
    return Request(
        prompt=corpus.window(config.long_tokens),
        prompt_tokens=config.long_tokens,
        output_tokens=_LONG_OUTPUT_TOKENS,
        kind="long",
    )
