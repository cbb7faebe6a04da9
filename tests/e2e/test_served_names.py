"""A model under names of its own, with the sampling that comes with it, from worker to client."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from octavo.aio import AsyncClient
from octavo.errors import OctavoError
from octavo.sampling import SamplingParams
from prometheus_client import generate_latest

from tests.e2e.gateway_stack import served
from tests.e2e.scheduler_stack import EchoRunner, scheduler, start_worker, until
from worker_svc.runner.base import StepBatch, StepResult
from worker_svc.runner.sim import built_in_model

NAMES = "chat,gpt-4,default"


async def test_model_answers_to_each_of_its_names_by_sdk_and_by_http() -> None:
    async with served({"served_model_name": NAMES}) as one:
        async with AsyncClient(f"127.0.0.1:{one.stack.port}") as client:
            (model,) = await client.models()
            assert (model.id, model.aliases) == ("chat", ("gpt-4", "default"))
            for name in NAMES.split(","):
                assert (await client.generate("hello", model=name)).text == "hello"
                assert (await one.complete(model=name, prompt="hello"))["choices"][0]["text"] == "hello"
            with pytest.raises(OctavoError, match=r"no model 'echo' here; there is chat, default, gpt-4 "):
                await client.generate("hello", model="echo")
            status = await client.status()
        refused = await one.post("/v1/completions", model="echo", prompt="hello")
        assert refused.status_code == 404
        assert "chat, default, gpt-4" in refused.json()["error"]["message"]
        listed = (await one.http.get("/v1/models")).json()["data"]
        metrics = generate_latest(one.stack.process.metrics.registry).decode()
    assert [(entry["id"], entry["root"]) for entry in listed] == [
        ("chat", "chat"),
        ("gpt-4", "chat"),
        ("default", "chat"),
    ]
    assert [worker.model for worker in status.workers] == ["chat"]
    # A request for a model that there is not counts for none.
    assert set(re.findall(r'model="([^"]*)"', metrics)) == {"chat", ""}


async def test_worker_with_other_names_for_the_same_model_is_not_attached() -> None:
    first = await start_worker("w1", served_model_name="chat,gpt-4")
    second = await start_worker("w2", served_model_name="gpt-4")
    try:
        async with scheduler(first.address, second.address) as stack:
            links = stack.process.fleet
            await until(lambda: sorted(link.status.state for link in links) == ["connecting", "ready"])
            (refused,) = (link for link in links if not link.attached)
            assert "workers of one model must have the same names" in refused.last_problem
    finally:
        await first.stop()
        await second.stop()


async def test_request_that_leaves_sampling_open_gets_what_comes_with_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[SamplingParams] = []
    execute = EchoRunner.execute

    def watch(self: EchoRunner, batch: StepBatch) -> StepResult:
        drawn.extend(sequence.sampling for sequence in batch.added)
        return execute(self, batch)

    monkeypatch.setattr(EchoRunner, "execute", watch)
    model = built_in_model()
    text = replace(model.text, generation_defaults=SamplingParams(temperature=0.25, top_p=0.5))
    async with served({"info": replace(model, text=text)}) as one:
        async with AsyncClient(f"127.0.0.1:{one.stack.port}") as client:
            await client.generate("hello")
            (described,) = (await client.status()).models
        await one.complete(prompt="hello")
        await one.chat(messages=[{"role": "user", "content": "hello"}])
        await one.complete(prompt="hello", temperature=1.0)
        (listed,) = (await one.http.get("/v1/models")).json()["data"]
    assert [(one.temperature, one.top_p) for one in drawn] == [(0.25, 0.5)] * 3 + [(1.0, 0.5)]
    told = {"temperature": 0.25, "top_p": 0.5, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert described.generation_defaults == listed["generation_defaults"] == told
