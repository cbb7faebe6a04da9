"""JSON schemas made by chance: small, and of many kinds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final

Schema = dict[str, Any]
_NAMES: Final = ("name", "größe", "日付", "a b", "x", "emoji 🙂", "id", "with-dash", 'quo"te')
_WORDS: Final = ("red", "green", "bleu clair", "zürich", "on\noff", "")
_DEPTH: Final = 3


def schemas(count: int, seed: int = 0) -> list[Schema]:
    """Return so many schemas, each other than the one before; the same for the same seed."""
    return list(islice(_endless(random.Random(seed)), count))


def _endless(draw: random.Random) -> Iterator[Schema]:
    while True:
        yield draw.choice(_WHOLE)(draw)


def _object(draw: random.Random, depth: int = _DEPTH) -> Schema:
    names = draw.sample(_NAMES, draw.randint(1, 4))
    required = names[: draw.randint(0, len(names))]
    return {
        "type": "object",
        "properties": {name: _any(draw, depth - 1) for name in names},
        "required": required,
        "additionalProperties": False,
    }


def _array(draw: random.Random, depth: int = _DEPTH) -> Schema:
    least = draw.randint(0, 2)
    return {
        "type": "array",
        "items": _any(draw, depth - 1),
        "minItems": least,
        "maxItems": least + draw.randint(0, 2),
    }


def _tuple(draw: random.Random, depth: int = _DEPTH) -> Schema:
    parts = [_any(draw, depth - 1) for _ in range(draw.randint(1, 3))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def _union(draw: random.Random, depth: int = _DEPTH) -> Schema:
    return {"anyOf": [_any(draw, depth - 1) for _ in range(draw.randint(2, 3))]}


def _string(draw: random.Random, _: int = 0) -> Schema:
    least = draw.randint(0, 4)
    return draw.choice(
        (
            {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 8)},
            {"type": "string", "pattern": draw.choice(("^[a-f]{2,4}$", "^(no|yes)!?$", "^[0-9]{3}-[A-Z]$"))},
            {"type": "string", "format": draw.choice(("date", "uuid", "ipv4"))},
            {"enum": draw.sample(_WORDS, draw.randint(1, 4))},
            {"const": draw.choice(_WORDS)},
        )
    )


def _number(draw: random.Random, _: int = 0) -> Schema:
    low = draw.randint(-500, 500)
    return draw.choice(
        (
            {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 3000)},
            {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + draw.randint(2, 90)},
            {"type": "number", "minimum": low, "maximum": low + draw.randint(1, 50)},
            {"type": ["boolean", "null"]},
            {"enum": [1, None, True, "1", [2], {"x": 0.5}]},
        )
    )


def _list_by_reference(draw: random.Random) -> Schema:
    """A chain of nodes as long as the model likes: it may end at each."""
    node = {
        "type": "object",
        "properties": {
            "value": _number(draw),
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
        },
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


def _any(draw: random.Random, depth: int) -> Schema:
    return draw.choice(_LEAVES if depth <= 0 else (*_NODES, *_LEAVES))(draw, depth)


_LEAVES: Final[tuple[Callable[[random.Random, int], Schema], ...]] = (_string, _number)
_NODES: Final[tuple[Callable[[random.Random, int], Schema], ...]] = (_object, _array, _tuple, _union)
_WHOLE: Final[tuple[Callable[[random.Random], Schema], ...]] = (
    _object,
    _object,
    _array,
    _tuple,
    _union,
    _list_by_reference,
)
