"""/v1/responses and /v1/messages: whatever a body is, it is answered or refused in the words of its API."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.gateway.scripted import Script, gateway_of

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
BODIES: dict[str, dict[str, Any]] = {
    "/responses": {
        "model": "m",
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Paris?"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "Rain."},
        ],
        "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}],
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "weather"}],
        },
        "text": {"format": {"type": "json_schema", "name": "w", "schema": SCHEMA}},
        "reasoning": {"effort": "low", "summary": "auto"},
        "metadata": {"a": "b"},
        "max_output_tokens": 5,
        "temperature": 1,
        "stream": False,
        "store": True,
    },
    "/messages": {
        "model": "m",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "Paris?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": ""},
                    {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Paris"}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "Rain."}]},
        ],
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
        "stop_sequences": ["."],
        "metadata": {"user_id": "u"},
        "temperature": 1,
        "stream": False,
    },
}
WRONG = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
_REMOVED = object()


def paths(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every place in a body."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, one in inner for found in paths(one, (*path, key)))]


def changed(body: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """A body with something else at a place."""
    if not path:
        return {} if value is _REMOVED else value
    body = copy.deepcopy(body)
    at = body
    for key in path[:-1]:
        at = at[key]
    if value is _REMOVED:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return body


@pytest.mark.parametrize("route", BODIES)
async def test_body_as_it_should_be_is_answered(route: str) -> None:
    async with gateway_of(Script("{}")) as http:
        assert (await http.post(route, json=BODIES[route])).status_code == 200


@pytest.mark.parametrize("route", BODIES)
@settings(max_examples=150)
@given(st.data())
async def test_wrong_body_is_refused_in_the_words_of_its_api(route: str, data: st.DataObject) -> None:
    body = BODIES[route]
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(paths(body)))
        body = changed(body, path, data.draw(st.just(_REMOVED) | WRONG | st.sampled_from([SCHEMA, [], {}])))
    text = json.dumps(body)
    async with gateway_of(Script("{}")) as http:
        answer = await http.post(route, content=text, headers={"content-type": "application/json"})

    if answer.status_code == 200:
        return
    assert answer.status_code in (400, 413), (text, answer.text)
    told = answer.json()
    error = told["error"]
    assert error["message"]
    if route == "/messages":
        assert told["type"] == "error"
        assert error["type"] in ("invalid_request_error", "request_too_large")
    else:
        assert error.keys() >= {"message", "type", "param", "code"}
