"""The OpenAI API over real ports: a gateway, a scheduler, a worker, and a model that repeats its prompt."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.e2e.gateway_stack import Served, served

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one() -> AsyncIterator[Served]:
    async with served() as one:
        yield one


def events(answer: httpx.Response) -> list[Any]:
    """The events of a stream, which has to end as OpenAI's do."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    parts = answer.text.removesuffix("\n\n").split("\n\n")
    assert parts[-1] == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-1]]


async def test_completion_whole_has_text_reason_and_usage(one: Served) -> None:
    answer = await one.complete(model="echo", prompt="Grüße, 世界! 🎉", max_tokens=100)

    (choice,) = answer["choices"]
    assert choice == {
        "index": 0,
        "text": "Grüße, 世界! 🎉",
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    prompt_tokens = len("Grüße, 世界! 🎉".encode())
    assert answer["usage"]["prompt_tokens"] == prompt_tokens
    assert answer["usage"]["completion_tokens"] == prompt_tokens + 1
    assert answer["usage"]["total_tokens"] == 2 * prompt_tokens + 1
    assert answer["object"] == "text_completion"
    assert answer["model"] == "echo"


async def test_completion_without_max_tokens_makes_16_as_vllm_serve(one: Served) -> None:
    answer = await one.complete(prompt="a prompt of more than sixteen characters")

    assert answer["choices"][0]["text"] == "a prompt of more"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["model"] == "echo"


@pytest.mark.parametrize("given", [{}, {"max_tokens": None}])
async def test_max_tokens_null_is_the_same_as_left_out(one: Served, given: dict[str, Any]) -> None:
    prompt = "a prompt of more than sixteen characters"
    completion = {"prompt": prompt, **given}
    chat = {"messages": [{"role": "user", "content": prompt}], **given}
    rest = (await one.chat(**chat, max_completion_tokens=900))["choices"][0]["message"]["content"]

    streamed = events(await one.post("/v1/completions", **completion, stream=True))
    assert (await one.complete(**completion))["choices"][0]["text"] == "a prompt of more"
    assert "".join(event["choices"][0]["text"] for event in streamed) == "a prompt of more"
    streamed = events(await one.post("/v1/chat/completions", **chat, stream=True))
    assert (await one.chat(**chat))["choices"][0]["message"]["content"] == rest
    assert "".join(event["choices"][0]["delta"]["content"] for event in streamed) == rest


async def test_echoed_prompt_with_line_separators_leaves_each_event_a_line(one: Served) -> None:
    prompt = "a\u2028b\u2029c\x85d"
    answer = await one.post("/v1/completions", prompt=prompt, echo=True, max_tokens=1, stream=True)

    lines = [line for line in answer.text.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert "".join(event["choices"][0]["text"] for event in events(answer)) == prompt + "a"


async def test_completion_streamed_says_what_the_whole_one_says(one: Served) -> None:
    body = {"prompt": ["one two", "three"], "n": 2, "max_tokens": 100, "seed": 7}
    whole = await one.complete(**body)
    streamed = events(
        await one.post("/v1/completions", **body, stream=True, stream_options={"include_usage": True})
    )

    texts = ["", "", "", ""]
    reasons: list[Any] = [None] * 4
    for event in streamed[:-1]:
        (choice,) = event["choices"]
        assert reasons[choice["index"]] is None
        texts[choice["index"]] += choice["text"]
        reasons[choice["index"]] = choice["finish_reason"]
    assert texts == ["one two", "one two", "three", "three"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert reasons == ["stop"] * 4
    assert streamed[-1]["choices"] == []
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert streamed[-1]["usage"][name] == whole["usage"][name]
    assert len({event["id"] for event in streamed}) == 1


async def test_completion_of_token_ids_echoed_begins_with_their_text(one: Served) -> None:
    tokens = (await one.post("/tokenize", prompt="abc")).json()["tokens"]

    for prompt in (tokens, "abc"):
        answer = await one.complete(prompt=prompt, echo=True, max_tokens=2)
        assert answer["choices"][0]["text"] == "abcab"
        streamed = events(
            await one.post("/v1/completions", prompt=prompt, echo=True, max_tokens=2, stream=True)
        )
        assert "".join(event["choices"][0]["text"] for event in streamed) == "abcab"


async def test_completion_stop_string_across_deltas_is_never_shown(one: Served) -> None:
    body = {"prompt": "one two three four", "stop": ["thr", "three"], "max_tokens": 100}
    whole = await one.complete(**body)
    streamed = events(await one.post("/v1/completions", **body, stream=True))

    assert whole["choices"][0]["text"] == "one two "
    assert whole["choices"][0]["stop_reason"] == "thr"
    assert "".join(event["choices"][0]["text"] for event in streamed) == "one two "
    assert streamed[-1]["choices"][0]["finish_reason"] == "stop"
    assert streamed[-1]["choices"][0]["stop_reason"] == "thr"
    assert whole["usage"]["completion_tokens"] == len("one two thr")


async def test_completion_stop_token_id_is_the_stop_reason(one: Served) -> None:
    (b,) = (await one.post("/tokenize", prompt="b")).json()["tokens"]
    answer = await one.complete(prompt="abc", stop_token_ids=[b], return_token_ids=True)

    assert answer["choices"][0]["text"] == "a"
    assert answer["choices"][0]["stop_reason"] == b
    assert answer["choices"][0]["token_ids"][-1] == b


async def test_completion_logprobs_name_whole_characters_where_they_end(one: Served) -> None:
    answer = await one.complete(prompt="aé", logprobs=1, max_tokens=3)

    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "", "é"]
    assert logprobs["text_offset"] == [0, 1, 1]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["top_logprobs"] == [{"a": -0.5}, {"": -0.5}, {"é": -0.5}]
    streamed = events(await one.post("/v1/completions", prompt="aé", logprobs=1, max_tokens=3, stream=True))
    tokens = [token for event in streamed for token in event["choices"][0]["logprobs"]["tokens"]]
    assert tokens == ["a", "", "é"]
    named = await one.complete(prompt="a", logprobs=0, max_tokens=1, return_tokens_as_token_ids=True)
    assert named["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:")


async def test_chat_takes_the_template_system_prompts_and_text_parts(one: Served) -> None:
    parts = [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}]
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": parts}]
    answer = await one.chat(messages=messages, max_tokens=500)

    counted = (await one.post("/tokenize", messages=messages)).json()
    rendered = (await one.post("/detokenize", tokens=counted["tokens"])).json()["prompt"]
    assert "be kind" in rendered
    assert "first\nsecond" in rendered
    assert answer["usage"]["prompt_tokens"] == counted["count"]
    assert answer["choices"][0]["message"]["content"] in rendered
    assert answer["object"] == "chat.completion"


async def test_chat_streamed_begins_with_the_role_of_each_choice(one: Served) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "n": 2, "max_completion_tokens": 9}
    whole = await one.chat(**body)
    streamed = events(await one.post("/v1/chat/completions", **body, stream=True))

    contents = ["", ""]
    roles: list[Any] = [None, None]
    for event in streamed:
        (choice,) = event["choices"]
        roles[choice["index"]] = roles[choice["index"]] or choice["delta"].get("role")
        contents[choice["index"]] += choice["delta"]["content"]
    assert roles == ["assistant", "assistant"]
    assert contents == [choice["message"]["content"] for choice in whole["choices"]]
    assert {event["object"] for event in streamed} == {"chat.completion.chunk"}


