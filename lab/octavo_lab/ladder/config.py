"""What a ladder measures, and how long it may take. Everything here is fixed before the first request.

All arms have the same model, memory, limits and traffic. The static arms come twice: as the source articles
describe static batching (prompts padded to the longest, finished rows computed until the batch ends), and
without that waste, so that the reader sees what each part costs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from octavo_lab.load.arrivals import Arrivals, Bursty, Gamma, Poisson

CONTROL: Final = "static"
"""What everything is compared with: static batching over contiguous memory, as the articles have it."""
SUBJECT: Final = "continuous-chunked"
"""What is compared with it: named before anything is measured, and without the help of a prefix cache."""
BASELINE: Final = "baseline"
MIDDLE: Final = "middle"
BEST_STATIC: Final = "best-static"
BEST: Final = "best"
OVERLOAD: Final = "overload"
RUNGS: Final = {
    BASELINE: "half the control's capacity",
    MIDDLE: "the control's capacity",
    BEST_STATIC: "capacity of the best static arm",
    BEST: "capacity of the best arm",
    OVERLOAD: "1.5 times the capacity of the best arm",
}
"""Loads, from the lightest; each is one absolute rate for all arms."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to serve."""

    name: str
    title: str
    static: bool = False
    buckets: bool = False
    wasteful: bool = False
    """Static: prompts padded, finished rows computed."""
    chunked: bool = False
    prefix: bool = False


_ALL: Final = (
    Arm(CONTROL, "static, contiguous", static=True, wasteful=True),
    Arm("static-buckets", "static, contiguous, length buckets", static=True, wasteful=True, buckets=True),
    Arm("static-nowaste", "static, contiguous, no waste", static=True),
    Arm("static-buckets-nowaste", "static, contiguous, length buckets, no waste", static=True, buckets=True),
    Arm("continuous", "continuous, paged"),
    Arm("continuous-prefix", "continuous, paged, prefix cache", prefix=True),
    Arm(SUBJECT, "continuous, paged, chunked prefill", chunked=True),
    Arm(f"{SUBJECT}-prefix", "continuous, paged, chunked prefill, prefix cache", chunked=True, prefix=True),
)
ARMS: Final = {arm.name: arm for arm in _ALL}


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticSettings:
    """What a static arm is tuned by."""

    batch_size: int = 8
    timeout_s: float = 0.5


