"""How families of models write calls of tools, and thoughts. docs/tools.md has an example of each."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from octavo.parsing.events import CallArguments, CallBegun, Content, Event, Reasoning
from octavo.parsing.text import Pieces, Steps

Schemas = Mapping[str, Mapping[str, Any]]
"""Tools by name, with the JSON schemas of their arguments."""

_MAX_PYTHON_CHARS: Final = 1 << 16


def hermes(pieces: Pieces, _: Schemas) -> Steps[None]:
    """Hermes, Qwen 2 to 3, SmolLM: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, or a list."""
    while marker := (yield from pieces.until("<tool_call>")):
        if (yield from pieces.calls()):
            yield from pieces.starts_with("</tool_call>", after_space=True)
        else:
            pieces.give_up(marker)


def qwen3_coder(pieces: Pieces, schemas: Schemas) -> Steps[None]:
    """Qwen 3 Coder: `<tool_call><function=NAME><parameter=NAME>VALUE</parameter></function></tool_call>`.

    The arguments are JSON only when the last of them is known, so a call comes as a whole.
    """
    while marker := (yield from pieces.until("<tool_call>", "<function=")):
        text = yield from pieces.up_to("</function>")
        inner = text if text is None or marker == "<function=" else _behind("<function=", text)
        call = _xml_call(inner, schemas) if inner is not None else None
        if call is not None:
            pieces.call(*call)
            yield from pieces.starts_with("</tool_call>", after_space=True)
        else:
            pieces.give_up(marker)
            pieces.rest = (f"{text}</function>" if text is not None else "") + pieces.rest


def llama3_json(pieces: Pieces, _: Schemas) -> Steps[None]:
    """Llama 3: the whole text is `{"name": ..., "parameters": {...}}`; more of them after a semicolon."""
    yield from pieces.starts_with("<|python_tag|>", after_space=True)
    found = yield from pieces.calls()
    while found and (yield from pieces.starts_with(";", after_space=True)):
        found = yield from pieces.calls()
        if not found:
            pieces.rest = f";{pieces.rest}"
    while (yield from pieces.until(*_LLAMA_ENDS)):
        pass


def pythonic(pieces: Pieces, _: Schemas) -> Steps[None]:
    """Llama 3.2 and 4: the whole text is a list of calls in Python, `[name(argument="value")]`."""
    yield from pieces.starts_with("<|python_start|>", after_space=True)
    space = yield from pieces.skip_space()
    text = (yield from pieces.value("\"'")) if pieces.rest.startswith("[") else None
    calls = _python_calls(text, pieces) if text is not None else None
    if text is not None and calls:
        pieces.take(len(text))
        for name, arguments in calls:
            pieces.call(name, arguments)
    else:
        pieces.rest = space + pieces.rest
    while (yield from pieces.until(*_LLAMA_ENDS)):
        pass


def mistral(pieces: Pieces, _: Schemas) -> Steps[None]:
    """Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, later `[TOOL_CALLS]NAME[ARGS]{...}`."""
    while marker := (yield from pieces.until("[TOOL_CALLS]", "</s>")):
        if marker == "</s>":
            continue
        space = yield from pieces.skip_space()
        as_json = pieces.rest.startswith(("[", "{"))
        if not (yield from (pieces.calls() if as_json else _named_call(pieces))):
            pieces.give_up(marker)
            pieces.rest = space + pieces.rest


def harmony(pieces: Pieces, _: Schemas) -> Steps[None]:
    """gpt-oss: messages in channels; `to=functions.NAME` in the header of one makes it a call."""
    while True:
        header = yield from pieces.up_to("<|message|>")
        if header is None:
            # No message begins any more; text without a header is what a model without channels says.
            if not pieces.rest.lstrip().startswith("<|"):
                yield from pieces.until(*_HARMONY_ENDS)
            return
        called = re.search(r"\bto=functions\.([\w.-]+)", header)
        into: Callable[[str], Event] = Content
        if called is not None and called[1] in pieces.tools:
            pieces.emit(CallBegun(called[1]))
            into = CallArguments
        elif re.search(r"<\|channel\|>\s*analysis\b", header):
            into = Reasoning
        if not (yield from pieces.until(*_HARMONY_ENDS, into=into)):
            return


def plain(pieces: Pieces, _: Schemas) -> Steps[None]:
    """Read words alone."""
    while True:
        pieces.emit(Content(pieces.take(len(pieces.rest))))
        if pieces.ended:
            return
        yield


def forced_list(pieces: Pieces, _: Schemas) -> Steps[None]:
    """Read a list of calls that a grammar has made, whatever the model's own format is."""
    yield from pieces.calls()
    yield from plain(pieces, _)


