"""`instructor` against a gateway: python instructor_client.py BASE_URL MODEL [--auto]."""

from __future__ import annotations

import sys
from importlib.metadata import version

import instructor
import openai
from checks import BASE_URL, MODEL, run
from pydantic import BaseModel, Field

plain = openai.OpenAI(base_url=BASE_URL, api_key="any", max_retries=0)


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


def extract(mode: instructor.Mode) -> None:
    client = instructor.from_openai(plain, mode=mode)
    person = client.chat.completions.create(
        model=MODEL,
        response_model=Person,
        messages=[{"role": "user", "content": "Ada is 36 years old."}],
        max_retries=0,
    )
    assert isinstance(person, Person), person


def by_tools() -> None:
    extract(instructor.Mode.TOOLS)


def by_strict_tools() -> None:
    extract(instructor.Mode.TOOLS_STRICT)


def by_schema() -> None:
    extract(instructor.Mode.JSON_SCHEMA)


if __name__ == "__main__":
    sys.exit(run(f"instructor {version('instructor')}", by_tools, by_strict_tools, by_schema))
