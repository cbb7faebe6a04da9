"""Constraints on the output as people write them, and what can be told of one without compiling it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from octavo.sampling import StructuredOutput

MAX_DEPTH: Final = 100
"""Of JSON inside JSON, in a schema."""
_FORMATS: Final = frozenset(
    [
        "email",
        "date",
        "time",
        "date-time",
        "duration",
        "ipv4",
        "ipv6",
        "hostname",
        "uuid",
        "uri",
        "uri-reference",
        "uri-template",
        "json-pointer",
        "relative-json-pointer",
    ]
)
_NOT_HELD_TO: Final = frozenset(
    [
        "not",
        "if",
        "then",
        "else",
        "oneOf",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "multipleOf",
        "uniqueItems",
        "contains",
        "minContains",
        "maxContains",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
    ]
)
"""Keywords that what compiles schemas passes over, or takes as something weaker."""
_OF_NAMES: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Keywords whose value has schemas under names of the writer's own."""
_OF_VALUES: Final = frozenset({"enum", "const", "default", "examples"})


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
                found = _parse(text)
                if name == "json_schema" and structured.strict:
                    _check_strict(found)
            except ValueError as error:
                return name, str(error)
    return None


def _parse(text: str) -> Any:
    """Return the object that a text of JSON has; raises ValueError with what is wrong."""
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
            return found
    raise ValueError(f"is nested more than {MAX_DEPTH} deep")


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _check_strict(schema: Any) -> None:
    """Raise ValueError for the first keyword in a schema that output cannot be held to."""
    for path, one in _schemas(schema, "#"):
        for keyword in one:
            if keyword in _NOT_HELD_TO:
                raise ValueError(f"{path}: {keyword} cannot be held to, and strict is set")
        if one.get("format", "email") not in _FORMATS:
            raise ValueError(f"{path}: format {one['format']!r} cannot be held to, and strict is set")
        text = "pattern" in one or "format" in one
        if text and ("minLength" in one or "maxLength" in one):
            raise ValueError(f"{path}: a pattern or format beside a length cannot be held to")
        if isinstance(one.get("allOf"), list) and len(one["allOf"]) > 1:
            raise ValueError(f"{path}: allOf of several schemas cannot be held to, and strict is set")
        names = one.get("patternProperties")
        if "propertyNames" in one and (names or "properties" in one):
            raise ValueError(f"{path}: propertyNames beside properties cannot be held to")
        if isinstance(names, dict) and ("properties" in one or len(names) > 1):
            raise ValueError(f"{path}: patternProperties beside others cannot be held to")
        if isinstance(ref := one.get("$ref"), str) and not ref.startswith("#"):
            raise ValueError(f"{path}: $ref {ref!r} leads out of the schema")


def _schemas(schema: Any, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield a schema and all schemas in it, with their paths."""
    if isinstance(schema, list):
        for number, one in enumerate(schema):
            yield from _schemas(one, f"{path}/{number}")
    if not isinstance(schema, dict):
        return
    yield path, schema
    for keyword, value in schema.items():
        if keyword in _OF_NAMES and isinstance(value, dict):
            for name, one in value.items():
                yield from _schemas(one, f"{path}/{keyword}/{name}")
        elif keyword not in _OF_VALUES:
            yield from _schemas(value, f"{path}/{keyword}")
