"""Room for a model's thoughts before constrained output, and an end to them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Final

from octavo.parsing.formats import REASONING_FORMATS, THOUGHTS_AS_TEXT
from octavo.sampling import SamplingParams, StructuredOutput

_BEGIN, _END = REASONING_FORMATS[THOUGHTS_AS_TEXT]
_BREAK: Final = {"type": "regex", "pattern": "\\n{0,2}"}
"""Between thoughts and words."""


def problem_of_budget(reasoning_format: str, *, constrains: bool) -> str | None:
    """Return why the thoughts of a model cannot be bounded, None when they can."""
    if not constrains:
        return "the model's workers have no library of grammars"
    if reasoning_format != THOUGHTS_AS_TEXT:
        return f"this model does not think between {_BEGIN} and {_END}"
    return None


def with_thoughts(
    sampling: SamplingParams, budget: int | None, reasoning_format: str, *, in_reasoning: bool
) -> SamplingParams:
    """Return sampling under which a model thinks first, as far as it does and its budget goes.

    Args:
        sampling: what is asked of the output behind the thoughts.
        budget: most tokens of thoughts; None is no bound.
        reasoning_format: how the model marks thoughts.
        in_reasoning: the prompt begins them; else the output may.
    """
    structured = sampling.structured
    if reasoning_format != THOUGHTS_AS_TEXT or (structured is None and budget is None):
        return sampling
    rest = _format(structured)
    if rest is None:
        return sampling
    thoughts = {
        "type": "tag",
        "begin": "" if in_reasoning else _BEGIN,
        "content": {"type": "any_text"} | ({} if budget is None else {"max_tokens": budget}),
        "end": _END,
    }
    both = {"type": "sequence", "elements": [thoughts, _BREAK, rest]}
    wanted = both if in_reasoning else {"type": "or", "elements": [both, rest]}
    tag = json.dumps({"type": "structural_tag", "format": wanted})
    return replace(sampling, structured=StructuredOutput(structural_tag=tag))


def _format(structured: StructuredOutput | None) -> dict[str, Any] | None:
    """Return a constraint as part of a structural tag, None for one that cannot be part of another."""
    if structured is None:
        # Thoughts that begin late would have no bound.
        return {"type": "any_text", "excludes": [_BEGIN]}
    if structured.structural_tag is not None:
        found: dict[str, Any] | None = json.loads(structured.structural_tag).get("format")
        return found
    if structured.regex is not None:
        return {"type": "regex", "pattern": structured.regex}
    if structured.grammar is not None:
        return {"type": "grammar", "grammar": structured.grammar}
    if structured.choice is not None:
        values = [{"type": "const_string", "value": choice} for choice in structured.choice]
        return {"type": "or", "elements": values}
    text = structured.json_schema
    schema = {"type": "object"} if text is None else json.loads(text)
    # No fewer than one can be had here; without a bound a model may run on in spaces for ever.
    spaces = 1 if structured.compact else 20
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": spaces}
