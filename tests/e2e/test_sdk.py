"""The SDK against real processes: a scheduler and workers that are killed, drained and restarted."""

from __future__ import annotations

import asyncio
import signal

import pytest
from octavo import (
    AsyncClient,
    DeadlineExceededError,
    FinishReason,
    GenerateResult,
    OverloadedError,
    Status,
    UnavailableError,
)
from octavo.stack import Stack, StackConfig

PROMPTS = [f"prompt number {index} " * (1 + index % 5) for index in range(12)]


async def until_idle(client: AsyncClient, num_workers: int = 1) -> Status:
    """Wait until nothing runs anywhere; returns the status in which that was so."""
    async with asyncio.timeout(30):
        async for status in client.watch_status(0.1):
            ready = [worker for worker in status.workers if worker.state == "ready"]
            quiet = all(worker.running == 0 and worker.pool.active == 0 for worker in ready)
            if len(ready) == num_workers and quiet and status.live_requests == 0:
                return status
    raise AssertionError("the status stream ended")


async def generate_all(client: AsyncClient) -> list[GenerateResult]:
    return list(
        await asyncio.gather(
            *(
                client.generate(prompt, max_tokens=60, seed=index, n=1 + index % 2)
                for index, prompt in enumerate(PROMPTS)
            )
        )
    )


def tokens(results: list[GenerateResult]) -> list[list[tuple[int, ...]]]:
    return [[choice.token_ids for choice in result.choices] for result in results]


async def test_generate_seeded_twice_gives_the_same_and_texts_agree(sim_stack: Stack) -> None:
    async with AsyncClient(sim_stack.endpoint) as client:
        first, second = await generate_all(client), await generate_all(client)

        assert tokens(first) == tokens(second)
        for result in first:
            assert all(choice.finish_reason is FinishReason.LENGTH for choice in result.choices)
            assert result.text == await client.detokenize(result.token_ids)


async def test_stream_deltas_add_up_to_the_result(sim_stack: Stack) -> None:
    async with AsyncClient(sim_stack.endpoint) as client:
        stream = client.chat_stream("hello", max_tokens=40, n=2)
        texts, ids = ["", ""], [[], []]  # type: ignore[var-annotated]
        async for delta in stream:
            texts[delta.choice] += delta.text
            ids[delta.choice] += delta.token_ids

        assert texts == [choice.text for choice in stream.result.choices]
        assert [tuple(one) for one in ids] == [choice.token_ids for choice in stream.result.choices]


async def test_tokenize_and_detokenize_are_inverse(sim_stack: Stack) -> None:
    async with AsyncClient(sim_stack.endpoint) as client:
        text = "Grüße, 世界 🎉"
        tokenized = await client.tokenize(text, pieces=True)

        assert await client.detokenize(tokenized.token_ids) == text
        assert len(tokenized.pieces) == len(tokenized.token_ids)
        (model,) = await client.models()
        assert tokenized.max_model_len == model.max_model_len
        assert len((await client.tokenize_chat(text)).token_ids) > len(tokenized.token_ids)


async def test_task_cancelled_gives_its_blocks_back(sim_stack: Stack) -> None:
    async with AsyncClient(sim_stack.endpoint) as client:
        streams = [client.stream(f"prompt {index}", max_tokens=5000) for index in range(8)]
        tasks = [asyncio.create_task(_drain(stream)) for stream in streams]
        await asyncio.gather(*(stream.wait_accepted() for stream in streams))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

        status = await until_idle(client)
        pool = status.workers[0].pool
        assert pool.free + pool.evictable == pool.total


@pytest.mark.parametrize("phase", ["sent", "accepted", "running"])
@pytest.mark.parametrize("n", [1, 2])
async def test_request_id_reused_after_a_close_is_a_request_of_its_own(
    sim_stack: Stack, phase: str, n: int
) -> None:
    async with AsyncClient(sim_stack.endpoint) as client, asyncio.timeout(60):
        alone = await client.generate("new", max_tokens=20, seed=2, n=n)
        for _ in range(5):
            stream = client.stream("old", max_tokens=5000, seed=1, n=n, request_id="same")
            await asyncio.sleep(0)
            if phase != "sent":
                await stream.wait_accepted()
            if phase == "running":
                await anext(stream)
            await stream.aclose()
            again = await client.generate("new", max_tokens=20, seed=2, n=n, request_id="same")

            assert tokens([again]) == tokens([alone])


async def _drain(stream: object) -> None:
    async for _ in stream:  # type: ignore[attr-defined]
        pass


async def test_client_that_vanishes_gives_its_blocks_back(sim_stack: Stack) -> None:
    async with AsyncClient(sim_stack.endpoint) as watcher:
        client = AsyncClient(sim_stack.endpoint)
        stream = client.stream("hello", max_tokens=5000)
        await anext(stream)
        await client.aclose()

        await until_idle(watcher)


