"""Trials in virtual time: the real scheduler over a simulated worker, thousands of requests in a second."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo_lab.fleet.arms import LATE, FleetConfig, simulate
from octavo_lab.load.records import Offered, Outcome, RequestMeasurement
from octavo_lab.sim import SimResult, SimWorkerConfig, poisson, request_of
from octavo_lab.traces import TraceRequest
from octavo_lab.tune.search import Settings, Trial
from octavo_lab.tune.target import LatencyTarget, trial_of
from scheduler_svc.core import CoreConfig


@dataclass(frozen=True, slots=True)
class SimulatedTrials:
    """Runs trials on a simulated worker. The same rate brings the same requests at the same times."""

    worker: SimWorkerConfig
    """With its blocks at full memory utilization."""
    lengths: Sequence[tuple[int, int]]
    """Prompt and output tokens of each request."""
    target: LatencyTarget
    seed: int = 1

    def __call__(self, settings: Settings, rate_per_s: float) -> Trial:
        """Run one trial; virtual time costs little, so none is stopped early."""
        worker = replace(
            self.worker,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            num_blocks=int(self.worker.num_blocks * (settings.gpu_memory_utilization or 1.0)),
        )
        times = poisson(rate_per_s, random.Random(self.seed))
        jobs = []
        for number, (at, lengths) in enumerate(zip(times, self.lengths, strict=False)):
            jobs.append((at, request_of(TraceRequest(at, *lengths), f"r{number}", number, worker.block_size)))
        fleet = FleetConfig(num_workers=1, worker=worker)
        results = simulate(LATE, jobs, fleet, CoreConfig(max_waiting_requests=len(jobs) + 1))
        return trial_of(settings, rate_per_s, self.target, [_measured(*one) for one in enumerate(results)])


def _measured(number: int, one: SimResult) -> RequestMeasurement:
    """Return what a client of a real service would have noted."""
    return RequestMeasurement(
        offered=Offered(
            number=number, planned_s=one.arrival, prompt_tokens=one.prompt_tokens, output_tokens=0
        ),
        sent_s=one.arrival,
        outcome=Outcome.OK if one.completed else Outcome.ERROR,
        ended_s=one.arrival if one.ended_at is None else one.ended_at,
        chunk_times_s=tuple(at for at in (one.first_token_at, one.last_token_at) if at is not None),
        output_tokens=one.output_tokens,
        preemptions=one.preemptions,
    )
