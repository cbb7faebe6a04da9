"""The worst JSON bodies of a size, built by a program from the gateway's OpenAPI document."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from octavo_lab.hardening.messages import Body

_MAX_DEPTH: Final = 6
_KNOWN: Final = {"role": "user", "content": "a", "type": "text", "text": "a", "max_tokens": 1}
"""Values that a schema does not tell."""
_HOLE: Final = "\ufffc"


@dataclass(frozen=True, slots=True)
class ProbedRoute:
    """A path of the gateway and how it is asked."""

    method: str
    path: str
    schema: Mapping[str, Any] | None
    """Of its body; None where it has none."""


def routes(document: Mapping[str, Any]) -> list[ProbedRoute]:
    """Return every route of an OpenAPI document."""
    return [
        ProbedRoute(method.upper(), path.replace("{name}", "a"), _schema_of(operation))
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]


def worst_documents(document: Mapping[str, Any], route: ProbedRoute, size: int) -> Iterator[Body]:
    """Yield bodies of about `size` bytes: in the place of each value, what costs a reader most."""
    yield Body("garbage", lambda: b"\xff" * size)
    yield Body("nested", lambda: b"[" * size)
    yield Body("a list of objects", lambda: _list(b"{}", size))
    if route.schema is None:
        return
    whole = _Schemas(document).places(route.schema, ())
    valid = _Schemas(document).smallest(route.schema)
    start = json.dumps(valid).encode()[:-1]
    yield Body("unknown keys", lambda: start + b"," + _keys(size)[1:])
    yield Body("a long unknown key", lambda: start + b',"' + b"k" * size + b'":0}')
    yield Body("one key again and again", lambda: start + b',"model":"a"' * (size // 12) + b"}")
    yield Body("not UTF-8 at the end", lambda: start + b" " * size + b"}\xff")
    for path, item in whole:
        before, after = _around(valid, path)
        for kind, value in _values(item).items():
            yield Body(f"{_say(path)}: {kind}", _build(before, value, after, size))


def _values(item: Any) -> dict[str, Any]:
    """Return ways to fill a place, by what they are."""
    values = {
        "many objects": lambda size: _list(b"{}", size),
        "many -1": lambda size: _list(b"-1", size),
        "many texts": lambda size: _list(b'"a"', size),
        "nested": lambda size: b"[" * (size // 2) + b"]" * (size // 2),
        "many keys": _keys,
        "a long text": lambda size: b'"' + b"a" * size + b'"',
        "many escapes": lambda size: b'"' + b"\\u0000" * (size // 6) + b'"',
        "a long number": lambda size: b"1" * size,
    }
    if item is not None:
        values["many valid"] = lambda size: _list(json.dumps(item).encode(), size)
    return values


def _build(before: bytes, value: Any, after: bytes, size: int) -> Any:
    return lambda: before + value(size) + after


def _list(element: bytes, size: int) -> bytes:
    return b"[" + b",".join([element] * (size // (len(element) + 1))) + b"]"


def _keys(size: int) -> bytes:
    return b"{" + b",".join([b'"%d":0' % number for number in range(size // 12)]) + b"}"


def _around(valid: Any, path: tuple[str | int, ...]) -> tuple[bytes, bytes]:
    """Return a valid body but for the value at a path: what comes before, and what after."""
    before, _, after = json.dumps(_with(valid, path, _HOLE)).partition(json.dumps(_HOLE))
    return before.encode(), after.encode()


def _with(value: Any, path: tuple[str | int, ...], new: Any) -> Any:
    if not path:
        return new
    first, *rest = path
    if isinstance(first, int):
        return [_with(value[0] if isinstance(value, list) and value else None, tuple(rest), new)]
    known = value if isinstance(value, dict) else {}
    return {**known, first: _with(known.get(first), tuple(rest), new)}


def _say(path: tuple[str | int, ...]) -> str:
    return ".".join(map(str, path))


def _schema_of(operation: Mapping[str, Any]) -> Mapping[str, Any] | None:
    content = operation.get("requestBody", {}).get("content", {})
    found: Mapping[str, Any] | None = content.get("application/json", {}).get("schema")
    return found


class _Schemas:
    """Walks the schemas of a document."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._named = document["components"]["schemas"]

    def places(
        self, schema: Mapping[str, Any], path: tuple[str | int, ...]
    ) -> Iterator[tuple[tuple[str | int, ...], Any]]:
        """Yield the path of each value that a body may have, and the smallest item if it may be a list."""
        if len(path) > _MAX_DEPTH:
            return
        kinds = self._alternatives(schema)
        if path:
            items = [one["items"] for one in kinds if "items" in one]
            yield path, self.smallest(items[0]) if items else None
        for one in kinds:
            for name, inner in one.get("properties", {}).items():
                yield from self.places(inner, (*path, name))
            if isinstance(one.get("items"), dict) and self._is_object(one["items"]):
                yield from self.places(one["items"], (*path, 0))

    def smallest(self, schema: Mapping[str, Any]) -> Any:
        """Return the smallest value that the schema allows, or nearly."""
        one = self._alternatives(schema)[0]
        match one.get("type"):
            case "object":
                wanted = {*one.get("required", ()), *(_KNOWN.keys() & one.get("properties", {}).keys())}
                return {
                    name: _KNOWN.get(name, self.smallest(inner))
                    for name, inner in one.get("properties", {}).items()
                    if name in wanted
                }
            case "array":
                return [self.smallest(one["items"])]
            case "string":
                return "a"
            case "boolean":
                return False
            case "integer" | "number":
                return 1
        return None

    def _is_object(self, schema: Mapping[str, Any]) -> bool:
        return any("properties" in one for one in self._alternatives(schema))

    def _alternatives(self, schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        if "$ref" in schema:
            return self._alternatives(self._named[schema["$ref"].rpartition("/")[2]])
        if "anyOf" in schema:
            return [one for inner in schema["anyOf"] for one in self._alternatives(inner)]
        return [schema]