async def test_chat_logprobs_carry_bytes(one: Served) -> None:
    answer = await one.chat(
        messages=[{"role": "user", "content": "é"}], logprobs=True, top_logprobs=1, max_tokens=500
    )

    content = answer["choices"][0]["logprobs"]["content"]
    text = answer["choices"][0]["message"]["content"]
    assert "é" in text
    # Special tokens are no text, but tokens all the same.
    assert (
        "".join(entry["token"] for entry in content)
        == bytes(b for one in content for b in one["bytes"]).decode()
    )
    assert "é" in "".join(entry["token"] for entry in content)
    assert content[0]["top_logprobs"][0]["token"] == content[0]["token"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "use_beam_search": True}, "use_beam_search"),
        ({"prompt": "x", "no_such_thing": 1}, "no_such_thing"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 5000}, "max_tokens"),
        ({"prompt": "x", "n": 1000}, "n"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "logit_bias": {"99999": 1}}, "logit_bias"),
        ({"prompt": "x", "stop": ["a"] * 17}, "stop"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "x", "response_format": {"type": "json_object"}}, "response_format"),
        ({"prompt": "x", "structured_outputs": {"regex": "a+"}}, "structured_outputs"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, 99999]}, "prompt[1]"),
        ({"prompt": "x" * 2000}, "prompt"),
        ({}, "prompt"),
    ],
)
async def test_completion_refused_names_the_parameter(one: Served, body: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        if "stream_options" in body and stream:
            continue
        answer = await one.post("/v1/completions", **body, stream=stream)

        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == param, error
        assert param in error["message"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_completion_tokens": 5000}, "max_completion_tokens"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ],
)
async def test_chat_refused_names_the_parameter(one: Served, change: dict[str, Any], param: str) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], **change}
    answer = await one.post("/v1/chat/completions", **body)

    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


