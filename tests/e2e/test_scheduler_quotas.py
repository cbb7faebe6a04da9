"""Quotas over real ports: whoever is over theirs is told so, and nobody else notices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import octavo
import pytest

from tests.e2e.scheduler_stack import Stack, Worker, scheduler, start_worker, until
from tests.e2e.test_scheduler_access import KEYS, key_file


@asynccontextmanager
async def service(path: Path, tenants: str, **flags: object) -> AsyncIterator[tuple[Stack, Worker]]:
    """A scheduler and a worker; the keys of `user` and `other` are of the tenants of these names."""
    worker = await start_worker()
    try:
        key_file(path, "user", "other", "boss", "gateway", tenants=tenants)
        async with scheduler(worker.address, key_file=path, **flags) as stack:
            await stack.wait_ready()
            yield stack, worker
    finally:
        await worker.stop()


def client(stack: Stack, name: str) -> octavo.AsyncClient:
    return octavo.AsyncClient(f"127.0.0.1:{stack.port}", api_key=KEYS[name])


@pytest.mark.parametrize(
    ("quota", "limit"),
    [
        ("requests_in_flight", 4),
        ("requests_per_minute", 4),
        ("tokens_per_minute", 4 * 36),
        ("waiting_requests", 4),
        ("waiting_tokens", 4 * 16),
    ],
)
async def test_tenant_over_a_quota_is_refused_and_the_others_are_not(
    tmp_path: Path, quota: str, limit: int
) -> None:
    async with service(tmp_path / "keys.toml", f"[tenants.user]\n{quota} = {limit}\n") as (stack, worker):
        worker.gate.close()
        async with client(stack, "gateway") as both, client(stack, "boss") as boss:
            prompt = "sixteen letters!"
            running = [
                asyncio.create_task(both.generate(prompt, max_tokens=20, api_key=KEYS["user"]))
                for _ in range(4)
            ]
            await until(lambda: stack.process.driver.snapshot().live_requests == 4)
            for _ in range(3):
                with pytest.raises(octavo.OverloadedError) as caught:
                    await both.generate(prompt, max_tokens=20, api_key=KEYS["user"])
                assert caught.value.reason == "QUOTA_EXCEEDED"
                assert caught.value.metadata == {"tenant": "user", "quota": quota, "limit": str(limit)}
                assert caught.value.retry_after_s is not None
                assert caught.value.retry_after_s > 0
            others = [
                asyncio.create_task(both.generate(prompt, max_tokens=20, api_key=KEYS["other"]))
                for _ in range(8)
            ]
            await until(lambda: stack.process.driver.snapshot().live_requests == 12)
            tenants = {one.tenant: one for one in (await boss.status()).tenants}
            assert (tenants["user"].arrivals, tenants["user"].over_quota) == (7, 3)
            assert tenants["user"].requests_in_flight == tenants["user"].waiting_requests == 4
            assert tenants["user"].waiting_tokens == 4 * 16
            assert getattr(tenants["user"].quotas, quota) == limit
            assert tenants["other"].over_quota == 0
            worker.gate.open()
            for result in await asyncio.gather(*running, *others):
                assert result.text == prompt
            status = await boss.status()
            assert {one.tenant: one.output_tokens for one in status.tenants} == {
                "user": 4 * 17,
                "other": 8 * 17,
            }
            assert status.outcomes == {"STOP": 12, "QUOTA_EXCEEDED": 3}


async def test_refusal_for_a_quota_reaches_no_tokenizer(tmp_path: Path) -> None:
    quotas = "[tenants.user]\nrequests_per_minute = 1\n"
    async with service(tmp_path / "keys.toml", quotas) as (stack, _), client(stack, "user") as user:
        await user.generate("once")
        await stack.process.pool.close()
        with pytest.raises(octavo.OverloadedError):
            await user.generate("twice")


async def test_quotas_follow_the_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    quotas = "[tenants.user]\nrequests_per_minute = 1\n"
    async with service(path, quotas) as (stack, _), client(stack, "user") as user:
        await user.generate("once")
        with pytest.raises(octavo.OverloadedError):
            await user.generate("twice")
        key_file(path, "user", tenants="[tenants.user]\nrequests_per_minute = 100\n")
        access = stack.process.access
        await until(lambda: access.tenant(KEYS["user"]).quotas.requests_per_minute == 100)
        for _ in range(20):
            await user.generate("again")


async def test_batch_waits_for_its_tenants_quota_and_loses_nothing(tmp_path: Path) -> None:
    quotas = "[tenants.user]\nrequests_in_flight = 3\nrequests_per_minute = 6000\n"
    async with service(tmp_path / "keys.toml", quotas) as (stack, _), client(stack, "user") as user:
        prompts = [f"prompt number {index}" for index in range(40)]
        results = await user.batch(prompts)
        assert [getattr(result, "text", result) for result in results] == prompts
        (state,) = stack.process.tenants
        assert state.arrivals - state.over_quota == 40
        assert state.over_quota > 0


async def test_weights_of_the_file_reach_the_fair_policy(tmp_path: Path) -> None:
    """Twice the weight, twice the tokens, while both have more than enough to do."""
    path, weight = tmp_path / "keys.toml", "[tenants.user]\nweight = 2\n"
    order: list[str] = []
    async with (
        service(path, weight, policy="fair", max_num_seqs=1) as (stack, worker),
        client(stack, "gateway") as both,
    ):

        async def run(name: str) -> None:
            await both.generate("0123456789abcdef", max_tokens=4, api_key=KEYS[name])
            order.append(name)

        worker.gate.close()
        tasks = [asyncio.create_task(run(name)) for name in ("other", "user") for _ in range(12)]
        await until(lambda: stack.process.driver.snapshot().live_requests == 24)
        worker.gate.open()
        await asyncio.gather(*tasks)
    assert 7 <= order[:12].count("user") <= 9
