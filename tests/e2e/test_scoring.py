"""What is read off prompts, and parameters of vLLM that few use, from SDK and HTTP down to a worker."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from octavo.aio import AsyncClient
from octavo.errors import InvalidRequestError

from tests.e2e.gateway_stack import Served, served
from tests.e2e.scheduler_stack import scheduler, start_worker, until

PROMPT = list(range(40, 40 + 70))
"""More than four blocks of 16."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one() -> AsyncIterator[Served]:
    async with served({"block_size": 16, "max_num_batched_tokens": 24}) as one:
        yield one


pytestmark = pytest.mark.asyncio(loop_scope="module")


def check_scores(scores: Any, prompt: list[int]) -> None:
    """The echo worker says -p/16 at position p, and of the first token nothing."""
    assert [entry.token_id for entry in scores] == prompt
    assert scores[0].rank == 0
    assert [entry.logprob for entry in scores[1:]] == [-at / 16 for at in range(1, len(prompt))]


async def test_sdk_prompt_logprobs_are_whole_in_every_run_of_a_cached_prompt(one: Served) -> None:
    async with AsyncClient(f"127.0.0.1:{one.stack.port}") as client:
        for _ in range(2):
            result = await client.generate(PROMPT, prompt_logprobs=2, max_tokens=4)
            check_scores(result.prompt_logprobs, PROMPT)
            assert result.usage.cached_tokens == 0
            assert list(result.token_ids) == PROMPT[:4]
        cached = await client.generate(PROMPT, max_tokens=4)
        assert cached.usage.cached_tokens == 64
        assert cached.prompt_logprobs == ()
        choices = await client.generate(PROMPT, prompt_logprobs=0, max_tokens=2, n=3)
        check_scores(choices.prompt_logprobs, PROMPT)


async def test_sdk_scores_alone_generate_nothing(one: Served) -> None:
    async with AsyncClient(f"127.0.0.1:{one.stack.port}") as client:
        result = await client.generate(PROMPT[:5], prompt_logprobs=1, max_tokens=0)
        check_scores(result.prompt_logprobs, PROMPT[:5])
        assert (result.text, result.token_ids, result.usage.completion_tokens) == ("", (), 0)
        assert (await client.generate([50], prompt_logprobs=1, max_tokens=0)).prompt_logprobs[0].rank == 0
        with pytest.raises(InvalidRequestError):
            await client.generate(PROMPT, max_tokens=0)


async def test_sdk_prompt_logprobs_survive_the_loss_of_the_worker_without_a_gap_or_a_repetition() -> None:
    flags = {"block_size": 16, "max_num_batched_tokens": 24}
    first, second = await start_worker("w1", **flags), await start_worker("w2", **flags)
    async with scheduler(first.address, second.address) as stack:
        await stack.wait_ready(2)
        async with AsyncClient(f"127.0.0.1:{stack.port}") as client:
            for worker in (first, second):
                worker.gate.close()
            stream = client.stream(PROMPT, prompt_logprobs=1, max_tokens=6)
            for worker in (first, second):
                worker.gate.let_go(2)
            await until(lambda: len(stream.prompt_logprobs) > 24)
            live = {w.worker_id: w for w in (first, second)}
            (busy,) = [w for w in live.values() if await _runs(stack, w.worker_id)]
            await busy.stop()
            for worker in live.values():
                worker.gate.open()
            async for _ in stream:
                pass
            check_scores(stream.result.prompt_logprobs, PROMPT)
            assert list(stream.result.token_ids) == PROMPT[:6]
            assert stream.result.timings.recoveries == 1
    for worker in (first, second):
        if worker is not busy:
            await worker.stop()


async def _runs(stack: Any, worker_id: str) -> bool:
    status = await stack.status()
    return any(one.worker_id == worker_id and one.running for one in status.workers)


async def test_sdk_embeddings_are_of_length_one_and_the_same_for_the_same_text(one: Served) -> None:
    async with AsyncClient(f"127.0.0.1:{one.stack.port}") as client:
        for pooling in ("last", "mean"):
            result = await client.embed([PROMPT, PROMPT, [60, 61]], pooling=pooling)
            first, again, other = result.embeddings
            assert first == pytest.approx(again)
            assert first != pytest.approx(other)
            assert sum(value**2 for value in first) == pytest.approx(1.0, abs=1e-5)
            assert result.prompt_tokens == 2 * len(PROMPT) + 2
        assert len((await client.embed("a text")).embeddings) == 1


async def test_http_embeddings_as_numbers_and_as_base64_are_the_same(one: Served) -> None:
    body = {"input": ["one", "two"], "pooling": "mean", "user": "me"}
    numbers = (await one.post("/v1/embeddings", **body)).json()
    packed = (await one.post("/v1/embeddings", **body, encoding_format="base64")).json()
    assert [item["index"] for item in numbers["data"]] == [0, 1]
    for plain, coded in zip(numbers["data"], packed["data"], strict=True):
        data = base64.b64decode(coded["embedding"])
        assert list(struct.unpack(f"<{len(data) // 4}f", data)) == pytest.approx(plain["embedding"])
    assert numbers["usage"] == {"prompt_tokens": 6, "total_tokens": 6}


