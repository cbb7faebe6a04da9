"""Quotas over real ports: whoever is over theirs is told so, and nobody else notices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import octavo
import pytest

from tests.e2e.scheduler_stack import Stack, Worker, scheduler, start_worker, until
from tests.e2e.test_scheduler_access import KEYS, key_file


@asynccontextmanager
async def service(path: Path, tenants: str, **flags: object) -> AsyncIterator[tuple[Stack, Worker]]:
    """A scheduler and a worker; each key is of the tenant of its name."""
    worker = await start_worker()
    try:
        key_file(path, *KEYS, tenants=tenants)
        async with scheduler(worker.address, key_file=path, **flags) as stack:
            await stack.wait_ready()
            yield stack, worker
    finally:
        await worker.stop()


def client(stack: Stack, name: str) -> octavo.AsyncClient:
    return octavo.AsyncClient(f"127.0.0.1:{stack.port}", api_key=KEYS[name])


PROMPT = "sixteen letters!"
# Quota, its limit, and how many requests use it up. Those per minute come back one in a minute.
LIMITS = [
    ("requests_in_flight", 4, 4),
    ("requests_per_minute", 1, 1),
    ("tokens_per_minute", 36, 1),
    ("waiting_requests", 4, 4),
    ("waiting_tokens", 64, 4),
]


async def test_tenant_over_a_quota_is_refused_and_the_others_are_not(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    limited = "".join(f"[tenants.{quota}]\n{quota} = {limit}\n" for quota, limit, _ in LIMITS)
    async with service(path, limited) as (stack, worker):
        worker.gate.close()
        async with client(stack, "gateway") as all_of_them, client(stack, "boss") as boss:

            def start(tenant: str) -> asyncio.Task[octavo.GenerateResult]:
                return asyncio.create_task(all_of_them.generate(PROMPT, max_tokens=20, api_key=KEYS[tenant]))

            running = [start(quota) for quota, _, fit in LIMITS for _ in range(fit)]
            await until(lambda: stack.process.driver.snapshot().live_requests == 14)
            for quota, limit, _ in LIMITS:
                for _ in range(3):
                    with pytest.raises(octavo.OverloadedError) as caught:
                        await start(quota)
                    assert caught.value.reason == "QUOTA_EXCEEDED"
                    assert caught.value.metadata == {"tenant": quota, "quota": quota, "limit": str(limit)}
                    assert caught.value.retry_after_s is not None
                    assert caught.value.retry_after_s > 0
            running += [start("other") for _ in range(8)]
            await until(lambda: stack.process.driver.snapshot().live_requests == 22)
            tenants = {one.tenant: one for one in (await boss.status()).tenants}
            for quota, limit, fit in LIMITS:
                tenant = tenants[quota]
                assert (tenant.arrivals, tenant.over_quota) == (fit + 3, 3)
                assert tenant.requests_in_flight == tenant.waiting_requests == fit
                assert tenant.waiting_tokens == fit * 16
                assert getattr(tenant.quotas, quota) == limit
            assert tenants["other"].over_quota == 0
            worker.gate.open()
            for result in await asyncio.gather(*running):
                assert result.text == PROMPT
            status = await boss.status()
            assert {one.tenant: one.output_tokens for one in status.tenants} == {
                **{quota: fit * 17 for quota, _, fit in LIMITS},
                "other": 8 * 17,
            }
            assert status.outcomes == {"STOP": 22, "QUOTA_EXCEEDED": 15}


async def test_refusal_for_a_quota_reaches_no_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quotas = "[tenants.user]\nrequests_per_minute = 1\n"
    async with service(tmp_path / "keys.toml", quotas) as (stack, _), client(stack, "user") as user:
        await user.generate("once")
        monkeypatch.setattr(stack.process.pool, "encode", None)
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
        await until(lambda: access.authenticate(KEYS["user"]).quotas.requests_per_minute == 100)
        for _ in range(20):
            await user.generate("again")


async def test_batch_waits_for_its_tenants_quota_and_loses_nothing(tmp_path: Path) -> None:
    quotas = "[tenants.user]\nrequests_in_flight = 3\nrequests_per_minute = 600\n"
    prompts = [f"prompt number {index}" for index in range(40)]
    async with service(tmp_path / "keys.toml", quotas) as (stack, _), client(stack, "user") as user:
        results = await user.batch(prompts)
        assert [getattr(result, "text", result) for result in results] == prompts
        (state,) = stack.process.tenants
        assert (state.arrivals, state.over_quota) == (40, 0), "credits keep to the requests in flight"
        assert state._requests is not None
        # What comes back is less than what three at a time use up.
        state._requests.take(620, time.monotonic())
        results = await user.batch(prompts)
        assert [getattr(result, "text", result) for result in results] == prompts
        assert state.arrivals - state.over_quota == 80
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
