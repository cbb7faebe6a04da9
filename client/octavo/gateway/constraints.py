"""Constraints on the output, from the terms of OpenAI and of `vllm serve` into ours."""

from __future__ import annotations

import json
from typing import Any

from octavo.gateway.errors import invalid
from octavo.gateway.schemas import GenerationRequest, ResponseFormat, StructuredOutputs
from octavo.sampling import StructuredOutput


def structured_of(request: GenerationRequest) -> StructuredOutput | None:
    """Return what a body asks of its output, if anything; raises GatewayError for what is no JSON."""
    if request.structured_outputs is not None:
        return _of_structured_outputs(request.structured_outputs)
    wanted = request.response_format
    return None if wanted is None or wanted.type == "text" else _of_response_format(wanted)


def _of_response_format(wanted: ResponseFormat) -> StructuredOutput:
    if wanted.json_schema is not None:
        text = _json("response_format", wanted.json_schema.schema_)
        return StructuredOutput(json_schema=text, strict=wanted.json_schema.strict)
    if wanted.type == "structural_tag":
        parts = ("type", "format", "structures", "triggers")
        tag = {name: value for name in parts if (value := getattr(wanted, name)) is not None}
        return StructuredOutput(structural_tag=_json("response_format", tag))
    return StructuredOutput(json_object=True)


def _of_structured_outputs(given: StructuredOutputs) -> StructuredOutput:
    schema = given.json_
    return StructuredOutput(
        json_schema=_json("structured_outputs", schema) if isinstance(schema, dict) else schema,
        regex=given.regex,
        choice=None if given.choice is None else tuple(given.choice),
        grammar=given.grammar,
        json_object=given.json_object or None,
        structural_tag=given.structural_tag,
        compact=given.disable_any_whitespace or None,
    )


def _json(param: str, value: dict[str, Any]) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        raise invalid(param, f"{param}: a number in the schema is not finite") from None
