"""What a simulated fleet is asked to do: windows of public traces, or a plan log, at a stated load."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from octavo.protocol.steps import KEY_BYTES
from octavo.steptimes import StepTimes

from octavo_lab.sim import (
    FaultRates,
    SimWorkerConfig,
    compressed,
    poisson,
    request_of,
)
from octavo_lab.traces import MOONCAKE, MOONCAKE_BLOCK_TOKENS, TraceRequest, read_trace
from scheduler_svc.core import NewRequest
from scheduler_svc.planlog import PlanLogError, replayed_requests

START_S: Final = 1.0
"""When the first request comes: all workers have attached by then."""

Job = tuple[float, NewRequest]
"""When (virtual seconds), and what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """The simulated fleet. All of its workers are of one size; faults make them differ."""

    num_workers: int = 8
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    block_size: int = 16
    num_blocks: int = 8192
    max_model_len: int = 8192
    prefix_caching: bool = False
    step_times: StepTimes = field(default_factory=StepTimes.builtin)
    faults: FaultRates = FaultRates()
    """Chances per step of each worker, on top of what the condition brings."""

    def worker(self, index: int) -> SimWorkerConfig:
        """Return one of its workers."""
        return SimWorkerConfig(
            worker_id=f"w{index}",
            step_times=self.step_times,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            prefix_caching=self.prefix_caching,
        )

    def work_s(self, arrival: TraceRequest) -> float:
        """Return the seconds of a worker that a request costs when nothing of it is cached.

        Its share of steps that are full: the fixed cost of a step is divided among its tokens, all
        else is counted as the step-time model does.
        """
        times, prompt, output = self.step_times, arrival.prompt_tokens, arrival.output_tokens
        decodes = output - 1
        context = decodes * prompt + decodes * (decodes + 1) / 2
        seconds = times.per_prefill_token * prompt + times.per_prefill_token_squared * prompt**2
        seconds += times.per_decode * decodes + times.per_context_token * context
        return seconds + (times.base + times.prefill_base) * (prompt + output) / self.max_num_batched_tokens

    def capacity_per_s(self, arrivals: Sequence[TraceRequest]) -> float:
        """Return how many requests like these the fleet can do per second, none of them slowed."""
        return self.num_workers * len(arrivals) / sum(map(self.work_s, arrivals))


def at_random_times(arrivals: Sequence[TraceRequest], seed: int) -> list[TraceRequest]:
    """Return the requests at the times of a Poisson process of one per second."""
    times = poisson(1.0, random.Random(seed))
    return [replace(arrival, at=at) for arrival, at in zip(arrivals, times, strict=False)]


def azure(name: str, config: FleetConfig, folder: Path | None = None) -> list[TraceRequest]:
    """Read an Azure trace; what no worker can hold is left out (5 of the 19,366 conversations)."""
    arrivals = read_trace(name, folder)
    return [a for a in arrivals if a.prompt_tokens + a.output_tokens <= config.max_model_len]


def mooncake(config: FleetConfig, scale: int, folder: Path | None = None) -> list[TraceRequest]:
    """Read the Mooncake trace with all lengths divided by `scale`, so that each hash stands for fewer tokens.

    The prefixes that requests share stay what they are. `scale` divides MOONCAKE_BLOCK_TOKENS.
    """
    arrivals = [
        replace(
            a,
            prompt_tokens=max(1, a.prompt_tokens // scale),
            output_tokens=max(1, a.output_tokens // scale),
        )
        for a in read_trace(MOONCAKE, folder)
    ]
    return [a for a in arrivals if a.prompt_tokens + a.output_tokens <= config.max_model_len]


def window(arrivals: Sequence[TraceRequest], count: int, seed: int) -> list[TraceRequest]:
    """Return `count` requests in a row, from a place drawn by `seed`; all of them if there are no more."""
    spare = len(arrivals) - count
    start = random.Random(seed).randint(0, spare) if spare > 0 else 0
    part = arrivals[start : start + count]
    return [replace(arrival, at=arrival.at - part[0].at) for arrival in part]


def at_load(arrivals: Sequence[TraceRequest], config: FleetConfig, load: float) -> list[TraceRequest]:
    """Return the requests compressed in time (or stretched) so that they offer a share of the capacity."""
    rate = len(arrivals) / (arrivals[-1].at - arrivals[0].at)
    return compressed(arrivals, load * config.capacity_per_s(arrivals) / rate)


def jobs(arrivals: Sequence[TraceRequest], config: FleetConfig, scale: int = 1) -> list[Job]:
    """Return the requests of a trace; each generates exactly as much as the trace says."""
    return [
        (
            START_S + arrival.at,
            replace(
                request_of(arrival, f"r{number}", number, config.block_size, scale),
                root_key=number.to_bytes(KEY_BYTES, "big"),
            ),
        )
        for number, arrival in enumerate(arrivals)
    ]


def jobs_of_plan_log(path: Path, config: FleetConfig, load: float) -> list[Job]:
    """Return the requests of a plan log at a load of this fleet.

    Raises:
        PlanLogError: it is no plan log, or has fewer than two answered requests.
        OSError: it cannot be read.
    """
    logged = replayed_requests(path)
    arrivals = [
        TraceRequest(at, len(spec.prompt_token_ids), spec.sampling.max_tokens or 1) for at, spec in logged
    ]
    if len(arrivals) < 2 or arrivals[-1].at <= arrivals[0].at:
        raise PlanLogError(f"{path}: fewer than two requests were answered")
    moved = at_load(arrivals, config, load)
    return [
        (START_S + arrival.at, replace(spec, model=config.worker(0).model, adapter=None))
        for arrival, (_, spec) in zip(moved, logged, strict=True)
    ]


def unbounded_hit_rate(arrivals: Sequence[TraceRequest], scale: int) -> float:
    """Return the share of prompt tokens that a cache without bounds would have held."""
    seen: set[int] = set()
    block = MOONCAKE_BLOCK_TOKENS // scale
    hits = tokens = 0
    for arrival in arrivals:
        known = 0
        while known < len(arrival.prefix) and arrival.prefix[known] in seen:
            known += 1
        hits += min(known * block, arrival.prompt_tokens)
        tokens += arrival.prompt_tokens
        seen.update(arrival.prefix)
    return hits / tokens
