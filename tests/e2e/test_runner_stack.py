"""The whole stack over gRPC with each real runner in its worker, and vLLM's on three ranks."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import psutil
import pytest
from octavo import AsyncClient, Client
from octavo.sampling import SamplingParams
from octavo.stack import Stack, StackConfig
from octavo.v1 import operations_pb2, operations_pb2_grpc
from octavo_lab.scorecard.runner_workload import EngineJob, Reference
from octavo_lab.scorecard.system import until_idle
from transformers import LlamaConfig

from tests.unit.worker.runner.torch.families import save_model

READY_S = 600.0
LOST_S = 60.0
RANKS = 3
LIMITS = (
    *("--dtype", "float32", "--num-blocks", "64", "--max-num-seqs", "8", "--max-num-batched-tokens", "64"),
)
TESTED = ("--block-size", "32", "--num-host-blocks", "16", "--enable-faults", "--check-integrity")
VLLM = ("--runner", "vllm", "--enforce-eager")
NEEDS_VLLM = (pytest.mark.vllm, pytest.mark.slow)
FAULTS = (
    operations_pb2.Fault(kind=operations_pb2.FAULT_KIND_ALLOCATION, probability=0.05),
    operations_pb2.Fault(kind=operations_pb2.FAULT_KIND_STEP_OOM, probability=0.05),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    return tiny_model(tmp_path_factory.mktemp("model"), RANKS)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("--runner", "torch", "--device", "cpu"), id="torch"),
        pytest.param(VLLM, id="vllm", marks=NEEDS_VLLM),
    ],
)
def stack(
    request: pytest.FixtureRequest, model: tuple[Path, Reference], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    with running(model[0], tmp_path_factory.mktemp("stack"), (*TESTED, *request.param)) as stack:
        stack.wait_ready(READY_S)
        yield stack


def tiny_model(folder: Path, ranks: int) -> tuple[Path, Reference]:
    """Write a model that so many ranks can share; return its folder, and what transformers says of it."""
    config = LlamaConfig(
        # vLLM pads vocabularies to multiples of 64, and each rank holds as much.
        vocab_size=64 * 2 * ranks,
        hidden_size=32 * ranks,
        intermediate_size=64 * ranks,
        num_hidden_layers=2,
        num_attention_heads=2 * ranks,
        num_key_value_heads=ranks,
        head_dim=32,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,
    )
    return folder, Reference(save_model(config, folder))


def running(model: Path, folder: Path, arguments: Sequence[str]) -> Stack:
    return Stack(
        StackConfig(
            model=str(model),
            worker_args=(*LIMITS, *arguments),
            # On a slow machine some of the load would be refused otherwise, or wait for too long.
            scheduler_args=(
                "--enable-faults",
                "--no-overload-control",
                "--queue-timeout-standard-s=none",
            ),
            folder=folder,
        )
    )


def prompts(count: int) -> list[list[int]]:
    chooser = random.Random(3)
    return [
        [chooser.randrange(3, 64 * 2 * RANKS) for _ in range(chooser.randint(1, 150))] for _ in range(count)
    ]


async def ask(client: AsyncClient, prompt: list[int], max_tokens: int = 16) -> EngineJob:
    result = await client.generate(prompt, temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return EngineJob(prompt, SamplingParams(), output=list(result.token_ids))


def assert_right(jobs: Sequence[EngineJob], reference: Reference, max_tokens: int = 16) -> None:
    assert all(len(job.output) == max_tokens for job in jobs)
    assert [reference.mismatches(job)[0] for job in jobs] == [0] * len(jobs)


def set_faults(stack: Stack, faults: Sequence[operations_pb2.Fault]) -> None:
    with grpc.insecure_channel(stack.endpoint) as channel:
        operations_pb2_grpc.OperationsStub(channel).SetFaults(operations_pb2.SetFaultsRequest(faults=faults))


async def test_stack_concurrent_requests_get_what_transformers_would_say(
    stack: Stack, model: tuple[Path, Reference]
) -> None:
    async with AsyncClient(stack.endpoint) as client:
        jobs = await asyncio.gather(*[ask(client, prompt) for prompt in prompts(24)])
        await until_idle(client, 1)

    assert_right(jobs, model[1])


async def test_stack_out_of_memory_again_and_again_costs_no_request_and_no_token(
    stack: Stack, model: tuple[Path, Reference]
) -> None:
    set_faults(stack, FAULTS)
    try:
        async with AsyncClient(stack.endpoint) as client:
            jobs = await asyncio.gather(*[ask(client, prompt, 40) for prompt in prompts(24)])
            await until_idle(client, 1)
    finally:
        set_faults(stack, ())

    assert_right(jobs, model[1], 40)


async def test_stack_seeded_sampling_repeats_itself_in_any_company(stack: Stack) -> None:
    async with AsyncClient(stack.endpoint) as client:

        async def draw(number: int) -> tuple[tuple[int, ...], ...]:
            result = await client.generate(
                prompts(8)[number], temperature=1.0, top_p=0.9, seed=number, n=2, max_tokens=12
            )
            return tuple(choice.token_ids for choice in result.choices)

        alone = [await draw(number) for number in range(8)]
        together = await asyncio.gather(*map(draw, range(8)))

    assert together == alone
    assert any(first != second for first, second in alone)


async def test_stack_clients_that_leave_at_any_point_leave_nothing(
    stack: Stack, model: tuple[Path, Reference]
) -> None:
    async with AsyncClient(stack.endpoint) as client:

        async def leave(number: int) -> None:
            seen = 0
            async for delta in client.stream(prompts(16)[number], temperature=0.0, max_tokens=200):
                seen += len(delta.token_ids)
                if seen >= number // 2:
                    return

        await asyncio.gather(*map(leave, range(16)), ask(client, prompts(1)[0]))
        status = await until_idle(client, 1)
        job = await ask(client, prompts(1)[0])

    assert status.live_requests == 0
    assert_right([job], model[1])


def test_stack_worker_killed_costs_a_pause_and_no_token(stack: Stack, model: tuple[Path, Reference]) -> None:
    worker = stack.workers[0]
    prompt = prompts(1)[0]
    with Client(stack.endpoint) as client:
        deltas = iter(client.stream(prompt, temperature=0.0, max_tokens=250, ignore_eos=True))
        output = list(next(delta for delta in deltas if delta.token_ids).token_ids)
        worker.kill()
        worker.start()
        output += [token for delta in deltas for token in delta.token_ids]

    assert_right([EngineJob(prompt, SamplingParams(), output=output)], model[1], 250)


@pytest.mark.vllm
@pytest.mark.slow
def test_stack_tensor_parallel_rank_killed_is_a_lost_worker_and_the_request_goes_on(
    model: tuple[Path, Reference], tmp_path: Path
) -> None:
    with running(model[0], tmp_path, (*VLLM, "--tensor-parallel-size", str(RANKS))) as stack:
        stack.wait_ready(READY_S)
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
    assert_right([EngineJob(prompt, SamplingParams(), output=output)], model[1], 300)
