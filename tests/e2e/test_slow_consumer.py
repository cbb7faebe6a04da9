"""Clients that stop reading, against a scheduler process: they are cut, and cost nobody else a token."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest
from octavo import AsyncClient, GenerateResult
from octavo.stack import Stack, StackConfig
from octavo.v1 import common_pb2, generation_pb2_grpc
from octavo.v1 import generation_pb2 as pb

from tests.e2e.scheduler_stack import WAIT_S, error_of, until

WORKER = ("--runner=sim", "--sim-speed=1000", "--max-num-seqs=256", "--num-blocks=12000")
SCHEDULER = ("--max-backlog-bytes=65536",)
# Without this the client's own gRPC takes in megabytes that nobody reads.
NARROW = [("grpc.http2.bdp_probe", 0)]
FLOOD = common_pb2.SamplingParams(max_tokens=1900, ignore_eos=True, n=8, seed=1)
STEADY = 31
GROWTH_BYTES = 32 << 20


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    config = StackConfig(model="sim", scheduler_args=SCHEDULER, worker_args=WORKER, folder=tmp_path)
    with Stack(config) as stack:
        stack.wait_ready(120)
        yield stack


async def everybody(client: AsyncClient) -> list[GenerateResult]:
    """What the clients that read get: each a stream of its own output."""

    async def one(index: int) -> GenerateResult:
        stream = client.stream(f"prompt {index}", seed=index, max_tokens=300, ignore_eos=True)
        deltas = [delta async for delta in stream]
        result = stream.result
        assert "".join(delta.text for delta in deltas) == result.text
        assert tuple(token for delta in deltas for token in delta.token_ids) == result.token_ids
        return result

    return await asyncio.gather(*map(one, range(STEADY)))


@pytest.mark.slow
async def test_clients_that_stop_reading_are_cut_and_the_others_lose_no_token(stack: Stack) -> None:
    memory = psutil.Process(stack.scheduler.process.pid)
    async with (
        AsyncClient(stack.endpoint) as client,
        grpc.aio.insecure_channel(stack.endpoint, options=NARROW) as channel,
    ):
        stub = generation_pb2_grpc.GenerationStub(channel)
        alone = await everybody(client)
        before = memory.memory_info().rss

        session = stub.Session()  # type: ignore[call-arg] # written to instead
        for index in range(4):
            request = pb.GenerateRequest(
                request_id=f"slow-{index}", text="x", sampling=FLOOD, return_token_ids=True
            )
            await session.write(pb.SessionRequest(generate=request))
        request = pb.GenerateRequest(text="x", sampling=FLOOD, return_token_ids=True)
        request.sampling.n = 24
        single = stub.Generate(request)

        again = await everybody(client)
        await until(lambda: _cut(client, 5))
        more = await everybody(client)

        assert memory.memory_info().rss - before < GROWTH_BYTES
        for results in (again, more):
            for result, expected in zip(results, alone, strict=True):
                assert result.token_ids == expected.token_ids
                assert len(result.token_ids) == 300
        status = await client.status()
        assert status.outcomes == {"LENGTH": 3 * STEADY, "SLOW_CONSUMER": 5}
        assert status.live_requests == 0
        assert [worker.running for worker in status.workers] == [0]
        for call in (session, single):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asyncio.wait_for(_read_all(call), WAIT_S)
            assert error_of(caught.value).reason == "SLOW_CONSUMER"


async def _read_all(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def _cut(client: AsyncClient, requests: int) -> bool:
    status = await client.status()
    return status.outcomes.get("SLOW_CONSUMER", 0) == requests and not status.live_requests
