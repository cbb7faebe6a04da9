"""The `anthropic` package against a gateway: python anthropic_client.py BASE_URL MODEL [--auto]."""

from __future__ import annotations

import sys
from typing import Any

import anthropic
from checks import BASE_URL, CITY, MODEL, SEES_FIT, refusal, run

client = anthropic.Anthropic(base_url=BASE_URL.removesuffix("/v1"), api_key="any", max_retries=0)
ASK: Any = [{"role": "user", "content": "How is the weather in Paris?"}]
TOOL: Any = {"name": "weather", "description": "Tells the weather.", "input_schema": CITY}


def message() -> None:
    answer = client.messages.create(model=MODEL, max_tokens=16, messages=ASK, system="Be brief.")
    assert answer.content[0].type == "text"
    assert answer.content[0].text
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert 0 < answer.usage.output_tokens <= 16


def streamed() -> None:
    kinds = []
    greedy: Any = {"temperature": 0}
    with client.messages.stream(model=MODEL, max_tokens=16, messages=ASK, extra_body=greedy) as stream:
        text = ""
        for event in stream:
            kinds.append(event.type)
            text += event.text if event.type == "text" else ""
        final = stream.get_final_message()
    whole = client.messages.create(model=MODEL, max_tokens=16, messages=ASK, extra_body=greedy)
    assert final.content[0].type == whole.content[0].type == "text"
    assert text == final.content[0].text == whole.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


def tool_and_back() -> None:
    first = client.messages.create(
        model=MODEL,
        max_tokens=100,
        messages=ASK,
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "weather"},
    )
    (call,) = first.content
    assert call.type == "tool_use"
    assert isinstance(call.input, dict)
    assert set(call.input) == {"city"}
    assert first.stop_reason == "tool_use"
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "It rains."}
    turns: Any = [
        *ASK,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = client.messages.create(
        model=MODEL, max_tokens=16, messages=turns, tools=[TOOL], tool_choice={"type": "none"}
    )
    assert second.content[0].type == "text"


def tool_streamed() -> None:
    with client.messages.stream(
        model=MODEL, max_tokens=100, messages=ASK, tools=[TOOL], tool_choice={"type": "any"}
    ) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    call = final.content[0]
    assert call.type == "tool_use"
    assert isinstance(call.input, dict)
    assert set(call.input) == {"city"}
    assert len(pieces) > 1


def sees_fit() -> None:
    answer = client.messages.create(model=MODEL, max_tokens=100, messages=ASK, tools=[TOOL])
    assert answer.stop_reason == "tool_use", answer


def tokens_counted() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=ASK, system="Be brief.")
    answer = client.messages.create(model=MODEL, max_tokens=1, messages=ASK, system="Be brief.")
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def errors() -> None:
    error = refusal(lambda: client.messages.create(model="nope", max_tokens=1, messages=ASK))
    assert isinstance(error, anthropic.NotFoundError)
    assert isinstance(error.body, dict)
    assert error.body["error"]["type"] == "not_found_error"


if __name__ == "__main__":
    checks = [message, streamed, tool_and_back, tool_streamed, tokens_counted, errors]
    sys.exit(run(f"anthropic {anthropic.__version__}", *checks, *([sees_fit] if SEES_FIT else [])))
