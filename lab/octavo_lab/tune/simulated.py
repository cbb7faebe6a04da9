"""Trials in virtual time: the real scheduler over a simulated worker, thousands of requests in a second."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from octavo.steptimes import StepTimes

from octavo_lab.fleet.arms import LATE, simulate
from octavo_lab.fleet.workload import FleetConfig
from octavo_lab.sim import poisson, request_of
from octavo_lab.traces import TraceRequest
from octavo_lab.tune.search import Settings, Trial
from octavo_lab.tune.target import LatencyTarget, keeps_up
from scheduler_svc.core import CoreConfig


@dataclass(frozen=True, slots=True)
class SimulatedWorker:
    """What is simulated."""

    step_times: StepTimes
    num_blocks: int
    """At full memory utilization."""
    block_size: int = 16
    max_model_len: int = 8192


class SimulatedTrials:
    """Runs trials on a simulated worker. The same rate brings the same requests at the same times."""

    def __init__(
        self,
        worker: SimulatedWorker,
        lengths: Sequence[tuple[int, int]],
        target: LatencyTarget,
        seed: int = 1,
    ) -> None:
        self._worker = worker
        self._lengths = lengths
        self._target = target
        self._seed = seed

    def __call__(self, settings: Settings, rate_per_s: float) -> Trial:
        """Run one trial; virtual time costs little, so none is stopped early."""
        worker, target = self._worker, self._target
        share = settings.gpu_memory_utilization or 1.0
        fleet = FleetConfig(
            num_workers=1,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            block_size=worker.block_size,
            num_blocks=int(worker.num_blocks * share),
            max_model_len=worker.max_model_len,
            step_times=worker.step_times,
        )
        rng = random.Random(self._seed)  # for repetition, not for secrets
        times = poisson(rate_per_s, rng)
        jobs = []
        for number, (prompt, output) in enumerate(self._lengths):
            at = next(times)
            spec = request_of(TraceRequest(at, prompt, output), f"r{number}", number, worker.block_size)
            jobs.append((at, replace(spec, root_key=b"")))
        results = simulate(LATE, jobs, fleet, CoreConfig(max_waiting_requests=len(jobs) + 1))
        misses = sum(target.missed(one.ttft_s, one.tpot_s) or not one.completed for one in results)
        ttft = [one.ttft_s for one in results if one.ttft_s is not None]
        tpot = [one.tpot_s for one in results if one.tpot_s is not None]
        answered = [
            (one.ended_at, target.granted_s(one.ended_at - one.arrival, one.ttft_s))
            for one in results
            if one.completed and one.ended_at is not None
        ]
        in_bounds = misses <= target.allowed_misses(len(results))
        ended = max((one.ended_at or 0.0 for one in results), default=1.0)
        return Trial(
            settings,
            rate_per_s,
            kept=in_bounds and keeps_up([one.arrival for one in results], answered),
            requests=len(results),
            stopped_early=False,
            ttft_s=float(np.quantile(ttft, target.quantile)) if ttft else None,
            tpot_s=float(np.quantile(tpot, target.quantile)) if tpot else None,
            tokens_per_s=sum(one.output_tokens for one in results) / ended,
            memory_short=any(one.preemptions for one in results),
        )
