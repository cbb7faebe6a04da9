"""`pydantic-ai` against a gateway: python pydantic_ai_client.py BASE_URL MODEL [--auto]."""

from __future__ import annotations

import sys
from importlib.metadata import version

from checks import BASE_URL, MODEL, SEES_FIT, run
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=BASE_URL, api_key="any")
chat = OpenAIChatModel(MODEL, provider=provider)
responses = OpenAIResponsesModel(MODEL, provider=provider)


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


def words() -> None:
    found = Agent(chat, instructions="Be brief.").run_sync("Hello.", model_settings={"max_tokens": 16})
    assert found.output, found


def words_of_responses() -> None:
    found = Agent(responses, instructions="Be brief.").run_sync("Hello.", model_settings={"max_tokens": 16})
    assert found.output, found


def output_by_a_tool() -> None:
    agent = Agent(chat, output_type=ToolOutput(Person))
    assert isinstance(agent.run_sync("Ada is 36 years old.").output, Person)


def output_by_a_tool_of_responses() -> None:
    agent = Agent(responses, output_type=ToolOutput(Person))
    assert isinstance(agent.run_sync("Ada is 36 years old.").output, Person)


def output_by_schema() -> None:
    agent = Agent(chat, output_type=NativeOutput(Person))
    assert isinstance(agent.run_sync("Ada is 36 years old.").output, Person)


async def output_streamed() -> None:
    agent = Agent(chat, output_type=ToolOutput(Person))
    async with agent.run_stream("Ada is 36 years old.") as stream:
        assert isinstance(await stream.get_output(), Person)


def tool_and_back() -> None:
    asked = []
    agent = Agent(chat)

    @agent.tool_plain
    def weather(city: str) -> str:
        """Tell the weather of a city."""
        asked.append(city)
        return "It rains."

    assert agent.run_sync("How is the weather in Paris?").output
    assert asked


if __name__ == "__main__":
    checks = [
        words,
        words_of_responses,
        output_by_a_tool,
        output_by_a_tool_of_responses,
        output_by_schema,
        output_streamed,
    ]
    name = f"pydantic-ai {version('pydantic-ai-slim')}"
    sys.exit(run(name, *checks, *([tool_and_back] if SEES_FIT else [])))
