"""Constraints as people write them, and what can be told of one without compiling it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from octavo.sampling import StructuredOutput
from octavo.structured import of_response_format, problem_of
from pydantic import BaseModel


class City(BaseModel):
    name: str
    people: int


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, StructuredOutput(json_object=True)),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {}}},
            StructuredOutput(json_schema="{}", strict=True),
        ),
        (
            {"type": "structural_tag", "format": {}},
            StructuredOutput(structural_tag='{"type": "structural_tag", "format": {}}'),
        ),
        (City, StructuredOutput(json_schema=json.dumps(City.model_json_schema()), strict=True)),
    ],
)
def test_response_format_becomes_a_constraint(wanted: Any, expected: StructuredOutput | None) -> None:
    assert of_response_format(wanted) == expected


def test_response_format_of_another_type_is_refused() -> None:
    with pytest.raises(ValueError, match="json_schema with its schema"):
        of_response_format({"type": "json_schema"})


@pytest.mark.parametrize(
    ("structured", "field", "problem"),
    [
        (StructuredOutput(json_schema="{"), "json_schema", "is not JSON"),
        (StructuredOutput(json_schema="[]"), "json_schema", "must be a JSON object"),
        (StructuredOutput(json_schema='{"items":' * 101 + "{}" + "}" * 101), "json_schema", "nested"),
        (StructuredOutput(json_schema='{"items":' * 9999 + "{}" + "}" * 9999), "json_schema", "nested"),
        (StructuredOutput(structural_tag="x"), "structural_tag", "is not JSON"),
        (StructuredOutput(json_object=False), "json_object", "must be true"),
        (StructuredOutput(regex=""), "regex", "empty"),
        (StructuredOutput(choice=()), "choice", "one choice or more"),
    ],
)
def test_constraint_that_is_wrong_in_itself_names_its_field(
    structured: StructuredOutput, field: str, problem: str
) -> None:
    found = problem_of(structured)
    assert found is not None
    assert (found[0], problem in found[1]) == (field, True)
