"""/v1/responses and /v1/messages: the same chat in other words."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from octavo.protocol.steps import FinishReason
from octavo.types import ChatMessage

from tests.unit.gateway.scripted import Script, events_of, gateway_of

FUNCTION = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOL = {"type": "function", **FUNCTION}
ANTHROPIC_TOOL = {"name": "weather", "input_schema": FUNCTION["parameters"]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TEXT = f"<think>\nHm.\n</think>\nI look.\n{CALL}"


def thinking(**more: Any) -> Script:
    return Script(TEXT, reasoning_format="think", **more)


# Responses ---------------------------------------------------------------------------------------


def response(**more: Any) -> dict[str, Any]:
    return {"model": "m", "input": "How is Paris?", "tools": [TOOL], **more}


@pytest.mark.parametrize("piece_chars", [1, 4, 1000])
async def test_response_comes_whole_and_streamed_alike(piece_chars: int) -> None:
    async with (
        gateway_of(thinking(piece_chars=piece_chars)) as http,
        openai.AsyncOpenAI(api_key="-", http_client=http, base_url="http://gateway/v1") as client,
    ):
        whole = await client.responses.create(**response())
        async with client.responses.stream(**response()) as stream:
            async for _ in stream:
                pass
            streamed = await stream.get_final_response()

    for answer in (whole, streamed):
        assert answer.status == "completed"
        thoughts, words, call = answer.output
        assert (thoughts.type, thoughts.content[0].text) == ("reasoning", "Hm.")  # type: ignore[union-attr,index]
        assert answer.output_text == "I look."
        assert words.type == "message"
        assert (call.type, call.name, call.arguments) == (  # type: ignore[union-attr]
            "function_call",
            "weather",
            '{"city": "Paris"}',
        )
        assert answer.store is False  # type: ignore[attr-defined]
        assert answer.usage is not None
        assert answer.usage.input_tokens_details.cached_tokens == 4


async def test_events_of_a_response_are_numbered_and_in_order() -> None:
    async with gateway_of(thinking(piece_chars=1000)) as http:
        answer = await http.post("/responses", json=response(stream=True))
    events = list(events_of(answer))

    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    part = ["content_part.added", "{}.delta", "{}.done", "content_part.done"]
    texts = ["reasoning_text", "output_text"]
    expected = ["created", "in_progress"]
    for text in texts:
        expected += ["output_item.added", *(name.format(text) for name in part), "output_item.done"]
    arguments = ["function_call_arguments.delta", "function_call_arguments.done"]
    expected += ["output_item.added", *arguments, "output_item.done", "completed"]
    assert [event["type"] for event in events] == [f"response.{name}" for name in expected]
    assert answer.text.endswith("data: [DONE]\n\n")
    assert answer.text.startswith("event: response.created\n")


async def test_items_of_a_response_become_turns() -> None:
    script = Script("Fine.")
    items = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Paris?"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "Rain."},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "Sun."}]},
    ]
    shape = {"type": "json_schema", "name": "w", "schema": {"type": "object"}, "strict": True}
    async with gateway_of(script) as http:
        answer = await http.post(
            "/responses",
            json=response(
                input=items,
                instructions="Be brief.",
                text={"format": shape},
                reasoning={"effort": "low"},
                max_output_tokens=7,
                metadata={"a": "b"},
            ),
        )

    told = answer.json()
    assert (told["metadata"], told["instructions"]) == ({"a": "b"}, "Be brief.")
    messages, options = script.asked[0]
    call = {"type": "function", "function": {"name": "weather", "arguments": "{}"}}
    assert messages == [
        ChatMessage("system", "Be brief.\n\nBe kind."),
        ChatMessage("user", "Paris?"),
        ChatMessage("assistant", "", None, [{"id": "c1", **call}, {"id": "c2", **call}], None, "Hm."),
        ChatMessage("tool", "Rain.", "weather", (), "c1"),
        ChatMessage("tool", "Sun.", "weather", (), "c2"),
    ]
    assert options["tools"] == [{"type": "function", "function": FUNCTION}]
    assert options["max_tokens"] == 7
    assert json.loads(options["structured"].json_schema) == {"type": "object"}
    assert options["template_vars"]["reasoning_effort"] == "low"


async def test_allowed_tools_are_all_that_the_model_is_offered() -> None:
    script = Script('[{"name": "weather", "parameters": {}}]')
    other = {"type": "function", "name": "now", "parameters": None}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    async with gateway_of(script) as http:
        answer = await http.post("/responses", json=response(tools=[TOOL, other], tool_choice=choice))

    assert answer.json()["output"][0]["name"] == "weather"
    assert [tool["function"]["name"] for tool in script.options["tools"]] == ["weather"]


async def test_response_that_is_cut_short_is_incomplete() -> None:
    async with gateway_of(Script("One, two", finish_reason=FinishReason.LENGTH)) as http:
        whole = (await http.post("/responses", json=response())).json()
        events = list(events_of(await http.post("/responses", json=response(stream=True))))

    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert events[-1]["type"] == "response.incomplete"


async def test_stream_of_a_response_that_fails_says_so_and_clients_raise_it() -> None:
    async with (
        gateway_of(Script("One, two, three", fails_after=2)) as http,
        openai.AsyncOpenAI(api_key="-", http_client=http, base_url="http://gateway/v1") as client,
    ):
        stream = await client.responses.create(**response(stream=True))
        with pytest.raises(openai.APIError, match="the worker is gone"):
            async for _ in stream:
                pass
        events = list(events_of(await http.post("/responses", json=response(stream=True))))

    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert events[-1]["response"]["status"] == "failed"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user"}]}, "input[0]"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
async def test_what_a_response_cannot_have_is_refused_by_name(more: dict[str, Any], param: str) -> None:
    async with gateway_of(Script()) as http:
        answer = await http.post("/responses", json=response(**more))

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


# Messages ----------------------------------------------------------------------------------------


def message(**more: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": "How is Paris?"}]
    return {"model": "m", "messages": turns, "tools": [ANTHROPIC_TOOL], "max_tokens": 50, **more}


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of the events of a message."""
    found: dict[str, Any] = {}
    for event in events:
        match event["type"]:
            case "message_start":
                found = event["message"]
            case "content_block_start":
                assert event["index"] == len(found["content"])
                found["content"].append({**event["content_block"], "json": ""})
            case "content_block_delta":
                part, delta = found["content"][event["index"]], event["delta"]
                for name, to in (("text", "text"), ("thinking", "thinking"), ("partial_json", "json")):
                    if name in delta:
                        part[to] += delta[name]
            case "content_block_stop":
                part = found["content"][event["index"]]
                arguments = part.pop("json")
                if arguments:
                    part["input"] = json.loads(arguments)
            case "message_delta":
                found |= event["delta"]
                found["usage"] |= event["usage"]
    return found