def forced_arguments(pieces: Pieces, schemas: Schemas) -> Steps[None]:
    """Read the arguments of the only tool that may be called, made by a grammar."""
    pieces.emit(CallBegun(next(iter(schemas))))
    while True:
        pieces.emit(CallArguments(pieces.take(len(pieces.rest))))
        if pieces.ended:
            return
        yield


_LLAMA_ENDS: Final = ("<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|python_end|>")
_HARMONY_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How calls are written."""

    read: Callable[[Pieces, Schemas], Steps[None]]
    in_special_tokens: bool = False
    """Its markers are special tokens, which are no text unless they are asked for."""
    id_chars: int | None = None
    """Length of a call's id, where the template insists on one."""


TOOL_FORMATS: Final[Mapping[str, ToolFormat]] = {
    "hermes": ToolFormat(hermes),
    "qwen3_coder": ToolFormat(qwen3_coder),
    "llama3_json": ToolFormat(llama3_json, in_special_tokens=True),
    "pythonic": ToolFormat(pythonic, in_special_tokens=True),
    "mistral": ToolFormat(mistral, in_special_tokens=True, id_chars=9),
    "harmony": ToolFormat(harmony, in_special_tokens=True),
}
REASONING_FORMATS: Final[Mapping[str, tuple[str, str]]] = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "harmony": ("", ""),
}
"""Begin and end of thoughts; those of `harmony` are in messages of their own."""
THOUGHTS_AS_TEXT: Final = "think"
"""The one whose marks are text to a grammar, and no special tokens: such thoughts can be bounded."""
THOUGHTS_BEGIN: Final = tuple(begin for begin, _ in REASONING_FORMATS.values() if begin)
"""Prompts that end so have their output begin with thoughts."""
THOUGHTS_END: Final = tuple(end for _, end in REASONING_FORMATS.values() if end)
"""Prompts that end so have it begin with words."""


def _xml_call(text: str, schemas: Schemas) -> tuple[str, str] | None:
    name, closed, body = text.partition(">")
    if not closed or name not in schemas:
        return None
    properties = schemas[name].get("properties")
    types = properties if isinstance(properties, dict) else {}
    arguments = {}
    for given in re.finditer(r"<parameter=([^<>]+)>\n?(.*?)\n?</parameter>", body, re.DOTALL):
        arguments[given[1]] = _xml_value(given[2], types.get(given[1]))
    return name, json.dumps(arguments, ensure_ascii=False)


def _xml_value(text: str, schema: object) -> Any:
    """Return a value: text where the schema wants text, else what it is in JSON, if it is that."""
    if isinstance(schema, dict) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _behind(marker: str, text: str) -> str | None:
    """Return what follows a marker, None when a text does not begin with it."""
    begun = text.lstrip()
    return begun.removeprefix(marker) if begun.startswith(marker) else None


def _named_call(pieces: Pieces) -> Steps[bool]:
    """Read `NAME[ARGS]{...}`; what may stand between the two, as `[CALL_ID]ID`, is dropped."""
    while True:
        begun = re.match(
            r"([\w.-]{1,256})\s{0,64}(?:\[CALL_ID\][\w-]{1,64})?(?:\[ARGS\])?\s{0,64}(?=\{)", pieces.rest
        )
        if begun is not None:
            if begun[1] not in pieces.tools:
                return False
            pieces.take(begun.end())
            pieces.emit(CallBegun(begun[1]))
            yield from pieces.arguments()
            return True
        if pieces.ended or len(pieces.rest) > 512 or "\n\n" in pieces.rest:
            return False
        yield


def _python_calls(text: str, pieces: Pieces) -> list[tuple[str, str]] | None:
    if len(text) > _MAX_PYTHON_CHARS:
        return None
    try:
        tree = ast.parse(text, mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List) else []
        return [_python_call(call, pieces) for call in calls]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _python_call(call: ast.expr, pieces: Pieces) -> tuple[str, str]:
    """Return a call's name and arguments.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError
    name = ast.unparse(call.func)
    if name not in pieces.tools or any(keyword.arg is None for keyword in call.keywords):
        raise ValueError
    arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    try:
        return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except TypeError as error:
        raise ValueError from error
