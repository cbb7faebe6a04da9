"""Cost of KV memory and of the engine, with room for a busy machine; the scorecard has the promises."""

from __future__ import annotations

import statistics
import time

from octavo.protocol.steps import Admit, Plan
from octavo.sampling import SamplingParams
from octavo_lab.scorecard.measures import kv

from worker_svc.engine.engine import EngineConfig, WorkerEngine
from worker_svc.runner.base import StepBatch, StepResult


def test_pool_operations_cost_microseconds_per_block() -> None:
    measured = kv.us_per_block()
    assert measured.value < 5.0, measured.details


def test_admission_with_512_cached_blocks_costs_less_than_a_millisecond() -> None:
    assert kv.match_512_us() < 1000


class InstantRunner:
    """Computes nothing: what remains is the engine."""

    def supports(self, sampling: SamplingParams) -> str | None:
        return None

    def execute(self, batch: StepBatch) -> StepResult:
        return StepResult({row.sequence.handle: 5 for row in batch.rows if row.sample}, {})


def median_step_s(num_seqs: int) -> float:
    """CPU seconds of the engine for a step in which all sequences decode."""
    config = EngineConfig(block_size=16, num_blocks=2**16, max_num_seqs=num_seqs, max_model_len=4096)
    engine = WorkerEngine(InstantRunner(), config)  # type: ignore[arg-type]  # the rest is not used
    sampling = SamplingParams(max_tokens=4000, seed=1)
    handles = range(1, num_seqs + 1)
    admit = tuple(Admit(handle, [handle] * 20, 20, sampling) for handle in handles)
    engine.run_step(
        Plan(1, admit=admit, prefill=tuple((handle, 20) for handle in handles)), time.perf_counter
    )
    times = []
    for step in range(2, 400):
        started = time.thread_time()
        engine.run_step(Plan(step), time.perf_counter)
        times.append(time.thread_time() - started)
    return statistics.median(times)


def test_cost_of_a_step_grows_no_faster_than_its_sequences() -> None:
    assert median_step_s(256) < 8 * median_step_s(32)


def test_cost_of_a_step_does_not_grow_with_the_pool() -> None:
    def step_us(num_blocks: int) -> float:
        engine = WorkerEngine(
            InstantRunner(),  # type: ignore[arg-type]  # the rest is not used
            EngineConfig(block_size=16, num_blocks=num_blocks, max_num_seqs=8, max_model_len=2048),
        )
        sampling = SamplingParams(max_tokens=1900, seed=1)
        admit = tuple(Admit(handle, [handle] * 20, 20, sampling) for handle in range(1, 9))
        prefill = tuple((handle, 20) for handle in range(1, 9))
        engine.run_step(Plan(1, admit=admit, prefill=prefill), time.perf_counter)
        times = []
        for step in range(2, 500):
            started = time.thread_time()
            engine.run_step(Plan(step), time.perf_counter)
            times.append(time.thread_time() - started)
        return statistics.median(times)

    assert step_us(2**20) < 5 * step_us(2**10)
