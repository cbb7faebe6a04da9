"""Tools, thoughts and Responses with the `openai` package: openai_tools_client.py BASE_URL MODEL [--auto]."""

from __future__ import annotations

import json
import sys
from typing import Any

import openai
from checks import BASE_URL, CITY, MODEL, SEES_FIT, refusal, run
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=BASE_URL, api_key="any", max_retries=0)
ASK: Any = [{"role": "user", "content": "How is the weather in Paris?"}]
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}
NOW: Any = {"type": "function", "function": {"name": "now"}}
RESPONSE_TOOL: Any = {"type": "function", "name": "weather", "parameters": CITY, "strict": True}


class Weather(BaseModel):
    city: str = Field(max_length=20)
    celsius: int = Field(ge=-90, le=60)


def required() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, tools=[WEATHER, NOW], tool_choice="required", parallel_tool_calls=False
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls", answer
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name in ("weather", "now")
    json.loads(call.function.arguments)


def named_and_back() -> None:
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    answer = client.chat.completions.create(model=MODEL, messages=ASK, tools=[WEATHER], tool_choice=choice)
    message = answer.choices[0].message
    (call,) = message.tool_calls or ()
    assert call.type == "function"
    assert set(json.loads(call.function.arguments)) == {"city"}
    turns = [*ASK, message, {"role": "tool", "tool_call_id": call.id, "content": "It rains."}]
    again = client.chat.completions.create(
        model=MODEL, messages=turns, tools=[WEATHER], tool_choice="none", max_tokens=16
    )
    assert again.choices[0].message.content, again


def streamed() -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=ASK, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    (call,) = final.choices[0].message.tool_calls or ()
    assert [event.arguments for event in done] == [call.function.arguments]
    assert set(json.loads(call.function.arguments)) == {"city"}


def parsed() -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Weather)
    assert isinstance(answer.choices[0].message.parsed, Weather), answer


def sees_fit() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ASK, tools=[WEATHER])
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "weather"


def response() -> None:
    answer = client.responses.create(model=MODEL, input="Say something.", max_output_tokens=16)
    assert answer.status in ("completed", "incomplete")
    assert answer.output_text, answer
    assert answer.usage is not None
    assert answer.usage.output_tokens <= 16


def response_streamed() -> None:
    text, kinds = "", []
    for event in client.responses.create(
        model=MODEL, input="Say something.", max_output_tokens=16, stream=True, temperature=0
    ):
        kinds.append(event.type)
        text += event.delta if event.type == "response.output_text.delta" else ""
    whole = client.responses.create(model=MODEL, input="Say something.", max_output_tokens=16, temperature=0)
    assert text == whole.output_text, (text, whole.output_text)
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete")


def response_with_a_tool_and_back() -> None:
    # One call: the model of the tests is too small to find the end of a list, too.
    first = client.responses.create(
        model=MODEL, input=ASK, tools=[RESPONSE_TOOL], tool_choice="required", parallel_tool_calls=False
    )
    calls = [item for item in first.output if item.type == "function_call"]
    assert set(json.loads(calls[0].arguments)) == {"city"}
    results: Any = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."} for call in calls
    ]
    items: Any = [*ASK, *first.output, *results]
    second = client.responses.create(
        model=MODEL, input=items, tools=[RESPONSE_TOOL], tool_choice="none", max_output_tokens=16
    )
    assert second.output_text, second


def response_parsed() -> None:
    answer = client.responses.parse(model=MODEL, input="How is Paris?", text_format=Weather)
    assert isinstance(answer.output_parsed, Weather), answer


def nothing_is_stored() -> None:
    answer = client.responses.create(model=MODEL, input="Hello.", max_output_tokens=1)
    more: Any = {"previous_response_id": answer.id}
    error = refusal(lambda: client.responses.create(model=MODEL, input="And?", **more))
    assert isinstance(error, openai.BadRequestError)
    assert error.param == "previous_response_id"


if __name__ == "__main__":
    checks = [
        required,
        named_and_back,
        streamed,
        parsed,
        response,
        response_streamed,
        response_with_a_tool_and_back,
        response_parsed,
        nothing_is_stored,
    ]
    sys.exit(run(f"openai {openai.__version__}", *checks, *([sees_fit] if SEES_FIT else [])))
