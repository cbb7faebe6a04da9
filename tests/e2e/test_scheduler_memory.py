"""KV memory as clients and operators see it over real ports: figures, tiers, pins."""

from __future__ import annotations

import asyncio
from typing import Any

import octavo
import pytest
from octavo.v1 import operations_pb2

from tests.e2e.scheduler_stack import Stack, one_worker, scheduler, start_worker, until
from worker_svc.runner.sim import KV_BYTES_PER_TOKEN

BLOCK = 16
CHARACTERS = 40
"""Of a prompt; a token each."""


async def pool(stack: Stack) -> Any:
    """The pool of the only worker, as the status has it."""
    (worker,) = (await stack.status()).workers
    return worker.pool


async def crowd(stack: Stack, count: int, length: int = 112) -> None:
    """Run prompts that share nothing, one after the other."""
    for number in range(count):
        await stack.generate(text=f"{number:04}" * (length // 4), sampling={"max_tokens": 1})


async def test_status_says_what_the_blocks_of_a_running_sequence_hold() -> None:
    async with one_worker({"num_blocks": 64}) as (stack, worker):
        worker.gate.close()
        running = asyncio.create_task(stack.generate(text="x" * CHARACTERS))
        worker.gate.let_go(1)

        async def has_run() -> bool:
            return bool((await pool(stack)).active)

        await until(has_run)
        during = await pool(stack)
        worker.gate.open()
        await running
        await until(worker.is_empty)

    # The prompt is computed, the token after it is not.
    blocks = CHARACTERS // BLOCK + 1
    assert (during.total, during.block_size, during.active) == (64, BLOCK, blocks)
    assert during.free + during.evictable + during.active == during.total
    assert during.internal_fragmentation == pytest.approx((blocks * BLOCK - CHARACTERS) / (blocks * BLOCK))
    assert during.external_fragmentation == 0.0
    assert (during.step_active, during.step_internal_fragmentation) == (
        during.active,
        during.internal_fragmentation,
    )
    assert (during.host_total, during.copied_out_bytes, during.copy_out_us_per_block) == (0, 0, 0.0)


async def test_status_says_what_the_host_tier_cost_and_saved() -> None:
    async with one_worker({"num_blocks": 64, "num_host_blocks": 64}) as (stack, worker):
        prompt = "the prompt that comes back " * 5
        await stack.generate(text=prompt, sampling={"max_tokens": 1})
        await crowd(stack, 10)
        again = await stack.generate(text=prompt, sampling={"max_tokens": 1})
        await until(worker.is_empty)
        after = await pool(stack)

    assert again.finished[0].usage.cached_tokens == len(prompt) // BLOCK * BLOCK
    assert after.host_total == 64
    assert after.host_free < 64
    back = after.host_hit_tokens
    assert 0 < back <= after.recompute_saved_tokens
    assert after.copied_in_bytes == after.recompute_saved_tokens * KV_BYTES_PER_TOKEN
    assert after.copied_out_bytes >= after.copied_in_bytes
    assert after.copy_in_us_per_block > 0
    assert after.copy_out_us_per_block > 0


async def test_audit_names_what_is_broken_and_the_worker_serves_on() -> None:
    workers = [await start_worker(name, check_integrity=False) for name in ("sound", "broken")]
    sound, broken = workers

    def lose_a_block(engine: Any) -> None:
        engine.memory._pool._free.take(1)

    try:
        async with scheduler(*(worker.address for worker in workers)) as stack:
            await stack.wait_ready(2)
            async with octavo.AsyncClient(f"127.0.0.1:{stack.port}") as client:
                for worker in workers:
                    worker.gate.close()
                running = [asyncio.create_task(client.generate(f"{n} runs meanwhile")) for n in range(4)]
                await until(lambda: _both_run(stack))
                audits = asyncio.create_task(client.audit())
                for worker in workers:
                    worker.gate.open()
                assert [(one.worker_id, one.ok) for one in await audits] == [
                    ("broken", True),
                    ("sound", True),
                ]
                await asyncio.gather(*running)

                await broken.loop.call(lose_a_block)
                found, fine = await client.audit()
                assert found.violation is not None
                assert (fine.worker_id, fine.ok, fine.blocks) == ("sound", True, sound.num_blocks)
                assert [one.ok for one in await client.audit("sound")] == [True]
                assert len(await asyncio.gather(*(client.generate(f"{n} after") for n in range(4)))) == 4
                with pytest.raises(octavo.NotFoundError):
                    await client.audit("nobody")
                await broken.server.stop(0)
                assert [one.worker_id for one in await client.audit() if one.ok] == ["sound"]
    finally:
        for worker in workers:
            await worker.stop()


async def _both_run(stack: Stack) -> bool:
    """Whether each worker runs something; who comes late waits behind the steps that are held."""
    return all(worker.running for worker in (await stack.status()).workers)


async def test_pins_of_every_form_are_kept_by_the_workers_that_have_room() -> None:
    text = "a system prompt that many requests share, word for word"
    chat = [octavo.ChatMessage("system", "x" * CHARACTERS)]
    workers = [
        await start_worker("large", pin_budget_blocks=20),
        await start_worker("small", pin_budget_blocks=4),
        await start_worker("contiguous", kv_layout="contiguous"),
    ]
    try:
        async with scheduler(*(worker.address for worker in workers)) as stack:
            await stack.wait_ready(3)
            async with octavo.AsyncClient(f"127.0.0.1:{stack.port}") as client:
                first = await client.pin_prefix("text", text)
                again = await client.pin_prefix("tokens", (await client.tokenize(text)).token_ids)
                turns = await client.pin_prefix("chat", chat)
                rendered = await client.tokenize_chat(chat, add_generation_prompt=False)
                # The same blocks under another name take no more of the budget.
                assert first == again
                assert first.blocks == len(text) // BLOCK
                assert (first.workers, first.without_room) == (2, ("contiguous",))
                assert (turns.tokens, turns.workers) == (len(rendered.token_ids), 1)
                assert turns.without_room == ("contiguous", "small")

                await asyncio.gather(*(client.generate(f"{text} and {n}") for n in range(8)))
                kept = {pin.name: (pin.blocks, pin.workers) for pin in (await client.status()).pins}
                assert kept == {
                    "text": (first.blocks, ("large", "small")),
                    "tokens": (first.blocks, ("large", "small")),
                    "chat": (turns.blocks, ("large",)),
                }
                for name in ("text", "tokens", "chat"):
                    await client.unpin_prefix(name)
                assert (await client.status()).pins == ()
                with pytest.raises(octavo.UnsupportedError) as caught:
                    await client.pin_prefix("wide", "y" * 1000)
                assert caught.value.reason == "PIN_BUDGET"
    finally:
        for worker in workers:
            await worker.stop()


async def test_pinned_prefix_is_cached_after_any_load_and_a_lifted_one_is_not() -> None:
    system = "a system prompt that many requests share, word for word"
    blocks = len(system) // BLOCK

    async def cached(stack: Stack) -> int:
        output = await stack.generate(text=f"{system} and more", sampling={"max_tokens": 1})
        return int(output.finished[0].usage.cached_tokens)

    async with one_worker({"num_blocks": 72, "max_model_len": 1024}) as (stack, worker):
        await stack.operations.PinPrefix(operations_pb2.PinPrefixRequest(name="system", text=system))
        assert await cached(stack) == 0
        await crowd(stack, 15)
        assert await cached(stack) == blocks * BLOCK
        assert (await pool(stack)).pinned == blocks

        # Another prefix under the same name takes its place.
        other = operations_pb2.PinPrefixRequest(name="system", text="z" * 100)
        await stack.operations.PinPrefix(other)
        await crowd(stack, 15)
        assert await cached(stack) == 0

        await stack.operations.UnpinPrefix(operations_pb2.UnpinPrefixRequest(name="system"))
        await until(worker.is_empty)
        await crowd(stack, 1)
        assert (await pool(stack)).pinned == 0
