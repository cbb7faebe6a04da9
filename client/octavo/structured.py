"""Constraints on the output as people write them, and what can be told of one without compiling it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

from octavo.sampling import StructuredOutput

MAX_DEPTH: Final = 100
"""Of JSON inside JSON, in a schema."""


def of_response_format(wanted: Any) -> StructuredOutput | None:
    """Return the constraint of a `response_format`: as in the OpenAI API, or a class of pydantic.

    Raises:
        ValueError: it is neither.
    """
    if hasattr(wanted, "model_json_schema"):
        return StructuredOutput(json_schema=json.dumps(wanted.model_json_schema()), strict=True)
    match wanted:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return StructuredOutput(json_object=True)
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema} as named}:
            strict: Any = named.get("strict")
            return StructuredOutput(json_schema=json.dumps(schema), strict=strict)
        case {"type": "structural_tag"}:
            return StructuredOutput(structural_tag=json.dumps(wanted))
    raise ValueError("must be of type text, json_object, structural_tag, or json_schema with its schema")


def problem_of(structured: StructuredOutput) -> tuple[str, str] | None:
    """Return the field of a constraint that is wrong and what is wrong with it, as far as one can see."""
    texts = ("json_schema", "regex", "grammar", "structural_tag")
    for name in texts:
        if getattr(structured, name) == "":
            return name, "must not be empty"
    if structured.json_object is False:
        return "json_object", "must be true, or left out"
    if structured.choice is not None and not structured.choice:
        return "choice", "must have one choice or more"
    for name in ("json_schema", "structural_tag"):
        if (text := getattr(structured, name)) is not None:
            try:
                _check(text)
            except ValueError as error:
                return name, str(error)
    return None


def _check(text: str) -> None:
    """Raise ValueError with what is wrong with the JSON of a text, if anything."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError(f"is nested more than {MAX_DEPTH} deep") from None
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(found, dict | bool):
        raise ValueError("must be a JSON object")  # noqa: TRY004 - of the text
    level: list[Any] = [found]
    for _ in range(MAX_DEPTH):
        parts = [part for one in level for part in _parts(one)]
        level = [part for part in parts if isinstance(part, dict | list)]
        if not level:
            return
    raise ValueError(f"is nested more than {MAX_DEPTH} deep")


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
