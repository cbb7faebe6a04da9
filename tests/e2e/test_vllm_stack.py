"""The whole stack with vLLM in its worker: over gRPC, on one rank and on three."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from octavo import AsyncClient, Client
from octavo.sampling import SamplingParams
from octavo.scorecard.runner_workload import Job, Reference
from octavo.stack import Stack, StackConfig
from transformers import LlamaConfig

from tests.unit.worker.runner.torch.families import save_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
READY_S = 600.0
LOST_S = 60.0
RANKS = 3
VOCAB_SIZE = 64 * 2 * RANKS
"""vLLM pads vocabularies to multiples of 64, and each rank holds as much."""
ARGUMENTS = (
    *("--runner", "vllm", "--dtype", "float32", "--enforce-eager", "--num-blocks", "64"),
    *("--max-num-seqs", "8", "--max-num-batched-tokens", "64"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2 * RANKS,
        num_key_value_heads=RANKS,
        head_dim=32,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,
    )
    folder = tmp_path_factory.mktemp("model")
    return folder, Reference(save_model(config, folder))


@pytest.fixture
def stack(request: pytest.FixtureRequest, model: tuple[Path, Reference], tmp_path: Path) -> Iterator[Stack]:
    arguments = (*ARGUMENTS, *getattr(request, "param", ()))
    with Stack(StackConfig(model=str(model[0]), worker_args=arguments, folder=tmp_path)) as running:
        running.wait_ready(READY_S)
        yield running


def prompts(count: int) -> list[list[int]]:
    chooser = random.Random(3)
    return [[chooser.randrange(3, VOCAB_SIZE) for _ in range(chooser.randint(1, 150))] for _ in range(count)]


async def test_stack_concurrent_requests_get_what_transformers_would_say(
    stack: Stack, model: tuple[Path, Reference]
) -> None:
    async with AsyncClient(stack.endpoint) as client:

        async def ask(prompt: list[int]) -> Job:
            result = await client.generate(prompt, temperature=0.0, max_tokens=16, ignore_eos=True)
            return Job(prompt, SamplingParams(), output=list(result.token_ids))

        jobs = await asyncio.gather(*map(ask, prompts(24)))
        status = await client.status()

    assert all(len(job.output) == 16 for job in jobs)
    assert [model[1].mismatches(job)[0] for job in jobs] == [0] * 24
    assert [(worker.runner, worker.pool.active) for worker in status.workers] == [("vllm", 0)]


@pytest.mark.parametrize("stack", [("--tensor-parallel-size", str(RANKS))], indirect=True)
def test_stack_tensor_parallel_rank_killed_is_a_lost_worker_and_the_request_goes_on(
    stack: Stack, model: tuple[Path, Reference]
) -> None:
    worker = stack.workers[0]
    ranks = {
        name: child
        for child in psutil.Process(worker.process.pid).children(recursive=True)
        if (name := " ".join(child.cmdline()).strip()).startswith("VLLM::Worker_TP")
    }
    assert len(ranks) == RANKS
    prompt = prompts(1)[0]
    with Client(stack.endpoint) as client:
        stream = client.stream(prompt, temperature=0.0, max_tokens=300, ignore_eos=True)
        deltas = iter(stream)
        first = next(delta for delta in deltas if delta.token_ids)
        ranks["VLLM::Worker_TP1"].send_signal(signal.SIGKILL)

        assert worker.process.wait(LOST_S) == 1

        worker.start()
        output = [*first.token_ids, *(token for delta in deltas for token in delta.token_ids)]

    assert not any(rank.is_running() for rank in ranks.values())
    assert len(output) == 300
    assert model[1].mismatches(Job(prompt, SamplingParams(), output=output))[0] == 0
