"""Bad input over real ports: each fault is named by its field, none is the server's, and others go on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from octavo.v1 import common_pb2, operations_pb2
from octavo.v1 import generation_pb2 as pb

from tests.e2e.scheduler_stack import WAIT_S, Stack, error_of, one_worker, request

pytestmark = pytest.mark.asyncio(loop_scope="module")
CONTEXT = 1024


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with one_worker({"max_model_len": CONTEXT}) as (stack, _):
        yield stack


async def refused(stack: Stack, **fields: Any) -> common_pb2.Error:
    """Run a request that must be refused, and return the error; both trailers must say the same."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.generate(**fields)
    return error_of(caught.value)


CASES: list[tuple[str, dict[str, Any], str]] = [
    ("empty text", {"text": ""}, "text"),
    ("no input", {}, "input"),
    ("no tokens", {"tokens": {}}, "tokens.ids"),
    ("no messages", {"chat": {}}, "chat.messages"),
    ("negative temperature", {"text": "a", "sampling": {"temperature": -1}}, "sampling.temperature"),
    ("NaN top_p", {"text": "a", "sampling": {"top_p": float("nan")}}, "sampling.top_p"),
    ("infinite min_p", {"text": "a", "sampling": {"min_p": float("inf")}}, "sampling.min_p"),
    ("max_tokens 0", {"text": "a", "sampling": {"max_tokens": 0}}, "sampling.max_tokens"),
    ("n 0", {"text": "a", "sampling": {"n": 0}}, "sampling.n"),
    ("n 129", {"text": "a", "sampling": {"n": 129}}, "sampling.n"),
    ("empty stop string", {"text": "a", "sampling": {"stop": [""]}}, "sampling.stop"),
    ("structured, unset", {"text": "a", "sampling": {"structured": {}}}, "sampling.structured.kind"),
    ("token id out of range", {"tokens": {"ids": [1, 259, 3]}}, "tokens.ids[1]"),
    (
        "stop token out of range",
        {"text": "a", "sampling": {"stop_token_ids": [259]}},
        "sampling.stop_token_ids",
    ),
    ("bias out of range", {"text": "a", "sampling": {"logit_bias": {259: 1.0}}}, "sampling.logit_bias"),
    (
        "max_tokens beyond the context",
        {"text": "a", "sampling": {"max_tokens": CONTEXT}},
        "sampling.max_tokens",
    ),
    ("min over max", {"text": "a" * 1000, "sampling": {"min_tokens": 100}}, "sampling.min_tokens"),
    ("deadline 0", {"text": "a", "terms": {"deadline_ms": 0}}, "terms.deadline_ms"),
    ("unknown priority", {"text": "a", "terms": {"priority": 9}}, "terms.priority"),
    ("long request id", {"text": "a", "request_id": "x" * 129}, "request_id"),
    ("unknown role", {"chat": {"messages": [{"role": "wizard"}]}}, "chat.messages[0].role"),
    (
        "tools that are no JSON",
        {"chat": {"messages": [{"role": "user"}], "tools_json": "["}},
        "chat.tools_json",
    ),
    (
        "variables that are no object",
        {"chat": {"messages": [{"role": "user"}], "template_vars_json": "[]"}},
        "chat.template_vars_json",
    ),
    (
        "deeply nested tool calls",
        {"chat": {"messages": [{"role": "assistant", "tool_calls_json": "[" * 100_000}]}},
        "chat.messages[0].tool_calls_json",
    ),
    ("resume of no choice", {"text": "a", "resume": [{"choice": 1, "token_ids": [3]}]}, "resume[0].choice"),
    (
        "resume that showed too much",
        {"text": "a", "resume": [{"token_ids": [40], "shown_bytes": 9}]},
        "resume[0].shown_bytes",
    ),
    (
        "resume longer than what max_tokens was lowered to",
        {
            "text": "a",
            "resume": [{"token_ids": [40, 40]}],
            "terms": {"may_trim": True},
            "accepted_as": {"prompt_tokens": 1, "clamped_max_tokens": 1},
        },
        "resume[0].token_ids",
    ),
    ("accepted with an empty prompt", {"text": "a", "accepted_as": {}}, "accepted_as.prompt_tokens"),
    ("resumed token out of range", {"text": "a", "resume": [{"token_ids": [259]}]}, "resume[0].token_ids"),
]


@pytest.mark.parametrize(("fields", "field"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
async def test_bad_field_is_named(stack: Stack, fields: dict[str, Any], field: str) -> None:
    error = await refused(stack, **fields)
    assert error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert [violation.field for violation in error.violations] == [field]
    assert field in error.message


async def test_all_bad_fields_are_named_at_once(stack: Stack) -> None:
    error = await refused(stack, text="", sampling={"temperature": -1, "max_tokens": 0})
    assert {entry.field for entry in error.violations} == {
        "text",
        "sampling.temperature",
        "sampling.max_tokens",
    }


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 2_000_000])
async def test_prompt_that_does_not_fit_is_refused(stack: Stack, length: int) -> None:
    error = await refused(stack, text="x" * length)
    assert (error.reason, error.violations[0].field) == ("PROMPT_TOO_LONG", "text")


async def test_unknown_model_is_not_found_and_the_known_are_named(stack: Stack) -> None:
    error = await refused(stack, text="a", model="gpt-9")
    assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND.value[0], "UNKNOWN_MODEL")
    assert "echo" in error.message


async def test_structured_output_is_refused_by_name(stack: Stack) -> None:
    error = await refused(stack, text="a", sampling={"structured": {"regex": "a*"}})
    assert (error.code, error.reason) == (grpc.StatusCode.UNIMPLEMENTED.value[0], "UNSUPPORTED")
    assert "structured" in error.message


def raw(stack: Stack, method: str = "Generate") -> Any:
    channel: Any = stack.channel
    return channel.unary_stream(f"/octavo.v1.Generation/{method}")


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (request(text="@@"), "text"),
        (request(sampling={"stop": ["a", "@@"]}, text="a"), "sampling.stop[1]"),
        (
            request(chat={"messages": [{"role": "user"}, {"role": "user", "content": "@@"}]}),
            "chat.messages[1].content",
        ),
    ],
)
async def test_text_that_is_not_utf8_is_named(stack: Stack, message: pb.GenerateRequest, field: str) -> None:
    data = message.SerializeToString().replace(b"@@", b"\xff\xfe")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [event async for event in raw(stack)(data)]
    error = error_of(caught.value)
    assert error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert [entry.field for entry in error.violations] == [field]


async def test_bytes_that_are_no_message_are_refused(stack: Stack) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [event async for event in raw(stack)(b"\xff\xff\xff")]
    assert error_of(caught.value).reason == "INVALID_REQUEST"


async def test_huge_message_is_refused_and_others_go_on(stack: Stack) -> None:
    running = stack.generation.Generate(pb.GenerateRequest(text="steady"), timeout=WAIT_S)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.generate(text="x" * 100_000_000)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in (caught.value.details() or "")
    assert [event async for event in running]
    assert (await stack.generate(text="after")).text[0] == "after"


async def test_watch_status_interval_too_short_is_refused(stack: Stack) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stack.operations.WatchStatus(operations_pb2.WatchStatusRequest(interval_ms=1)):
            pass
    assert error_of(caught.value).violations[0].field == "interval_ms"


async def test_refused_requests_are_accounted_for(stack: Stack) -> None:
    before = (await stack.status()).outcomes["INVALID_REQUEST"]
    await refused(stack, text="")
    await refused(stack, text="a", sampling={"n": 0})
    assert (await stack.status()).outcomes["INVALID_REQUEST"] == before + 2
