"""`octavo bench chunked`: what chunked prefill spares running requests while long prompts arrive.

Two stacks differ in one flag. In each turn a number of short requests is kept running, and a long prompt
comes whenever so many of them have ended: both arms do the same work in the same order, however fast the
machine is. Told is the time between tokens of the short requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Self

from octavo.cli import output
from octavo.stack import Progress, Stack, StackConfig, StackError

from octavo_lab.command import BenchError, Flag, add_flags
from octavo_lab.datasets.corpus import Corpus, open_corpus
from octavo_lab.datasets.tokenizers import ServiceTokenizer
from octavo_lab.load.arrivals import Closed
from octavo_lab.load.generator import Traffic, generate
from octavo_lab.load.records import Answer, Outcome, RunRecord, TargetRecord
from octavo_lab.load.statistics import Distribution, Interval, distribution, quantile_ratio_interval
from octavo_lab.load.target import LoadTarget, PlannedRequest, Sink
from octavo_lab.load.targets.octavo import OctavoTarget
from octavo_lab.report import bounded, milliseconds, table

ARMS: Final = {"chunked": "--chunked-prefill", "whole": "--no-chunked-prefill"}
"""Names of the arms, and the flag of the scheduler that makes them."""
FLAGS: Final[tuple[Flag, ...]] = (
    ("--model", str, "demo", "MODEL", "as for `octavo up`"),
    ("--long-tokens", int, 2048, "N", "tokens of each long prompt"),
    ("--requests", int, 510, "N", "short requests of each arm, in all its turns; a P99 wants 500"),
    ("--repeats", int, 3, "N", "turns of each arm"),
    ("--concurrency", int, 16, "N", "short requests that run at any time"),
    ("--prompt-tokens", int, 8, "N", "of a short request"),
    ("--output-tokens", int, 4, "N", "of a short request"),
    ("--every", int, 170, "N", "short requests that end from one long prompt to the next"),
    ("--max-num-batched-tokens", int, 512, "N", "tokens in a step: the size of the chunks"),
    ("--seed", int, 1, "N", "of the prompts"),
)
_READY_S: Final = 600.0
_LONG_OUTPUT_TOKENS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedConfig:
    """What to run: the flags, by their names."""

    model: str = "demo"
    long_tokens: int = 2048
    requests: int = 510
    repeats: int = 3
    concurrency: int = 16
    prompt_tokens: int = 8
    output_tokens: int = 4
    every: int = 170
    max_num_batched_tokens: int = 512
    seed: int = 1
    worker_args: Sequence[str] = ()
    scheduler_args: Sequence[str] = ()

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
class ArmTurns:
    """What was seen of one arm."""

    gaps_s: list[tuple[float, ...]] = field(default_factory=list)
    """Times between tokens, of each short request."""
    long_ttft_s: list[float] = field(default_factory=list)
    failed: int = 0

    def add(self, short: RunRecord, long: Sequence[tuple[Outcome, float | None]]) -> None:
        """Take in one turn."""
        self.gaps_s += [one.gaps_s for one in short.requests if one.outcome is Outcome.OK and one.gaps_s]
        self.long_ttft_s += [ttft_s for _, ttft_s in long if ttft_s is not None]
        outcomes = *(one.outcome for one in short.requests), *(outcome for outcome, _ in long)
        self.failed += sum(outcome is not Outcome.OK for outcome in outcomes)

    @property
    def itl_s(self) -> Distribution:
        """Times between tokens of all short requests."""
        return distribution([gap for request in self.gaps_s for gap in request], len(self.gaps_s))


@dataclass(frozen=True, slots=True)
class ChunkedResult:
    """Both arms."""

    config: ChunkedConfig
    arms: dict[str, ArmTurns]

    @property
    def ratio(self) -> Interval | None:
        """P99 with chunks over P99 without; None when there are too few requests."""
        chunked, whole = (self.arms[name].gaps_s for name in ("chunked", "whole"))
        return quantile_ratio_interval(chunked, whole, 0.99, seed=self.config.seed)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_flags(parser, FLAGS)
    for service in ("worker", "scheduler"):
        told = f"further argument of both {service}s"
        parser.add_argument(f"--{service}-arg", action="append", default=[], metavar="ARG", help=told)
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(arguments: argparse.Namespace) -> str:
    """Measure; return the table."""
    fields = [flag.removeprefix("--").replace("-", "_") for flag, *_ in FLAGS]
    config = ChunkedConfig(
        **{field: getattr(arguments, field) for field in fields},
        worker_args=tuple(arguments.worker_arg),
        scheduler_args=tuple(arguments.scheduler_arg),
    )
    try:
        with output.ProgressLine() as progress:
            found = asyncio.run(measure(config, progress))
    except StackError as error:
        raise BenchError(str(error)) from error
    return json.dumps(as_json(found), indent=2) if arguments.json else as_text(found)


async def measure(config: ChunkedConfig, tell: Progress) -> ChunkedResult:
    """Start both stacks and let them take turns; BenchError: a long prompt does not fit the model."""
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
    targets: Mapping[str, LoadTarget], corpus: Corpus, config: ChunkedConfig, tell: Progress
) -> ChunkedResult:
    """Let targets that were entered take turns."""

    def make(kind: str, tokens: int, output_tokens: int) -> PlannedRequest:
        prompt = corpus.window(tokens)
        return PlannedRequest(prompt=prompt, prompt_tokens=tokens, output_tokens=output_tokens, kind=kind)

    def make_long() -> PlannedRequest:
        return make("long", config.long_tokens, _LONG_OUTPUT_TOKENS)

    tell("warming up", 0.05)
    for target in targets.values():
        # One long prompt, alone: it makes everything as large as it will become.
        (alone,) = (await generate(target, Traffic(requests=[make_long()], arrivals=Closed(1)))).requests
        if alone.outcome is not Outcome.OK:
            raise BenchError(f"a long prompt fails: {alone.reason}")
    arms = {name: ArmTurns() for name in targets}
    # Each turn has the other order, so that a drift within a turn hits both.
    turns = [
        (turn, name) for turn in range(config.repeats) for name in list(targets)[:: -1 if turn % 2 else 1]
    ]
    for number, (turn, name) in enumerate(turns):
        tell(f"turn {turn + 1} of {config.repeats}: {name}", 0.1 + 0.9 * number / len(turns))
        sizes = config.prompt_tokens, config.output_tokens
        short = [make("short", *sizes) for _ in range(config.requests_per_turn)]
        async with WithLongPrompts(targets[name], make_long, config.every) as mixed:
            run = await generate(mixed, Traffic(requests=short, arrivals=Closed(config.concurrency)))
        arms[name].add(run, mixed.long)
    return ChunkedResult(config, arms)


class WithLongPrompts:
    """A target that is asked a long prompt besides, each time that so many requests have ended.

    The first comes after half of that. Leaving waits for those under way: they must not fall into the
    other arm's turn.
    """

    def __init__(self, target: LoadTarget, make: Callable[[], PlannedRequest], every: int) -> None:
        self.long: list[tuple[Outcome, float | None]] = []
        """How each long prompt that has ended did, and its time to the first token."""
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
            self._tasks.append(asyncio.create_task(self._ask_long()))
        return answer

    async def _ask_long(self) -> None:
        now = asyncio.get_running_loop().time
        times = [now()]

        class Tape:
            def chunk(self) -> None:
                times.append(now())

        answer = await self._target.ask(self._make(), Tape())
        self.long.append((answer.outcome, times[1] - times[0] if times[1:] else None))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            for task in self._tasks:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=error is not None)


def as_json(found: ChunkedResult) -> dict[str, Any]:
    """Return both arms in figures."""
    ratio = found.ratio
    return {
        "config": asdict(found.config),
        "arms": {
            name: {
                "short_requests": len(arm.gaps_s),
                "long_prompts": len(arm.long_ttft_s),
                "failed": arm.failed,
                "itl_s": asdict(arm.itl_s),
                "long_ttft_s": asdict(distribution(arm.long_ttft_s)),
            }
            for name, arm in found.arms.items()
        },
        "itl_p99_ratio": None if ratio is None else asdict(ratio),
    }


def as_text(found: ChunkedResult) -> str:
    """Return both arms as a table."""
    config, rows, ratio = found.config, [], found.ratio
    for name, arm in found.arms.items():
        itl, ttft = arm.itl_s, distribution(arm.long_ttft_s)
        figures = map(milliseconds, (itl.p50, itl.p90, itl.p99, itl.max, ttft.p50))
        rows.append([name, len(arm.gaps_s), len(arm.long_ttft_s), arm.failed, *figures])
    told = "Too few requests for a P99: it wants 500 of each arm."
    if ratio is not None:
        interval = bounded(ratio.value, ratio.low, ratio.high, ".3f")
        told = f"P99 with chunks over P99 without: {interval}, in brackets the 95% interval"
    header = ("prefill", "short", "long", "failed", "ITL P50", "P90", "P99", "max", "long TTFT P50")
    return (
        f"{config.concurrency} short requests ({config.prompt_tokens} in, {config.output_tokens} out) run at "
        f"any time. A prompt of {config.long_tokens} tokens comes each time that {config.every} of them have "
        f"ended. Steps of {config.max_num_batched_tokens} tokens, {config.repeats} turns each.\n"
        f"Inter-token latency (ITL) of the short requests, in ms:\n\n{table(header, rows)}\n\n{told}"
    )
