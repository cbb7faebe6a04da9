# ruff: noqa: E501, ISC004 - texts of models, as they stand
"""Calls and thoughts in the texts of each family: found wherever it is cut, and nothing else is lost."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from octavo.parsing.events import CallBegun, Content, Part, Reasoning, parts
from octavo.parsing.formats import TOOL_FORMATS
from octavo.parsing.output import OutputForm, OutputParser, detect, parse

TOOLS: dict[str, Any] = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "now": {"type": "object"},
}
PARIS = ("weather", {"city": "Paris \u00e9", "days": 3})
NOW = ("now", {})

CASES: dict[str, tuple[str, str, list[Any]]] = {
    "hermes": (
        "hermes",
        'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris \u00e9", "days": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        ["Let me see.", PARIS, NOW],
    ),
    "hermes, a list": (
        "hermes",
        '<tool_call>[{"name": "weather", "arguments": {"city": "Paris \u00e9", "days": 3}}, '
        '{"name": "now", "arguments": {}}]</tool_call>',
        [PARIS, NOW],
    ),
    "hermes, members in another order": (
        "hermes",
        '<tool_call>{"arguments": {"city": "Paris \u00e9", "days": 3}, "name": "weather"}</tool_call> Done.',
        [PARIS, " Done."],
    ),
    "hermes, arguments as text": (
        "hermes",
        '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>',
        [NOW],
    ),
    "hermes, brackets and quotes in a text": (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "}]\\"</tool_call>\\\\"}}</tool_call>',
        [("weather", {"city": '}]"</tool_call>\\'})],
    ),
    "hermes, no JSON": ("hermes", "a <tool_call>\n{nonsense}\n</tool_call> b", None),
    "hermes, a list without calls": ("hermes", "a\n<tool_call> [ 1, 2]</tool_call>", None),
    "hermes, a tool that is not there": (
        "hermes",
        '<tool_call> {"name": "rm", "arguments": {}}</tool_call>',
        None,
    ),
    "hermes, a marker that never ends": ("hermes", 'x <tool_call>{"name": "weather"', None),
    "hermes, half a marker": ("hermes", "1 <tool_ca", None),
    "hermes, only words": ("hermes", " two  words \n", None),
    "qwen3_coder": (
        "qwen3_coder",
        "I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nParis \u00e9\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        ["I look.", PARIS],
    ),
    "qwen3_coder, a tool that is not there": (
        "qwen3_coder",
        "a <tool_call> <function=rm>\n</function></tool_call>",
        None,
    ),
    "llama3_json": (
        "llama3_json",
        '{"name": "weather", "parameters": {"city": "Paris \u00e9", "days": 3}}; {"name": "now", "parameters": {}}'
        "<|eot_id|>",
        [PARIS, NOW],
    ),
    "llama3_json, with a tag": (
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}<|eom_id|>',
        [NOW],
    ),
    "llama3_json, other JSON": ("llama3_json", ' {"city": "Paris"}; 1', None),
    "pythonic": ("pythonic", '[weather(city="Paris \u00e9", days=3), now()]', [PARIS, NOW]),
    "pythonic, with markers": ("pythonic", "<|python_start|>[now()]<|python_end|><|eot|>", [NOW]),
    "pythonic, a list of numbers": ("pythonic", " [1, 2] and [3", None),
    "pythonic, code that is no value": ("pythonic", "[weather(city=open('/etc/passwd'))]", None),
    "mistral": (
        "mistral",
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris \u00e9", "days": 3}}, '
        '{"name": "now", "arguments": {}}]</s>',
        [PARIS, NOW],
    ),
    "mistral, with names": (
        "mistral",
        'Well.[TOOL_CALLS]weather[ARGS]{"city": "Paris \u00e9", "days": 3}[TOOL_CALLS]now{}</s>',
        ["Well.", PARIS, NOW],
    ),
    "mistral, no call": ("mistral", "[TOOL_CALLS] [nothing]", None),
    "harmony": (
        "harmony",
        "<|channel|>analysis<|message|>They want weather.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.weather <|constrain|>json<|message|>{"city": "Paris \u00e9", "days": 3}<|call|>',
        [Reasoning("They want weather."), PARIS],
    ),
    "harmony, words": (
        "harmony",
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>Hello!<|return|>",
        [Reasoning("Easy."), "Hello!"],
    ),
}


def form_of(name: str, reasoning: str = "") -> OutputForm:
    return OutputForm(name, reasoning, TOOLS)


def as_told(found: list[Part]) -> list[Any]:
    told: list[Any] = []
    for part in found:
        if part.kind is CallBegun:
            told.append((part.name, json.loads(part.text)))
        else:
            told.append(part.text if part.kind is Content else Reasoning(part.text))
    return told


@pytest.mark.parametrize("case", CASES)
def test_calls_are_found_and_what_is_none_stays_text(case: str) -> None:
    name, text, expected = CASES[case]

    found = as_told(parse(text, form_of(name)))

    assert found == ([text] if expected is None else expected)


@pytest.mark.parametrize("case", CASES)
@given(data=st.data())
def test_text_cut_anywhere_gives_the_same(case: str, data: st.DataObject) -> None:
    name, text, _ = CASES[case]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)) | {0, len(text)})
    parser = OutputParser(form_of(name))
    events = [one for a, b in pairwise(cuts) for one in parser.feed(text[a:b])]

    assert parts([*events, *parser.close()]) == parse(text, form_of(name))


SCRAPS = [
    "<tool_call>", "</tool_call>", "<function=", "weather>", "</function>", "<parameter=city>", "</parameter>",
    "<|python_tag|>", "<|python_start|>", "[TOOL_CALLS]", "[ARGS]", "</s>", "<|channel|>", "analysis", "<|message|>",
    "to=functions.now", "<|end|>", "<|start|>", "<think>", "</think>", "[", "]", "{", "}", '"', "\\", ",", ";", ":",
    '{"name": "now", "arguments": {', '"name"', '"now"', '"arguments"', "now(", ")", " ", "\n", "x", "\u00e9", "now",
]  # fmt: skip


@given(
    st.sampled_from(sorted(TOOL_FORMATS)),
    st.sampled_from(["", "think"]),
    st.lists(st.sampled_from(SCRAPS), max_size=30),
    st.booleans(),
)
def test_any_text_piece_by_piece_is_as_the_whole_and_loses_no_words(
    name: str, reasoning: str, scraps: list[str], in_reasoning: bool
) -> None:
    form, text = form_of(name, reasoning), "".join(scraps)
    parser = OutputParser(form, in_reasoning=in_reasoning)
    events = [one for piece in scraps for one in parser.feed(piece)]
    told = parts([*events, *parser.close()])

    characters = OutputParser(form, in_reasoning=in_reasoning)
    one_by_one = [one for piece in text for one in characters.feed(piece)]

    assert told == parse(text, form, in_reasoning=in_reasoning)
    assert told == parts([*one_by_one, *characters.close()])
    assert all(text.count("x") >= sum(part.text.count("x") for part in told) for _ in told)
    if name == "hermes" and not reasoning and not any(part.kind is CallBegun for part in told):
        assert "".join(part.text for part in told) == text


def test_arguments_come_while_the_model_writes_them() -> None:
    parser = OutputParser(form_of("hermes"))

    assert parser.feed('<tool_call>{"name": "weather", "arguments": ') == []
    assert parts(parser.feed('{"city": "Par')) == [Part(CallBegun, '{"city": "Par', "weather")]
    assert [one.text for one in parser.feed('is"}') if not isinstance(one, CallBegun)] == ['is"}']


def test_call_that_is_cut_short_keeps_what_there_is_of_it() -> None:
    found = parse('<tool_call>{"name": "weather", "arguments": {"city": "Par', form_of("hermes"))

    assert found == [Part(CallBegun, '{"city": "Par', "weather")]


def test_only_the_first_call_is_passed_on_without_parallel_calls() -> None:
    text = CASES["hermes"][1] + " Bye."

    found = parse(text, OutputForm("hermes", "", TOOLS, parallel=False))

    assert as_told(found) == ["Let me see.", PARIS, " Bye."]


@pytest.mark.parametrize(
    ("text", "in_reasoning", "expected"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, [Reasoning("Hm."), "Yes."]),
        ("\nHm.\n</think>\n\nYes.", True, [Reasoning("Hm."), "Yes."]),
        ("<think>\nHm.\n</think>\n\nYes.", True, [Reasoning("Hm."), "Yes."]),
        ("Yes </think>.", False, ["Yes </think>."]),
        ("<think>never done", False, [Reasoning("never done")]),
        ("<think>\n\n</think>\n\nYes.", False, ["Yes."]),
        (
            '<think>a <tool_call>{"name": "now", "arguments": {}}</tool_call></think><tool_call>{"name": "now"}</tool_call>',
            False,
            [Reasoning('a <tool_call>{"name": "now", "arguments": {}}</tool_call>'), NOW],
        ),
    ],
)
def test_thoughts_are_told_from_words(text: str, in_reasoning: bool, expected: list[Any]) -> None:
    assert as_told(parse(text, form_of("hermes", "think"), in_reasoning=in_reasoning)) == expected


def test_forced_output_is_calls_whatever_the_format_of_the_model() -> None:
    listed = OutputForm("mistral", "think", TOOLS, "list")
    named = OutputForm("harmony", "", {"weather": TOOLS["weather"]}, "arguments")

    now = '[{"name": "now", "parameters": {}}]'
    assert as_told(parse(now, listed)) == [NOW]
    assert as_told(parse(f"which one?</think>{now}", listed, in_reasoning=True)) == [
        Reasoning("which one?"),
        NOW,
    ]
    assert as_told(parse('{"city": "Paris \u00e9", "days": 3}', named)) == [PARIS]


def test_many_markers_without_a_call_do_not_have_the_text_read_again_and_again() -> None:
    text = "<tool_call>{" * 3000

    assert parse(text, form_of("hermes")) == [Part(Content, text)]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if tools %}<tool_call>{% endif %}{{ '<think></think>' }}", ("hermes", "think")),
        ("{% for tool in tools %}<tool_call>\n<function=x>{% endfor %}", ("qwen3_coder", "")),
        ('{{ tools }} {"name": function name, "parameters": dictionary} <|python_tag|>', ("llama3_json", "")),
        ("{{ tools }} [TOOL_CALLS] [THINK]", ("mistral", "mistral")),
        ("{{ tools }} <|channel|>", ("harmony", "harmony")),
        ("{{ messages }}", ("", "")),
    ],
)
def test_formats_are_recognized_in_a_template(template: str, expected: tuple[str, str]) -> None:
    assert detect(template) == expected