async def test_parameters_that_ask_for_nothing_are_taken(one: Served) -> None:
    neutral = {
        "suffix": None,
        "best_of": 1,
        "logprobs": None,
        "use_beam_search": False,
        "stop": None,
        "n": None,
    }
    answer = await one.complete(prompt="abc", **neutral)

    assert answer["choices"][0]["text"] == "abc"


async def test_unknown_model_is_404(one: Served) -> None:
    answer = await one.post("/v1/completions", model="nope", prompt="x")

    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert answer.json()["error"]["param"] == "model"


async def test_bodies_that_are_no_json_are_refused_with_words(one: Served) -> None:
    broken = await one.http.post(
        "/v1/completions", content=b'{"prompt": ', headers={"content-type": "application/json"}
    )
    plain = await one.http.post("/v1/completions", content=b"hello")
    surrogate = await one.http.post(
        "/v1/completions", content=rb'{"prompt": "\ud800"}', headers={"content-type": "application/json"}
    )
    deep = await one.http.post(
        "/v1/completions", content=b"[" * 100_000, headers={"content-type": "application/json"}
    )

    assert (broken.status_code, plain.status_code) == (400, 415)
    assert (surrogate.status_code, deep.status_code) == (400, 400)
    assert "not JSON" in broken.json()["error"]["message"]


async def test_headers_of_ours_are_checked_and_unknown_ones_refused(one: Served) -> None:
    for name, value in (
        ("x-octavo-priority", "urgent"),
        ("x-octavo-deadline-ms", "soon"),
        ("x-octavo-degrade", "may_lie"),
        ("x-octavo-keep-head-tokens", "99999999999"),
        ("x-octavo-nothing", "1"),
    ):
        answer = await one.http.post("/v1/completions", json={"prompt": "x"}, headers={name: value})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == name


async def test_request_id_of_the_client_comes_back(one: Served) -> None:
    answer = await one.http.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "mine-1"})

    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.json()["id"].startswith("cmpl-mine-1-")


async def test_models_health_version_and_document(one: Served) -> None:
    models = (await one.http.get("/v1/models")).json()
    assert [model["id"] for model in models["data"]] == ["echo"]
    assert models["data"][0]["max_model_len"] == 1024
    assert (await one.http.get("/v1/models/echo")).json()["id"] == "echo"
    assert (await one.http.get("/v1/models/nope")).status_code == 404
    assert (await one.http.get("/health")).status_code == 200
    assert "version" in (await one.http.get("/version")).json()
    document = (await one.http.get("/openapi.json")).json()
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize"} <= document["paths"].keys()


async def test_tokenize_and_detokenize_are_inverse(one: Served) -> None:
    found = (await one.post("/tokenize", prompt="Grüße 🎉", return_token_strs=True)).json()

    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 1024
    assert (await one.post("/detokenize", tokens=found["tokens"])).json() == {"prompt": "Grüße 🎉"}


async def test_special_tokens_that_tokenize_took_come_back(one: Served) -> None:
    turn = "<|im_start|>user\nhello<|im_end|>\n"
    of_text = (await one.post("/tokenize", prompt=turn)).json()["tokens"]
    messages = [{"role": "user", "content": "hello"}]
    of_chat = (await one.post("/tokenize", messages=messages, add_generation_prompt=False)).json()["tokens"]

    assert len(of_text) < len(turn)  # The special tokens are tokens, not their letters.
    assert of_text == of_chat
    assert (await one.post("/detokenize", tokens=of_chat)).json() == {"prompt": turn}
    echoed = await one.complete(prompt=of_chat, echo=True, max_tokens=1)
    assert echoed["choices"][0]["text"].startswith(turn)


async def test_metrics_count_requests_and_tokens(one: Served) -> None:
    before = await one.metric("octavo_gateway_output_tokens_total", endpoint="completions")
    await one.complete(prompt="abc", max_tokens=3)

    assert await one.metric("octavo_gateway_output_tokens_total", endpoint="completions") == before + 3
    assert await one.metric("octavo_gateway_requests_total", endpoint="completions", status="200") >= 1
    assert await one.metric("octavo_gateway_running_requests", endpoint="completions") == 0
    refused = await one.metric("octavo_gateway_requests_total", endpoint="completions", status="400")
    await one.post("/v1/completions", prompt="abc", nonsense=1)
    assert (
        await one.metric("octavo_gateway_requests_total", endpoint="completions", status="400") == refused + 1
    )