@pytest.mark.parametrize("piece_chars", [1, 4, 1000])
async def test_message_comes_whole_and_streamed_alike(piece_chars: int) -> None:
    async with gateway_of(thinking(piece_chars=piece_chars)) as http:
        whole = (await http.post("/messages", json=message())).json()
        answer = await http.post("/messages", json=message(stream=True))
    events = list(events_of(answer))
    streamed = assembled(events)

    for found in (whole, streamed):
        thoughts, words, call = found["content"]
        assert thoughts == {"type": "thinking", "thinking": "Hm.", "signature": ""}
        assert words == {"type": "text", "text": "I look."}
        assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Paris"})
        assert (found["stop_reason"], found["stop_sequence"]) == ("tool_use", None)
        assert found["usage"]["input_tokens"] == 6
        assert found["usage"]["cache_read_input_tokens"] == 4
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    assert answer.text.startswith("event: message_start\ndata: ")


async def test_blocks_of_a_message_become_turns() -> None:
    script = Script("Fine.")
    cached = {"cache_control": {"type": "ephemeral"}}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Paris?", **cached}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "Rain."}]},
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    async with gateway_of(script) as http:
        await http.post(
            "/messages",
            json=message(
                messages=turns,
                system=[{"type": "text", "text": "Be brief.", **cached}],
                tool_choice={"type": "any", "disable_parallel_tool_use": True},
                stop_sequences=["."],
                thinking={"type": "enabled", "budget_tokens": 1024},
                metadata={"user_id": "u"},
            ),
        )

    messages, options = script.asked[0]
    call = {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert messages == [
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "Paris?"),
        ChatMessage("assistant", "", None, [{"id": "t1", "type": "function", "function": call}], None, "Hm."),
        ChatMessage("tool", "Rain.", "weather", (), "t1"),
        ChatMessage("user", "So?"),
    ]
    assert (options["max_tokens"], options["stop"]) == (50, ["."])
    assert options["template_vars"] == {"enable_thinking": True}
    assert json.loads(options["structured"].json_schema)["maxItems"] == 1


@pytest.mark.parametrize(
    ("script", "reason", "sequence"),
    [
        (Script("a"), "end_turn", None),
        (Script("a", stop="."), "stop_sequence", "."),
        (Script("a", finish_reason=FinishReason.LENGTH), "max_tokens", None),
        (Script(""), "end_turn", None),
    ],
)
async def test_why_a_message_ended_is_told(script: Script, reason: str, sequence: str | None) -> None:
    async with gateway_of(script) as http:
        answer = (await http.post("/messages", json=message())).json()
        streamed = assembled(list(events_of(await http.post("/messages", json=message(stream=True)))))

    for found in (answer, streamed):
        assert (found["stop_reason"], found["stop_sequence"]) == (reason, sequence)


async def test_tokens_of_a_message_are_counted() -> None:
    async with gateway_of(Script()) as http:
        body = message()
        del body["max_tokens"]
        answer = await http.post("/messages/count_tokens", json=body)

    assert answer.json() == {"input_tokens": 10}


async def test_errors_of_messages_are_in_the_shape_of_their_api() -> None:
    async with gateway_of(Script("One, two, three", fails_after=2)) as http:
        refused = await http.post("/messages", json=message(max_tokens=0))
        not_json = await http.post("/messages", content=b"{")
        failed = list(events_of(await http.post("/messages", json=message(stream=True))))
        bad_key = await http.post("/messages", json=message(), headers={"x-api-key": "two words"})

    assert (refused.status_code, not_json.status_code) == (400, 415)
    assert refused.json()["type"] == "error"
    assert refused.json()["error"]["type"] == "invalid_request_error"
    assert "max_tokens" in refused.json()["error"]["message"]
    assert failed[-1] == {"type": "error", "error": {"type": "api_error", "message": "the worker is gone"}}
    assert (bad_key.status_code, bad_key.json()["error"]["type"]) == (401, "authentication_error")


async def test_metrics_know_the_new_routes() -> None:
    async with gateway_of(Script("a")) as http:
        await http.post("/messages", json=message())
        await http.post("/responses", json=response())
        await http.post("/responses", json=response(background=True))
        shown = (await http.get("http://gateway/metrics")).text

    assert 'octavo_gateway_requests_total{endpoint="messages",status="200"} 1.0' in shown
    assert 'octavo_gateway_requests_total{endpoint="responses",status="200"} 1.0' in shown
    assert 'octavo_gateway_requests_total{endpoint="responses",status="400"} 1.0' in shown