@dataclass(frozen=True, slots=True)
class Backlogged:
    """Arrivals that come on top of requests that are all there at the beginning."""

    process: Arrivals
    backlog: int

    def __str__(self) -> str:
        return f"{self.backlog} at once, then {self.process}"

    @property
    def rate_per_s(self) -> float:
        """Of the arrivals that follow."""
        return self.process.rate_per_s

    def times(self, seed: int) -> Iterator[float]:
        """Yield the times; see `Arrivals`."""
        return itertools.chain(itertools.repeat(0.0, self.backlog), self.process.times(seed))


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderConfig:
    """One experiment."""

    preset: str
    arms: tuple[str, ...] = tuple(ARMS)
    rungs: tuple[str, ...] = tuple(RUNGS)
    repeats: int = 3
    budget_s: float = 3600.0
    """Time that the whole may take; see `plan.py` for what shrinks when it is short."""
    seed: int = 1
    arrivals: str = "poisson"
    gamma_cv: float = 2.0
    warm_up_s: float = 4.0
    """Sent and not measured, at the beginning of each cell."""
    saturating_warm_up_s: float = 25.0
    """The same at the highest rung: until memory is full."""
    backlog: int = 64
    """Requests that are there at once when a cell of the highest rung begins. At 1.5 times its capacity a
    server fills so slowly that a window would see it filling."""

    # What serves
    model: str = "demo"
    runner: str = "torch"
    block_size: int = 4
    num_blocks: int = 768
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    context: int = 512
    ready_timeout_s: float = 900.0
    extra_worker_args: tuple[str, ...] = ()
    extra_scheduler_args: tuple[str, ...] = ()

    # The static arms
    batch_sizes: tuple[int, ...] = (4, 8, 16)
    timeouts_s: tuple[float, ...] = (0.1, 0.5, 2.0)
    bucket_bounds: tuple[int, ...] = (32, 64, 128)

    # What is asked
    dataset: str = "azure-conv"
    traces: str | None = None
    scale: int | None = 16
    """Lengths of a trace are divided by this; None is what makes 99% of it fit the context."""
    prompt_tokens: float = 64.0
    """Mean, of `lognormal` and `fixed`."""
    output_tokens: float = 64.0
    length_cv: float = 1.0
    shared_prefix_share: float = 0.5
    """Share of the requests that begin with one of a few system prompts."""
    shared_prefix_tokens: int = 24
    num_shared_prefixes: int = 4
    queue_timeout_s: float = 30.0

    # How it is judged
    slo: str = "ttft=3000,tpot=500"
    """What a request must keep to count as good, as `octavo bench serve --slo` has it."""
    price_per_hour: float = 1.0
    """Of the machine, in any currency: cost scales with it."""

    def backlog_of(self, rung: str) -> int:
        """Return how many requests the cells of a rung begin with."""
        return self.backlog if rung == OVERLOAD else 0

    def warm_up_of(self, rung: str) -> float:
        """Return the warm-up of the cells of a rung."""
        return self.saturating_warm_up_s if rung == OVERLOAD else self.warm_up_s

    @property
    def full_arms(self) -> tuple[str, ...]:
        """The arms that are compared with each other in particular."""
        return tuple(name for name in (CONTROL, SUBJECT) if name in self.arms)

    def process(self, rate_per_s: float, backlog: int = 0) -> Arrivals:
        """Return the arrivals at a rate, after so many requests at once."""
        others: dict[str, Arrivals] = {
            "gamma": Gamma(rate_per_s, self.gamma_cv),
            "bursty": Bursty(rate_per_s),
        }
        process = others.get(self.arrivals, Poisson(rate_per_s))
        return Backlogged(process, backlog) if backlog else process

    def worker_args(self, arm: Arm) -> tuple[str, ...]:
        """Arguments of the worker of an arm; all arms have the same but for what makes them."""
        return (
            f"--runner={self.runner}",
            f"--block-size={self.block_size}",
            f"--num-blocks={self.num_blocks}",
            f"--max-num-seqs={self.max_num_seqs}",
            f"--max-num-batched-tokens={self.max_num_batched_tokens}",
            f"--max-model-len={self.context}",
            "--pin-budget-blocks=0",
            f"--kv-layout={'contiguous' if arm.static else 'paged'}",
            *(("--padded",) if arm.wasteful else ()),
            *self.extra_worker_args,
        )

    def scheduler_args(self, arm: Arm, static: StaticSettings) -> tuple[str, ...]:
        """Arguments of the scheduler of an arm."""
        buckets = ",".join(map(str, self.bucket_bounds))
        of_static = (
            "--batching=static",
            f"--static-batch-size={static.batch_size}",
            f"--static-timeout-s={static.timeout_s:g}",
            "--static-hold-finished" if arm.wasteful else "--no-static-hold-finished",
            *((f"--static-buckets={buckets}",) if arm.buckets else ()),
        )
        of_continuous = ("--chunked-prefill" if arm.chunked else "--no-chunked-prefill",)
        return (
            f"--queue-timeout-standard-s={self.queue_timeout_s:g}",
            # What is compared is how requests are served, not which are turned away.
            "--no-overload-control",
            # Steps of a model on a CPU take up to seconds. A plan that is made before the last step has
            # reported cannot use the memory that it frees, and wins one round trip for that.
            "--window=1",
            # The padded prompts of a large batch are one step, which takes long on a slow machine.
            "--step-watchdog-s=300",
            "--prefix-caching" if arm.prefix else "--no-prefix-caching",
            *(of_static if arm.static else of_continuous),
            *self.extra_scheduler_args,
        )


FULL: Final = LadderConfig(preset="full")
QUICK: Final = replace(
    FULL,
    preset="quick",
    arms=(CONTROL, SUBJECT),
    rungs=(MIDDLE, OVERLOAD),
    repeats=2,
    budget_s=8 * 60.0,
    warm_up_s=3.0,
    saturating_warm_up_s=18.0,
    batch_sizes=(4, 8),
    timeouts_s=(0.1, 0.5),
)
PRESETS: Final = {one.preset: one for one in (QUICK, FULL)}
