"""A gateway on a real port with a stand-in for a model: it calls the first tool it is offered, then answers.

Programs of others are tried with it. What a real model does with a grammar is tried elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

from octavo import AsyncClient
from octavo.errors import ErrorInfo, NotFoundError
from octavo.protocol.steps import FinishReason
from octavo.types import ChatMessage, GenerateResult

from tests.e2e.gateway_stack import listening
from tests.unit.gateway.scripted import Script, ScriptedClient, ScriptedStream


def instance(schema: dict[str, Any], root: dict[str, Any]) -> Any:
    """A value that a schema of the programs allows."""
    if "$ref" in schema:
        found: Any = root
        for part in schema["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        return instance(found, root)
    if "const" in schema:
        return schema["const"]
    if "anyOf" in schema:
        return instance(schema["anyOf"][0], root)
    match schema.get("type"):
        case "object":
            return {name: instance(one, root) for name, one in schema.get("properties", {}).items()}
        case "array":
            return [instance(schema["items"], root)]
        case "integer" | "number":
            return 7
        case "boolean":
            return True
    return "Paris"


class Agent(ScriptedClient):
    """Answers each conversation by what it asks for."""

    def _script(self, messages: list[ChatMessage], options: dict[str, Any]) -> Script:
        if options.get("model") != "m":
            raise NotFoundError("no such model", ErrorInfo("UNKNOWN_MODEL", "no such model", 5))
        text = "It rains in Paris, as it does so often."
        structured = options.get("structured")
        if structured is not None:
            schema = json.loads(structured.json_schema)
            text = json.dumps(instance(schema, schema))
        elif options.get("tools") and messages[-1].role != "tool" and options.get("tool_choice") != "none":
            function = options["tools"][0]["function"]
            schema = function["parameters"]
            call = {"name": function["name"], "arguments": instance(schema, schema)}
            text = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        limit = options.get("max_tokens")
        script = Script(text)
        if limit is not None and limit < len(script.pieces):
            script = replace(script, text="".join(script.pieces[:limit]), finish_reason=FinishReason.LENGTH)
        return script

    async def chat(self, messages: list[ChatMessage], **options: Any) -> GenerateResult:
        return GenerateResult("r", (self._script(messages, options).choice,), 1)

    def chat_stream(self, messages: list[ChatMessage], **options: Any) -> ScriptedStream:
        return ScriptedStream(self._script(messages, options))


@asynccontextmanager
async def agent_gateway() -> AsyncIterator[str]:
    """Run it; yields the address of the API."""
    async with listening(cast("AsyncClient", Agent(Script())), lifespan="off") as port:
        yield f"http://127.0.0.1:{port}/v1"
