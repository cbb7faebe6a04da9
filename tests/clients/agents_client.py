"""`openai-agents` against a gateway: python agents_client.py BASE_URL MODEL [--auto]."""

from __future__ import annotations

import sys
from importlib.metadata import version

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    StopAtTools,
    function_tool,
    set_tracing_disabled,
)
from checks import BASE_URL, MODEL, SEES_FIT, run
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

set_tracing_disabled(disabled=True)


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


@function_tool
def answer(number: int) -> str:
    """Give the answer, a number."""
    return f"It is {number}."


def models() -> list[OpenAIChatCompletionsModel | OpenAIResponsesModel]:
    client = AsyncOpenAI(base_url=BASE_URL, api_key="any", max_retries=0)
    return [OpenAIChatCompletionsModel(MODEL, client), OpenAIResponsesModel(MODEL, client)]


async def words() -> None:
    for model in models():
        agent = Agent("a", instructions="Be brief.", model=model, model_settings=ModelSettings(max_tokens=16))
        assert (await Runner.run(agent, "Hello.")).final_output


async def words_streamed() -> None:
    for model in models():
        agent = Agent("a", model=model, model_settings=ModelSettings(max_tokens=500))
        result = Runner.run_streamed(agent, "Hello.")
        kinds = [event.type async for event in result.stream_events()]
        assert "raw_response_event" in kinds
        assert result.final_output


async def tool_that_must_be_called() -> None:
    for model in models():
        settings = ModelSettings(tool_choice="required", parallel_tool_calls=False)
        agent = Agent(
            "a",
            model=model,
            model_settings=settings,
            tools=[answer],
            tool_use_behavior=StopAtTools(stop_at_tool_names=["answer"]),
        )
        found = (await Runner.run(agent, "What is the answer?")).final_output
        assert str(found).startswith("It is "), found


async def output_by_schema() -> None:
    for model in models():
        found = (await Runner.run(Agent("a", model=model, output_type=Person), "Ada is 36.")).final_output
        assert isinstance(found, Person), found


async def tool_and_back() -> None:
    for model in models():
        result = await Runner.run(Agent("a", model=model, tools=[answer]), "What is the answer?")
        kinds = [item.type for item in result.new_items]
        assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"], kinds


if __name__ == "__main__":
    checks = [words, words_streamed, tool_that_must_be_called, output_by_schema]
    name = f"openai-agents {version('openai-agents')}"
    sys.exit(run(name, *checks, *([tool_and_back] if SEES_FIT else [])))
