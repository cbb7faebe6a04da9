"""Trials in virtual time: the real scheduler over a simulated worker, thousands of requests in a second."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.steptimes import StepTimes

from octavo_lab.fleet.arms import LATE, FleetConfig, simulate
from octavo_lab.load.records import Offered, Outcome, RequestMeasurement
from octavo_lab.sim import SimResult, SimWorkerConfig, poisson, request_of
from octavo_lab.traces import TraceRequest
from octavo_lab.tune.search import Settings, Trial
from octavo_lab.tune.target import LatencyTarget, trial_of
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
        simulated = SimWorkerConfig(
            worker_id="w",
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            block_size=worker.block_size,
            num_blocks=int(worker.num_blocks * share),
            max_model_len=worker.max_model_len,
            step_times=worker.step_times,
            prefix_caching=False,
        )
        rng = random.Random(self._seed)  # for repetition, not for secrets
        times = poisson(rate_per_s, rng)
        jobs = []
        for number, (prompt, output) in enumerate(self._lengths):
            at = next(times)
            spec = request_of(TraceRequest(at, prompt, output), f"r{number}", number, worker.block_size)
            jobs.append((at, replace(spec, root_key=b"")))
        results = simulate(
            LATE,
            jobs,
            FleetConfig(num_workers=1, worker=simulated),
            CoreConfig(max_waiting_requests=len(jobs) + 1),
        )
        return trial_of(settings, rate_per_s, target, [_measured(*one) for one in enumerate(results)])


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
