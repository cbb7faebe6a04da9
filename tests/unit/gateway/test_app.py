"""The HTTP application in front of a fake scheduler."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from octavo import AsyncClient
from octavo.gateway.app import create_app
from octavo.gateway.config import GatewaySettings

from tests.unit.client.fake_scheduler import FakeScheduler


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    scheduler = FakeScheduler()
    await scheduler.start()
    async with AsyncClient(scheduler.endpoint) as client:
        app = create_app(GatewaySettings.load({}), client)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as one:
            yield one
    await scheduler.stop()


@pytest.mark.parametrize("key", ["clé", "a\tb", "two words"])
@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/tokenize"])
async def test_key_that_cannot_be_passed_on_is_401_and_not_repeated(
    http: httpx.AsyncClient, path: str, key: str
) -> None:
    headers = {b"authorization": f"Bearer {key}".encode("latin-1")}
    method, body = ("GET", None) if path == "/v1/models" else ("POST", {"model": "fake", "prompt": "x"})
    answer = await http.request(method, path, json=body, headers=headers)

    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert key not in answer.text


async def test_models_list_other_names_and_adapters_after_their_model(http: httpx.AsyncClient) -> None:
    served = (await http.get("/v1/models")).json()["data"]

    assert [(one["id"], one["root"], one["parent"]) for one in served] == [
        ("fake", "fake", None),
        ("other", "fake", None),
        ("fake-sql", "fake-sql", "fake"),
    ]
    assert (await http.get("/v1/models/fake-sql")).json() == served[2]
    assert (await http.get("/v1/models/none")).status_code == 404


async def test_models_tell_the_sampling_that_comes_with_them_as_it_was_written(
    http: httpx.AsyncClient,
) -> None:
    assert (await http.get("/v1/models/fake")).json()["generation_defaults"] == {
        "temperature": 0.2,
        "top_k": 0,
    }
