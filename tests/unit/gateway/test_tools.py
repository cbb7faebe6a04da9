"""Calls of tools and thoughts on /v1/chat/completions, as the `openai` package reads them."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from octavo.protocol.steps import FinishReason
from octavo.types import ChatMessage

from tests.unit.gateway.scripted import Script, events_of, gateway_of

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "again": {"$ref": "#/$defs/again"}},
            "required": ["city"],
            "$defs": {"again": {"type": "boolean"}},
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TWO = f'Let me see.\n{CALL}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'
ASK: Any = [{"role": "user", "content": "How is Paris?"}]


def body(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": ASK, "tools": [WEATHER, NOW], **more}


def called(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


@pytest.mark.parametrize("piece_chars", [1, 3, 1000])
async def test_calls_come_whole_and_streamed_alike(piece_chars: int) -> None:
    script = Script(TWO, piece_chars=piece_chars)
    async with (
        gateway_of(script) as http,
        openai.AsyncOpenAI(api_key="-", http_client=http, base_url="http://gateway/v1") as client,
    ):
        whole = await client.chat.completions.create(**body())
        async with client.chat.completions.stream(**body()) as stream:
            async for _ in stream:
                pass
            streamed = await stream.get_final_completion()

    for answer in (whole, streamed):
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        assert called(choice.message) == [("weather", '{"city": "Paris"}'), ("now", "{}")]
        ids = [call.id for call in choice.message.tool_calls or ()]
        assert len(set(ids)) == 2


async def test_streamed_call_begins_with_its_id_and_name_and_its_arguments_follow_in_pieces() -> None:
    async with gateway_of(Script(CALL)) as http:
        answer = await http.post("/chat/completions", json=body(stream=True))
    deltas = [event["choices"][0]["delta"] for event in events_of(answer)]
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]

    assert {call["index"] for call in calls} == {0}
    assert (calls[0]["type"], calls[0]["function"]["name"]) == ("function", "weather")
    assert all("id" not in call and "name" not in call["function"] for call in calls[1:])
    assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Paris"}'
    assert len(calls) > 3
    assert {} not in deltas[:-1]


async def test_conversation_with_calls_and_results_reaches_the_template() -> None:
    script = Script("Fine.")
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    turns = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "Rain."}]},
    ]
    async with gateway_of(script) as http:
        answer = await http.post(
            "/chat/completions",
            json=body(messages=turns, reasoning_effort="none", chat_template_kwargs={"x": 1}),
        )

    assert answer.json()["choices"][0]["message"]["content"] == "Fine."
    messages, options = script.asked[0]
    assert messages[1] == ChatMessage("assistant", "", None, [call], None, "Hm.")
    assert messages[2] == ChatMessage("tool", "Rain.", None, (), "1")
    assert options["tools"] == [WEATHER, NOW]
    assert options["template_vars"] == {"reasoning_effort": "none", "enable_thinking": False, "x": 1}


async def test_text_that_is_no_call_stays_text() -> None:
    text = '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'
    async with gateway_of(Script(text)) as http:
        answer = (await http.post("/chat/completions", json=body())).json()["choices"][0]
        not_offered = (await http.post("/chat/completions", json=body(tools=[]))).json()["choices"][0]
        forbidden = (await http.post("/chat/completions", json=body(tool_choice="none"))).json()["choices"][0]

    for choice in (answer, not_offered, forbidden):
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"] == text
        assert "tool_calls" not in choice["message"]


async def test_required_is_a_grammar_of_the_tools_and_read_as_calls() -> None:
    script = Script('[{"name": "weather", "parameters": {"city": "Paris"}}]', "mistral")
    async with gateway_of(script) as http:
        sent = body(tool_choice="required", parallel_tool_calls=False)
        choice = (await http.post("/chat/completions", json=sent)).json()["choices"][0]

    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {
        "name": "weather",
        "arguments": '{"city": "Paris"}',
    }
    assert len(choice["message"]["tool_calls"][0]["id"]) == 9
    assert "keep_special_tokens" not in script.options
    schema = json.loads(script.options["structured"].json_schema)
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    assert [one["properties"]["name"] for one in schema["items"]["anyOf"]] == [
        {"const": "weather"},
        {"const": "now"},
    ]
    assert schema["$defs"]["tool_0"]["properties"]["again"] == {"$ref": "#/$defs/tool_0/$defs/again"}
    assert schema["$defs"]["tool_1"] == {"type": "object", "properties": {}, "additionalProperties": False}


async def test_named_tool_is_a_grammar_of_its_arguments() -> None:
    script = Script('{"city": "Paris"}')
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    async with gateway_of(script) as http:
        answer = (await http.post("/chat/completions", json=body(tool_choice=choice))).json()["choices"][0]

    assert answer["finish_reason"] == "stop"
    assert answer["message"]["content"] is None
    assert answer["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris"}'
    assert json.loads(script.options["structured"].json_schema) == WEATHER["function"]["parameters"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [NOW, NOW]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "some"}, "tool_choice"),
    ],
)
async def test_what_makes_no_sense_is_refused_by_name(more: dict[str, Any], param: str) -> None:
    async with gateway_of(Script()) as http:
        answer = await http.post("/chat/completions", json=body(**more))

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_markers_that_are_special_tokens_are_asked_for() -> None:
    script = Script("[TOOL_CALLS]now{}</s>", "mistral")
    async with gateway_of(script) as http:
        answer = (await http.post("/chat/completions", json=body())).json()["choices"][0]

    assert script.options["keep_special_tokens"] is True
    assert answer["message"]["tool_calls"][0]["function"]["name"] == "now"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
async def test_thoughts_are_beside_the_words(*, stream: bool, begun: bool) -> None:
    text = "Hm, well.\n</think>\n\nYes." if begun else "<think>\nHm, well.\n</think>\n\nYes."
    script = Script(text, reasoning_format="think", in_reasoning=begun)
    async with gateway_of(script) as http:
        answer = await http.post("/chat/completions", json=body(stream=stream))
        hidden = await http.post("/chat/completions", json=body(include_reasoning=False))

    if stream:
        deltas = [event["choices"][0]["delta"] for event in events_of(answer)]
        found = {
            name: "".join(delta.get(name, "") for delta in deltas)
            for name in ("reasoning_content", "content")
        }
    else:
        found = answer.json()["choices"][0]["message"]
    assert found["reasoning_content"] == "Hm, well."
    assert found["content"] == "Yes."
    assert "reasoning_content" not in hidden.json()["choices"][0]["message"]


async def test_call_that_was_cut_short_ends_for_its_length() -> None:
    async with gateway_of(Script(CALL[: CALL.index('ty"')], finish_reason=FinishReason.LENGTH)) as http:
        answer = (await http.post("/chat/completions", json=body())).json()["choices"][0]

    assert answer["finish_reason"] == "length"
    assert answer["message"]["tool_calls"][0]["function"]["arguments"] == '{"ci'
