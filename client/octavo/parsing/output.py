"""The parser of one choice's text, put together for a model and a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from octavo.parsing.events import CallArguments, CallBegun, Event, Part, parts
from octavo.parsing.formats import (
    REASONING_FORMATS,
    THOUGHTS_AS_TEXT,
    TOOL_FORMATS,
    Schemas,
    forced_arguments,
    forced_list,
    plain,
)
from octavo.parsing.text import Pieces, Steps, think

Forced = Literal["", "list", "arguments"]
"""What a grammar makes of the output: nothing, a list of calls, or the arguments of the only tool."""


@dataclass(frozen=True, slots=True)
class OutputForm:
    """What may be found in the output of a request."""

    tool_format: str = ""
    """One of TOOL_FORMATS; empty: no tools are offered, and nothing is a call."""
    reasoning_format: str = ""
    """One of REASONING_FORMATS; empty: thoughts are not told from words."""
    tools: Schemas = field(default_factory=dict)
    forced: Forced = ""
    parallel: bool = True
    """More than one call is passed on."""

    @property
    def is_plain(self) -> bool:
        """Whether the text is nothing but words, so that there is nothing to parse."""
        return not (self.tool_format or self.reasoning_format or self.forced)

    @property
    def in_special_tokens(self) -> bool:
        """Whether the text has to come with its special tokens."""
        if self.forced:
            return False
        known = TOOL_FORMATS.get(self.tool_format)
        return self.reasoning_format in ("harmony", "mistral") or (
            known is not None and known.in_special_tokens
        )

    def steps(self, pieces: Pieces, *, in_reasoning: bool) -> Steps[None]:
        """Read a text."""
        if self.forced:
            if self.reasoning_format == THOUGHTS_AS_TEXT:
                # The grammar leaves room for these.
                yield from think(pieces, *REASONING_FORMATS[THOUGHTS_AS_TEXT], begun=in_reasoning)
            yield from (forced_list if self.forced == "list" else forced_arguments)(pieces, self.tools)
            return
        if self.reasoning_format == "harmony":
            yield from TOOL_FORMATS["harmony"].read(pieces, self.tools)
            return
        if self.reasoning_format:
            begin, end = REASONING_FORMATS[self.reasoning_format]
            yield from think(pieces, begin, end, begun=in_reasoning)
        read = TOOL_FORMATS[self.tool_format].read if self.tool_format else plain
        yield from read(pieces, self.tools)


PLAIN: Final = OutputForm()


class OutputParser:
    """Finds events in text that comes in pieces; however it is cut, they are the same when put together."""

    def __init__(self, form: OutputForm, *, in_reasoning: bool = False) -> None:
        """`in_reasoning`: the prompt ended with the beginning of thoughts."""
        self._pieces = Pieces(form.tools)
        self._steps = form.steps(self._pieces, in_reasoning=in_reasoning)
        self._parallel = form.parallel
        self._num_calls = 0
        self._over = False

    def feed(self, text: str) -> list[Event]:
        """Return what is certain after one more piece."""
        self._pieces.rest += text
        return self._run()

    def close(self) -> list[Event]:
        """The text is complete; return what is left."""
        self._pieces.ended = True
        return self._run()

    def _run(self) -> list[Event]:
        if not self._over:
            self._over = next(self._steps, True) is True
        found, self._pieces.found = self._pieces.found, []
        return found if self._parallel else [one for one in found if self._is_kept(one)]

    def _is_kept(self, event: Event) -> bool:
        self._num_calls += isinstance(event, CallBegun)
        return self._num_calls < 2 or not isinstance(event, CallBegun | CallArguments)


def parse(text: str, form: OutputForm, *, in_reasoning: bool = False) -> list[Part]:
    """Return what is in a whole text."""
    parser = OutputParser(form, in_reasoning=in_reasoning)
    return parts([*parser.feed(text), *parser.close()])


def detect(template: str) -> tuple[str, str]:
    """Return the formats of tools and of reasoning that a chat template is made for; "" where it has none."""
    reasoning = next((name for name, marker in _REASONING_MARKERS.items() if marker in template), "")
    if "tools" not in template:
        return "", reasoning
    return next(
        (name for name, markers in _TOOL_MARKERS if any(one in template for one in markers)), ""
    ), reasoning


_REASONING_MARKERS: Final[Mapping[str, str]] = {
    "harmony": "<|channel|>",
    "mistral": "[THINK]",
    "think": "</think>",
}
# The first that fits: later formats quote the markers of earlier ones.
_TOOL_MARKERS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("harmony", ("<|channel|>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("qwen3_coder", ("<function=",)),
    ("hermes", ("<tool_call>",)),
    ("pythonic", ("<|python_start|>", "[func_name1(", "func_name1(params_name1=")),
    ("llama3_json", ('"parameters":', "<|python_tag|>")),
)
