"""Tools and thoughts through a whole stack: a simulated model says anything that its grammar allows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
import pytest_asyncio
from octavo import AsyncClient
from pydantic import BaseModel, Field

from tests.e2e.gateway_stack import Served, served
from tests.e2e.scheduler_stack import until
from worker_svc.runner.sim import SimRunner, built_in_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{{ (tools or []) | tojson }}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking | default(true) %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "pattern": "^[a-zé]{1,6}$"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]
ASK = [{"role": "user", "content": "How is Paris?"}]
BUDGET = 12
"""A token of this model is a byte, at most a character."""


class City(BaseModel):
    city: str = Field(pattern="^[a-zé]{1,6}$")


def model(name: str, template: str) -> dict[str, Any]:
    """A worker of it."""
    info = built_in_model()
    text = replace(info.text, chat_template=template)
    return {"info": replace(info, model_id=name, text=text), "runner": SimRunner}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def thinker() -> AsyncIterator[Served]:
    async with served(model("thinker", TEMPLATE)) as one:
        yield one


def deltas(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    events = [json.loads(line) for line in lines[:-1]]
    return [event["choices"][0]["delta"] for event in events if event["choices"]]


async def asked(one: Served, **more: Any) -> dict[str, Any]:
    """The message that comes whole, which is the one that comes in pieces."""
    body = {"messages": ASK, "max_tokens": 400, "seed": 1, "thinking_token_budget": BUDGET, **more}
    whole: dict[str, Any] = (await one.chat(**body))["choices"][0]["message"]
    streamed: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for delta in deltas(await one.post("/v1/chat/completions", **body, stream=True)):
        for name in ("content", "reasoning_content"):
            streamed[name] += delta.get(name) or ""
        for piece in delta.get("tool_calls", ()):
            if piece["index"] == len(streamed["tool_calls"]):
                assert piece["id"]
                streamed["tool_calls"].append({"name": piece["function"]["name"], "arguments": ""})
            streamed["tool_calls"][piece["index"]]["arguments"] += piece["function"]["arguments"]
    assert streamed["content"] == (whole["content"] or "")
    assert streamed["reasoning_content"] == whole.get("reasoning_content", "")
    assert streamed["tool_calls"] == [call["function"] for call in whole.get("tool_calls", ())]
    return whole


def assert_bounded(message: dict[str, Any]) -> None:
    """It has thought for as long as it might: this model finds no end by itself."""
    assert 0 < len(message["reasoning_content"]) <= BUDGET


# Calls -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
async def test_model_that_must_calls_offered_tools_by_their_schemas(thinker: Served, seed: int) -> None:
    message = await asked(thinker, tools=TOOLS, tool_choice="required", seed=seed)

    assert_bounded(message)
    assert message["content"] is None
    for call in message["tool_calls"]:
        arguments = json.loads(call["function"]["arguments"])
        assert arguments.keys() == ({"city"} if call["function"]["name"] == "weather" else set())


async def test_only_one_call_where_more_are_not_wanted(thinker: Served) -> None:
    message = await asked(thinker, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)

    assert len(message["tool_calls"]) == 1


async def test_named_function_gets_its_arguments_and_takes_part_in_what_follows(thinker: Served) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    message = await asked(thinker, tools=TOOLS, tool_choice=choice)
    (call,) = message["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "Rain."}
    again = await asked(thinker, messages=[*ASK, message, result], tools=TOOLS, tool_choice="none")

    City.model_validate_json(call["function"]["arguments"])
    assert again["content"]
    assert "tool_calls" not in again


async def test_calls_are_the_same_when_requests_push_each_other_out() -> None:
    body = {"messages": ASK, "tools": TOOLS, "tool_choice": "required", "max_tokens": 300}
    body["chat_template_kwargs"] = {"enable_thinking": False}

    async def calls(one: Served, seed: int) -> list[str]:
        choice = (await one.chat(**body, seed=seed))["choices"][0]
        return [call["function"]["arguments"] for call in choice["message"]["tool_calls"]]

    async with served(model("thinker", TEMPLATE)) as one:
        alone = [await calls(one, seed) for seed in range(6)]
    async with served(model("thinker", TEMPLATE) | {"num_blocks": 56}) as one:
        together = await asyncio.gather(*(calls(one, seed) for seed in range(6)))
        figures = await one.worker.pool()

    assert together == alone
    assert figures.active == 0


async def test_client_that_goes_away_in_a_call_leaves_nothing_behind(thinker: Served) -> None:
    schema = {"type": "object", "properties": {"text": {"type": "string", "minLength": 900}}}
    tool = {"type": "function", "function": {"name": "say", "parameters": {**schema, "required": ["text"]}}}
    body = {"messages": ASK, "tools": [tool], "tool_choice": "required", "thinking_token_budget": 0}
    async with thinker.http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
        async for line in answer.aiter_lines():
            if '"arguments":"' in line and "tool_calls" in line:
                break

    await until(thinker.worker.is_empty)


# Thoughts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0, 1, BUDGET])
async def test_thoughts_end_when_their_budget_does(thinker: Served, budget: int) -> None:
    message = await asked(thinker, thinking_token_budget=budget, max_tokens=100)

    assert len(message.get("reasoning_content", "")) <= budget
    assert message["content"]


async def test_thoughts_without_a_budget_go_on(thinker: Served) -> None:
    message = await asked(thinker, thinking_token_budget=-1, max_tokens=100, ignore_eos=True)

    assert len(message["reasoning_content"]) > BUDGET
    assert not message["content"]


@pytest.mark.parametrize("seed", range(3))
async def test_schema_holds_behind_the_thoughts(thinker: Served, seed: int) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    message = await asked(thinker, response_format=shape, seed=seed)

    assert_bounded(message)
    City.model_validate_json(message["content"])


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        ({"regex": "[a-c]{2}"}, lambda text: set(text) <= set("abc")),
        ({"choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"grammar": 'root ::= "x" [yz]'}, lambda text: text in ("xy", "xz")),
        (
            {"json": CITY, "disable_any_whitespace": True},
            lambda text: len(text) < 30 and City.model_validate_json(text),
        ),
        (
            {
                "structural_tag": json.dumps(
                    {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}
                )
            },
            lambda text: text == "a",
        ),
    ],
)
async def test_every_constraint_holds_behind_the_thoughts(
    thinker: Served, shape: dict[str, Any], fits: Any
) -> None:
    message = await asked(thinker, structured_outputs=shape)

    assert_bounded(message)
    assert fits(message["content"]), message


async def test_model_that_is_not_to_think_does_not(thinker: Served) -> None:
    message = await asked(
        thinker, reasoning_effort="none", structured_outputs={"regex": "[a-c]{2}"}, thinking_token_budget=None
    )

    assert message.get("reasoning_content") in (None, "")
    assert len(message["content"]) == 2


async def test_sdk_gives_an_instance_of_what_is_behind_the_thoughts(thinker: Served) -> None:
    async with AsyncClient(f"127.0.0.1:{thinker.stack.port}") as client:
        result = await client.chat(ASK, response_format=City, thinking_token_budget=BUDGET, max_tokens=200)

    assert result.in_reasoning
    assert isinstance(result.parsed, City)


async def test_messages_have_the_budget_of_their_thoughts(thinker: Served) -> None:
    answer = await thinker.post(
        "/v1/messages",
        model="thinker",
        max_tokens=100,
        messages=ASK,
        thinking={"type": "enabled", "budget_tokens": BUDGET},
    )

    thoughts, words = answer.json()["content"]
    assert (thoughts["type"], words["type"]) == ("thinking", "text")
    assert 0 < len(thoughts["thinking"]) <= BUDGET


async def test_budget_is_refused_where_nothing_keeps_to_it_and_messages_pass_over_it() -> None:
    async with served(model("plain", PLAIN)) as one:
        refused = await one.post("/v1/chat/completions", messages=ASK, thinking_token_budget=5)
        taken = await one.post(
            "/v1/messages",
            model="plain",
            max_tokens=5,
            messages=ASK,
            thinking={"type": "enabled", "budget_tokens": 1024},
        )

    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "thinking_token_budget"
    assert taken.status_code == 200, taken.text
