"""Workers that are killed, drained and stopped under load, as processes: requests pause and go on."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from octavo.aio import AsyncClient
from octavo.stack import Child, Stack, StackConfig
from octavo.types import GenerateResult

WAIT_S = 120.0
WORDS = [f"the story of number {number}" for number in range(8)]
ENOUGH_TOKENS = 400
"""At some 13 ms each: they still run after what a test does to them."""


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    config = StackConfig(
        model="sim",
        num_workers=2,
        worker_args=("--runner=sim",),
        scheduler_args=("--no-overload-control", "--worker-drain-grace-s=0.2"),
        folder=tmp_path,
    )
    with Stack(config) as started:
        started.wait_ready(WAIT_S)
        yield started


async def all_running(client: AsyncClient, count: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            running = [worker.running for worker in (await client.status()).workers]
            if sum(running) >= count and min(running):
                return
            await asyncio.sleep(0.05)


async def answers(client: AsyncClient) -> list[GenerateResult]:
    return await asyncio.gather(
        *(client.generate(words, max_tokens=ENOUGH_TOKENS, ignore_eos=True, seed=7) for words in WORDS)
    )


async def ended(child: Child) -> int:
    return await asyncio.to_thread(child.process.wait, WAIT_S)


async def test_requests_of_killed_and_drained_workers_go_on_and_say_what_they_would_have(
    stack: Stack,
) -> None:
    async with AsyncClient(stack.endpoint) as client:
        undisturbed = [one.token_ids for one in await answers(client)]

        running = asyncio.ensure_future(answers(client))
        await all_running(client, len(WORDS))
        stack.workers[0].kill()
        stack.workers[0].start()
        killed = await running

        await asyncio.to_thread(stack.wait_ready, WAIT_S)
        running = asyncio.ensure_future(answers(client))
        await all_running(client, len(WORDS))
        stack.workers[1].signal(signal.SIGTERM)
        assert await ended(stack.workers[1]) == 0
        assert not running.done(), "it did not wait for them: they have moved"
        drained = await running

    assert [one.token_ids for one in killed] == undisturbed
    assert [one.token_ids for one in drained] == undisturbed
