"""The page of the gateway says of its bounds what is so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from octavo.gateway import bodies, connections, errors, json_bounds, key_check, main
from octavo.gateway.app import create_app
from octavo.gateway.config import GatewaySettings

PAGE = (Path(__file__).parents[3] / "docs/gateway.md").read_text()
SECTION = PAGE.partition("## What one client may cost\n")[2].partition("\n## ")[0]
SERVER = GatewaySettings.load({}).server
MIB = 1 << 20


@pytest.mark.parametrize(
    ("subject", "figures"),
    [
        (
            "body",
            [
                f"`--max-body-bytes` ({SERVER.max_body_bytes // MIB} MiB)",
                f"{bodies._MAX_DETOKENIZE // MIB} MiB for",
            ],
        ),
        (
            "values in a body",
            [
                f"weight {json_bounds.MAX_WEIGHT:,}",
                f"an item of a list weighs {json_bounds._ITEM}, {json_bounds._DIGITS} digits 1",
                f"a list or an object {json_bounds._LIST_OR_OBJECT}",
                f"a member's name {json_bounds._NAME}, a fraction {json_bounds._FRACTION}",
                f"{json_bounds.MAX_DEPTH} lists or objects deep, {main._MAX_DIGITS} digits in a number",
            ],
        ),
        (
            "headers",
            [f"{connections.MAX_HEAD_BYTES >> 10} KiB", f"`--head-timeout-s` ({SERVER.head_timeout_s:g})"],
        ),
        ("time for a body", [f"`--read-timeout-s` ({SERVER.read_timeout_s:g})"]),
        (
            "bodies that are coming in, together",
            [f"`--max-receiving-bytes` ({SERVER.max_receiving_bytes // MIB} MiB)"],
        ),
        (
            "connections",
            [f"`--max-connections` ({SERVER.max_connections:,})", f"{connections.RESERVED} more places"],
        ),
        ("requests sent behind one that is not answered yet", [str(connections.MAX_PIPELINED)]),
    ],
)
def test_page_has_the_bounds_of_the_code(subject: str, figures: list[str]) -> None:
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", SECTION, re.MULTILINE))

    assert [figure for figure in figures if figure not in rows[subject]] == []


def test_page_has_how_long_keys_are_remembered_and_how_many_faults_are_named() -> None:
    assert (key_check._GOOD_S, key_check._BAD_S) == (10.0, 2.0)
    assert "remembers a good key for ten seconds and a bad one for two" in SECTION
    assert errors.MAX_FAULTS == 8
    assert "At most eight faults are named" in PAGE


AS_LONG_AS_A_BODY = {
    *("prompt", "input", "content", "text", "refusal", "output", "instructions", "system"),
    *("reasoning_content", "reasoning", "thinking", "signature", "data", "description", "arguments"),
    *("choice", "triggers"),
}
"""What a conversation says, and texts in bounded lists."""
FREE = {
    *("schema", "json", "format", "structures", "parameters", "input_schema", "input"),
    *("chat_template_kwargs", "tools", "tool_calls", "documents"),
}
"""JSON of the client's own, which the weight and the depth of the body bound."""


def places(schema: Any, name: str, named: Any, seen: set[str]) -> Iterator[tuple[str, Any]]:
    """Yield each value that a body may have, by the name of the member that it is of."""
    if "$ref" in schema:
        reference = schema["$ref"].rpartition("/")[2]
        if reference not in seen:
            seen.add(reference)
            yield from places(named[reference], name, named, seen)
        return
    yield name, schema
    for inner in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), schema.get("items")):
        if inner is not None:
            yield from places(inner, name, named, seen)
    for member, inner in schema.get("properties", {}).items():
        yield from places(inner, member, named, seen)
    if isinstance(schema.get("additionalProperties"), dict):
        yield from places(schema["additionalProperties"], name, named, seen)


def test_every_list_map_and_text_of_the_document_is_bounded() -> None:
    document = create_app(GatewaySettings.load({}))._app.openapi()
    named, found = document["components"]["schemas"], list[tuple[str, Any]]()
    for operations in document["paths"].values():
        for operation in operations.values():
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            found += places(body.get("schema", {}), "", named, set())
    assert {"stop_token_ids", "input_schema", "tool_use_id", "call_id"} <= {name for name, _ in found}

    for name, schema in found:
        kind = schema.get("type")
        if kind == "array":
            assert "maxItems" in schema, name
        elif kind == "object" and schema.get("additionalProperties"):
            assert "maxProperties" in schema or name in FREE, name
        elif kind == "string" and not schema.keys() & {"enum", "const"}:
            assert "maxLength" in schema or name in AS_LONG_AS_A_BODY, name
