"""What a resumed request costs: nothing for what had ended, and only what no cache has for the rest."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
from octavo.v1 import operations_pb2

from tests.e2e.scheduler_stack import Stack, scheduler, start_worker, until

PROMPT = "a prompt that is long enough for some blocks of sixteen tokens each " * 3
BLOCK = 16


async def pool_of(stack: Stack) -> operations_pb2.PoolStatus:
    return (await stack.status()).workers[0].pool


async def test_resumed_request_finds_its_prompt_and_its_output_in_the_cache_of_the_worker() -> None:
    """The scheduler that had it is gone; the worker is still there, with what it had computed."""
    worker = await start_worker()
    try:
        async with scheduler(worker.address) as stack:
            await stack.wait_ready()
            whole = await stack.generate(text=PROMPT, return_token_ids=True)
        async with scheduler(worker.address) as stack:
            await stack.wait_ready()
            had = whole.token_ids[0][:100]
            before = await pool_of(stack)
            resume = [{"choice": 0, "token_ids": had, "shown_bytes": len(PROMPT[:100])}]
            rest = await stack.generate(text=PROMPT, resume=resume)
            assert PROMPT[:100] + rest.text[0] == PROMPT
            known = len(PROMPT) + len(had)
            assert rest.finished[0].usage.cached_tokens == len(PROMPT)
            after = await pool_of(stack)
            assert after.hit_tokens - before.hit_tokens == (known - 1) // BLOCK * BLOCK
            await until(worker.is_empty)
    finally:
        await worker.stop()


@pytest.mark.parametrize("finished", [{0}, {1, 2}, {0, 1, 2}])
async def test_choices_that_had_ended_are_not_computed_again(finished: set[int]) -> None:
    worker = await start_worker()
    try:
        async with scheduler(worker.address) as stack:
            await stack.wait_ready()
            resume = [{"choice": choice, "finished": True} for choice in finished]
            output = await stack.generate(text=PROMPT, sampling={"n": 3}, resume=resume)
            assert set(output.finished) == {0, 1, 2}
            assert set(output.text) == {0, 1, 2} - finished
            status = await stack.status()
            assert status.outcomes == {"STOP": 1}
            assert (status.workers[0].steps == 0) == (len(finished) == 3)
            assert status.workers[0].pool.miss_tokens <= len(PROMPT) + BLOCK
            for choice, end in output.finished.items():
                assert end.usage.completion_tokens == (0 if choice in finished else len(PROMPT) + 1)
    finally:
        await worker.stop()


async def fill_with_others(stack: Stack, prompts: int) -> None:
    """Use up the pool, so that what was in it moves to the host tier."""
    for number in range(prompts):
        await stack.generate(text=f"{number:03} other things fill the pool " * 6)


async def test_blocks_in_the_host_tier_survive_the_scheduler() -> None:
    worker = await start_worker(num_blocks=40, max_num_seqs=2, max_model_len=512, host_kv_bytes=64 << 20)
    try:
        async with AsyncExitStack() as stacks:
            stack = await stacks.enter_async_context(scheduler(worker.address))
            await stack.wait_ready()
            whole = await stack.generate(text=PROMPT, return_token_ids=True)
            await fill_with_others(stack, 6)
        async with scheduler(worker.address) as stack:
            await stack.wait_ready()
            before = await pool_of(stack)
            had = whole.token_ids[0][:100]
            resume = [{"choice": 0, "token_ids": had, "shown_bytes": len(PROMPT[:100])}]
            rest = await stack.generate(text=PROMPT, resume=resume)
            assert PROMPT[:100] + rest.text[0] == PROMPT
            after = await pool_of(stack)
            assert after.host_hit_tokens - before.host_hit_tokens >= BLOCK
            await until(worker.is_empty)
    finally:
        await worker.stop()
