"""Tools that a request offers: what the template is told of them, and what may be called."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from octavo.gateway.errors import invalid
from octavo.gateway.strict import MAX_TOOLS, Strict
from octavo.parsing.formats import Schemas
from octavo.parsing.output import Forced, OutputForm
from octavo.sampling import StructuredOutput

Name = Annotated[str, Field(min_length=1, max_length=256)]


class Function(Strict):
    """What a tool is to the model."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments, an object")
    strict: bool | None = Field(None, description="arguments of calls that are forced always follow it")


class Tool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    """Names a function."""

    name: Name


class NamedTool(Strict):
    """The function that the model calls."""

    type: Literal["function"]
    function: FunctionName


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool
_MAX_FORCED: Final = 16
"""Calls that `required` may lead to, or as many as there are tools: a small model finds no end by itself."""
_NO_ARGUMENTS: Final[Mapping[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request lets the model call, and whether it must."""

    schemas: Schemas = field(default_factory=dict)
    """By name; empty: nothing is a call."""
    forced: Forced = ""
    parallel: bool = True

    def form(self, tool_format: str, reasoning_format: str) -> OutputForm:
        """Return what the output of a model is parsed for."""
        used = tool_format if self.schemas else ""
        return OutputForm(used, reasoning_format, self.schemas, self.forced, self.parallel)

    def structured(self) -> StructuredOutput | None:
        """Return the grammar of calls that are forced. It is the same for all models, as in `vllm serve`."""
        if not self.forced:
            return None
        if self.forced == "arguments":
            schema: dict[str, Any] = dict(next(iter(self.schemas.values())))
        else:
            schema = self._list_schema()
        try:
            # White space between the parts would be free, and a model may not find out of it.
            return StructuredOutput(json_schema=json.dumps(schema, allow_nan=False), compact=True)
        except ValueError:
            raise invalid("tools", "tools: a number in a schema is not finite") from None

    def _list_schema(self) -> dict[str, Any]:
        """Return the schema of a list of calls."""
        named = [(f"tool_{number}", name) for number, name in enumerate(self.schemas)]
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{key}"}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for key, name in named
        ]
        items = calls[0] if len(calls) == 1 else {"anyOf": calls}
        most = max(_MAX_FORCED, len(calls)) if self.parallel else 1
        schema = {"type": "array", "items": items, "minItems": 1, "maxItems": most}
        defs = {key: _moved(self.schemas[name], f"#/$defs/{key}") for key, name in named}
        return {**schema, "$defs": defs}


NO_TOOLS: Final = ToolUse()


def tool_use(tools: Sequence[Tool] | None, choice: ToolChoice | None, *, parallel: bool | None) -> ToolUse:
    """Return what may be called.

    Raises:
        GatewayError: the choice names no tool, or two tools have the same name.
    """
    functions = [tool.function for tool in tools or ()]
    schemas = {one.name: one.parameters or _NO_ARGUMENTS for one in functions}
    if len(schemas) < len(functions):
        raise invalid("tools", "tools: two of them have the same name")
    if choice in ("required", "auto") or isinstance(choice, NamedTool):
        if not functions:
            raise invalid("tool_choice", "tool_choice: there are no tools")
    elif choice == "none" or not functions:
        return NO_TOOLS
    use = ToolUse(schemas, parallel=parallel is not False)
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in schemas:
            raise invalid("tool_choice", "tool_choice: names a function that is not among the tools")
        return replace(use, schemas={name: schemas[name]}, forced="arguments")
    return replace(use, forced="list") if choice == "required" else use


def _moved(schema: Any, root: str) -> Any:
    """Return a schema whose references into itself are right when it stands elsewhere."""
    if isinstance(schema, Mapping):
        return {
            name: root + value.removeprefix("#")
            if name == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value, root)
            for name, value in schema.items()
        }
    return [_moved(one, root) for one in schema] if isinstance(schema, list) else schema