async def test_deadline_passes_while_running_keeps_the_partial_output(sim_stack: Stack) -> None:
    async with AsyncClient(sim_stack.endpoint) as client:
        with pytest.raises(DeadlineExceededError) as caught:
            await client.generate("hello", max_tokens=5000, deadline=5)

        assert caught.value.reason == "DEADLINE_RUNNING"
        assert caught.value.phase == "decode"
        assert caught.value.partial is not None
        assert len(caught.value.partial.token_ids) > 0
        await until_idle(client)


async def test_batch_larger_than_the_queue_is_paced_and_complete(own_stack: Stack) -> None:
    async with AsyncClient(own_stack.endpoint) as client:
        ends = await client.batch((f"prompt {index}" for index in range(700)), max_tokens=2, ignore_eos=True)

    assert [len(end.token_ids) for end in ends if isinstance(end, GenerateResult)] == [2] * 700


async def test_worker_killed_in_the_middle_costs_a_pause_and_no_token(own_stack: Stack) -> None:
    async with AsyncClient(own_stack.endpoint) as client:
        expected = await generate_all(client)
        running = await _running(client)
        own_stack.workers[0].kill()

        assert tokens(await running) == tokens(expected)
        own_stack.workers[0].start()
        await until_idle(client, num_workers=2)


async def test_scheduler_killed_in_the_middle_costs_a_pause_and_no_token(own_stack: Stack) -> None:
    async with AsyncClient(own_stack.endpoint) as client:
        expected = await generate_all(client)
        whole = (await client.generate("streamed", max_tokens=60, seed=77)).text
        running = asyncio.create_task(generate_all(client))
        stream = client.stream("streamed", max_tokens=60, seed=77)
        text = (await anext(stream)).text
        own_stack.scheduler.kill()
        own_stack.scheduler.start()
        async for delta in stream:
            text += delta.text

        assert text == whole == stream.result.text
        assert tokens(await running) == tokens(expected)


async def test_scheduler_restarted_gracefully_fails_no_request(own_stack: Stack) -> None:
    async with AsyncClient(own_stack.endpoint) as client:
        expected = await generate_all(client)
        running = await _running(client)
        own_stack.scheduler.signal(signal.SIGTERM)
        late = asyncio.create_task(client.generate("late", max_tokens=5))
        await asyncio.to_thread(own_stack.scheduler.process.wait, 60)
        own_stack.scheduler.start()

        assert tokens(await running) == tokens(expected)
        assert len((await late).token_ids) == 5


async def _running(client: AsyncClient) -> asyncio.Task[list[GenerateResult]]:
    """Start all requests, again if they ended before anybody saw them run."""
    running = asyncio.create_task(generate_all(client))
    async with asyncio.timeout(60):
        async for status in client.watch_status(0.1):
            if running.done():
                running = asyncio.create_task(generate_all(client))
            elif sum(worker.running for worker in status.workers) > 4:
                return running
    raise AssertionError("the status stream ended")


async def test_worker_drained_finishes_elsewhere(own_stack: Stack) -> None:
    async with AsyncClient(own_stack.endpoint) as client:
        expected = await generate_all(client)
        running = await _running(client)
        own_stack.workers[1].signal(signal.SIGTERM)

        assert tokens(await running) == tokens(expected)
        assert await asyncio.to_thread(own_stack.workers[1].process.wait, 60) == 0


async def test_queue_full_refuses_with_a_retry_delay() -> None:
    config = StackConfig(
        model="sim",
        worker_args=("--runner", "sim", "--max-num-seqs", "1"),
        scheduler_args=("--max-waiting-requests", "2"),
    )
    with Stack(config) as stack:
        stack.wait_ready(120)
        async with AsyncClient(stack.endpoint) as client:
            streams = [client.stream(f"p{index}", max_tokens=3000) for index in range(20)]
            accepted = await asyncio.gather(*(stream.wait_accepted() for stream in streams))
            errors = []
            for stream, taken in zip(streams, accepted, strict=True):
                if taken is None:
                    with pytest.raises(OverloadedError) as caught:
                        await anext(stream)
                    errors.append(caught.value)

    assert len(errors) >= 16
    assert {error.reason for error in errors} == {"QUEUE_FULL"}
    assert all(error.retry_after_s for error in errors)


async def test_no_worker_at_all_is_unavailable_or_waits_out_the_queue(own_stack: Stack) -> None:
    for worker in own_stack.workers:
        worker.kill()
    async with AsyncClient(own_stack.endpoint, reconnect_timeout=1) as client:
        with pytest.raises((UnavailableError, DeadlineExceededError)):
            await client.generate("hello", max_tokens=5, deadline=1.5)
