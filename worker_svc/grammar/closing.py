"""JSON schemas as their writers mean them: an object has the properties that are listed, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

_COMBINING: Final = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
_ABOUT_OTHERS: Final = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties"}
)
_OF_NAMES: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Keywords whose value has schemas under names of the writer's own."""
_OF_VALUES: Final = frozenset({"enum", "const", "default", "examples"})


def closed(schema: Any) -> dict[str, Any]:
    """Return a schema whose objects have no properties but those listed, unless it says something of others.

    JSON Schema allows any others, which no writer of a schema for a model wants, and which `vllm serve` does
    not let through either. A schema that combines objects is left as it is: what one part closes the other
    may need.

    Raises:
        ValueError: nothing follows it.
    """
    if schema is False:
        raise ValueError("nothing follows the schema false")
    if schema is True:
        return {}
    if not any(_combines(one) for one in _schemas(schema)):
        for one in _schemas(schema):
            if "properties" in one and not _ABOUT_OTHERS & one.keys():
                one["additionalProperties"] = False
    found: dict[str, Any] = schema
    return found


def _combines(schema: dict[str, Any]) -> bool:
    """Return whether an object has to follow this schema and another one."""
    several = isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1
    return several or ("properties" in schema and bool(_COMBINING & schema.keys()))


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and all schemas in it."""
    if isinstance(schema, list):
        for one in schema:
            yield from _schemas(one)
    if not isinstance(schema, dict):
        return
    yield schema
    for keyword, value in list(schema.items()):
        if keyword in _OF_NAMES and isinstance(value, dict):
            for one in value.values():
                yield from _schemas(one)
        elif keyword not in _OF_VALUES:
            yield from _schemas(value)