@pytest.mark.parametrize(
    "body", [{"input": []}, {"input": ""}, {"input": "x", "dimensions": 8}, {"input": "x", "pooling": "cls"}]
)
async def test_http_embeddings_that_cannot_be_are_refused(one: Served, body: dict[str, Any]) -> None:
    assert (await one.post("/v1/embeddings", **body)).status_code == 400


async def test_http_echo_with_logprobs_begins_with_those_of_the_prompt(one: Served) -> None:
    for max_tokens in (0, 1):
        body = {"prompt": "hello", "echo": True, "logprobs": 2, "max_tokens": max_tokens}
        (choice,) = (await one.complete(**body))["choices"]
        logprobs = choice["logprobs"]
        assert choice["text"] == "hello" + "h"[:max_tokens]
        assert logprobs["tokens"] == [*"hello", *"h"[:max_tokens]]
        assert logprobs["token_logprobs"][:5] == [None, *(-at / 16 for at in range(1, 5))]
        assert logprobs["top_logprobs"][0] is None
        assert len(logprobs["top_logprobs"][1]) == 3
        assert logprobs["text_offset"] == list(range(5 + max_tokens))
        answer = await one.post("/v1/completions", **body, stream=True)
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]
        tokens = [token for event in events for token in event["choices"][0]["logprobs"]["tokens"]]
        assert tokens == logprobs["tokens"]


async def test_http_prompt_logprobs_are_as_those_of_vllm(one: Served) -> None:
    completion = await one.complete(prompt=["ab", "c"], prompt_logprobs=1, max_tokens=1)
    first, second = (choice["prompt_logprobs"] for choice in completion["choices"])
    assert (first[0], second) == (None, [None])
    own, *best = first[1].values()
    assert own == {"logprob": -1 / 16, "rank": 1, "decoded_token": "b"}
    assert [one["rank"] for one in best] == [1, 2]
    chat = await one.chat(messages=[{"role": "user", "content": "x"}], prompt_logprobs=0, max_tokens=1)
    assert chat["prompt_logprobs"][0] is None
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    refused = await one.post("/v1/completions", prompt="a", prompt_logprobs=1, stream=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")


async def test_http_stop_string_is_in_the_output_where_that_is_wanted(one: Served) -> None:
    body = {"prompt": "one two three", "stop": "two", "max_tokens": 50}
    for shows, text in ((False, "one "), (True, "one two")):
        (choice,) = (await one.complete(**body, include_stop_str_in_output=shows))["choices"]
        assert (choice["text"], choice["stop_reason"]) == (text, "two")


async def test_http_stream_interval_makes_fewer_events_of_the_same_text(one: Served) -> None:
    body = {"prompt": "abcdefghij", "max_tokens": 10, "stream": True, "ignore_eos": True}
    answer = await one.post("/v1/completions", **body, stream_interval=4, return_token_ids=True)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    sizes = [len(event["choices"][0]["token_ids"]) for event in events]
    assert "".join(event["choices"][0]["text"] for event in events) == "abcdefghij"
    assert all(size >= 4 for size in sizes[1:-1])


async def test_http_prompt_is_truncated_from_the_left(one: Served) -> None:
    answer = await one.complete(prompt="abcdef", truncate_prompt_tokens=2, max_tokens=2)
    assert answer["choices"][0]["text"] == "ef"
    assert answer["usage"]["prompt_tokens"] == 2
    long = await one.complete(prompt="x" * 1500, truncate_prompt_tokens=-1, max_tokens=3)
    assert long["usage"]["prompt_tokens"] == 1024 - 3
    refused = await one.post("/v1/completions", prompt="abc", truncate_prompt_tokens=0)
    assert refused.status_code == 400


async def test_http_final_message_goes_on_without_an_end(one: Served) -> None:
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Well, "}]
    body = {"messages": turns, "skip_special_tokens": False, "ignore_eos": True}
    size = (await one.chat(**body, continue_final_message=True, max_tokens=1))["usage"]["prompt_tokens"]
    answer = await one.chat(**body, continue_final_message=True, max_tokens=size)
    prompt = answer["choices"][0]["message"]["content"]
    assert prompt == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\nWell, "
    both = await one.post(
        "/v1/chat/completions", **body, continue_final_message=True, add_generation_prompt=True
    )
    assert both.status_code == 400


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("allowed_token_ids", [10**6]),
        ("bad_words", [" "]),
        ("bad_words", ["x" * 300]),
        ("bad_words_token_ids", [[]]),
        ("logprob_token_ids", [1]),
        ("priority", 5000),
        ("stream_interval", 0),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", -1),
        ("max_tokens", 0),
    ],
)
async def test_http_parameter_that_is_wrong_is_named(one: Served, field: str, value: Any) -> None:
    answer = await one.post("/v1/completions", prompt="x", **{field: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(field)
