"""Tenants behind one gateway, and what operators' figures show of them to nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import octavo
import pytest

from tests.e2e.gateway_stack import gateway
from tests.e2e.scheduler_stack import Stack, Worker, scheduler, start_worker, until
from tests.e2e.test_scheduler_access import KEYS, bearer, key_file

PROMPT = "a long prompt that fills more than one block of sixteen tokens"
Served = tuple[httpx.AsyncClient, Stack, Worker]


@pytest.fixture
async def shared(tmp_path: Path) -> AsyncIterator[Served]:
    """A gateway, whose requests go over one session, whoever they are of."""
    own = tmp_path / "own.key"
    own.write_text(KEYS["gateway"])
    worker = await start_worker()
    try:
        path = key_file(tmp_path / "keys.toml", "user", "other", "boss", "gateway")
        async with scheduler(worker.address, key_file=path) as stack:
            await stack.wait_ready()
            async with gateway(f"127.0.0.1:{stack.port}", api_key_file=own) as (http, _):
                yield http, stack, worker
    finally:
        await worker.stop()


async def test_tenants_of_one_gateway_may_give_requests_the_same_id(shared: Served) -> None:
    http, stack, worker = shared

    async def ask(name: str, prompt: str) -> httpx.Response:
        headers = {**dict(bearer(name)), "x-request-id": "same"}
        return await http.post("/v1/completions", json={"prompt": prompt}, headers=headers)

    worker.gate.close()
    one = asyncio.create_task(ask("user", "of one"))
    await until(lambda: stack.process.accounts.live == 1)
    leaving = asyncio.create_task(ask("other", "that leaves"))
    other = asyncio.create_task(ask("other", "of the other"))
    await until(lambda: stack.process.accounts.live == 3)
    leaving.cancel()
    await until(lambda: stack.process.accounts.live == 2)
    worker.gate.open()
    answers = [await one, await other]
    assert [answer.json()["choices"][0]["text"] for answer in answers] == ["of one", "of the other"]
    assert [answer.headers["x-request-id"] for answer in answers] == ["same", "same"]


async def test_prefix_of_a_tenant_is_cached_for_no_other_behind_one_gateway(shared: Served) -> None:
    http, _, _ = shared

    async def cached(name: str, **body: str) -> int:
        body["prompt"] = PROMPT
        answer = await http.post("/v1/completions", json=body, headers=dict(bearer(name)))
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert await cached("user") == await cached("other") == 0
    # A salt of one's own narrows, and names nobody else's.
    for salt in ("user", "user\0", "other"):
        assert await cached("other", cache_salt=salt) == 0
    assert await cached("user") == await cached("other") > 0


async def test_response_of_another_tenant_cannot_be_continued(shared: Served) -> None:
    """Not its own either: nothing is stored, whatever was asked."""
    http, _, _ = shared
    body = {"input": "remember this", "store": True}
    answer = (await http.post("/v1/responses", json=body, headers=dict(bearer("user")))).json()
    assert answer["store"] is False
    for name in ("other", "user"):
        headers = dict(bearer(name))
        body = {"input": "what was it?", "previous_response_id": answer["id"]}
        refused = await http.post("/v1/responses", json=body, headers=headers)
        assert refused.status_code == 400
        assert "previous_response_id" in refused.json()["error"]["param"]
        for path in (f"/v1/responses/{answer['id']}", f"/v1/chat/completions/{answer['id']}"):
            assert (await http.get(path, headers=headers)).status_code == 404


async def test_gateway_names_no_tenant_to_another(shared: Served) -> None:
    http, _, _ = shared
    await http.post("/v1/completions", json={"prompt": PROMPT}, headers=dict(bearer("other")))
    headers = dict(bearer("user"))
    for path in ("/v1/models", "/v1/models/echo", "/openapi.json", "/health", "/version"):
        assert '"other"' not in (await http.get(path, headers=headers)).text
    operators = (await http.get("/metrics", headers=dict(bearer("boss")))).text
    assert "octavo_" in operators
    assert '"other"' not in operators


async def test_usage_and_status_show_tenants_to_operators_alone(shared: Served) -> None:
    http, stack, _ = shared
    await http.post("/v1/completions", json={"prompt": PROMPT}, headers=dict(bearer("other")))
    endpoint = f"127.0.0.1:{stack.port}"
    async with octavo.AsyncClient(endpoint, api_key=KEYS["user"]) as client:
        for look in (client.usage, client.status):
            with pytest.raises(octavo.AccessDeniedError) as caught:
                await look()
            assert caught.value.reason == "ROLE_REQUIRED"
    async with octavo.AsyncClient(endpoint, api_key=KEYS["boss"]) as client:
        assert "other" in str(await client.usage())
        assert "other" in str(await client.status())
