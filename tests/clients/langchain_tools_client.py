"""Tools and schemas with `langchain-openai`: python langchain_tools_client.py BASE_URL MODEL [--auto]."""

from __future__ import annotations

import sys
from importlib.metadata import version

from checks import BASE_URL, MODEL, SEES_FIT, run
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

chat = ChatOpenAI(base_url=BASE_URL, api_key="any", model=MODEL, max_retries=0)
responses = ChatOpenAI(base_url=BASE_URL, api_key="any", model=MODEL, max_retries=0, use_responses_api=True)
ASK = HumanMessage("What is the answer?")


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


@tool
def answer(number: int) -> str:
    """Give the answer, a number."""
    return f"It is {number}."


def tool_and_back() -> None:
    for model in (chat, responses):
        called = model.bind_tools([answer], tool_choice="answer").invoke([ASK])
        (call,) = called.tool_calls
        result = answer.invoke(call)
        assert isinstance(result, ToolMessage)
        last = model.bind(max_tokens=16).invoke([ASK, called, result])
        assert last.content, last


def tool_streamed() -> None:
    called = None
    for chunk in chat.bind_tools([answer], tool_choice="required").stream([ASK]):
        called = chunk if called is None else called + chunk
    assert called is not None
    assert called.tool_calls[0]["name"] == "answer"
    assert isinstance(called.tool_calls[0]["args"]["number"], int)


def output_by_schema() -> None:
    for model in (chat, responses):
        found = model.with_structured_output(Person, method="json_schema").invoke("Ada is 36.")
        assert isinstance(found, Person), found


def output_by_function() -> None:
    found = chat.with_structured_output(Person, method="function_calling").invoke("Ada is 36.")
    assert isinstance(found, Person), found


def sees_fit() -> None:
    called = chat.bind_tools([answer]).invoke([ASK])
    assert [call["name"] for call in called.tool_calls] == ["answer"]


if __name__ == "__main__":
    checks = [tool_and_back, tool_streamed, output_by_schema, output_by_function]
    name = f"langchain-openai {version('langchain-openai')}"
    sys.exit(run(name, *checks, *([sees_fit] if SEES_FIT else [])))
