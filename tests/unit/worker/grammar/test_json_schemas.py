"""What output may be under a JSON schema, by what the schema says of it."""

from __future__ import annotations

import json
from typing import Any, Literal

import numpy as np
import pytest
from octavo.sampling import StructuredOutput
from octavo.structured import of_response_format
from pydantic import BaseModel, Field
from tokenizers import Tokenizer

from worker_svc.grammar.backend import GrammarError, Vocabulary, allowed_ids
from worker_svc.grammar.backends import Backends
from worker_svc.runner.sim import byte_level_tokenizer

EOS = 2
TOKENIZER = Tokenizer.from_str(byte_level_tokenizer())
SIZE = TOKENIZER.get_vocab_size()
BACKENDS = Backends(Vocabulary(byte_level_tokenizer(), SIZE, (EOS,)))


def follows(structured: StructuredOutput, text: str) -> bool:
    matcher = BACKENDS.of(structured).compile(structured).matcher((EOS,))
    for token_id in TOKENIZER.encode(text, add_special_tokens=False).ids:
        if not matcher.accept(token_id):
            return False
    mask = np.zeros(-(-SIZE // 32), dtype=np.int32)
    matcher.fill(mask)
    return EOS in allowed_ids(mask)


def schema(wanted: Any, *, strict: bool | None = None) -> StructuredOutput:
    return StructuredOutput(json_schema=json.dumps(wanted), strict=strict)


OPEN = {"type": "object", "required": ["q"]}
PERSON = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED = {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]}


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        ({"type": "string", "maxLength": 2}, ['"é日"', '"\\n"'], ['"\t"', '"abc"', '"a""']),
        ({"type": "string", "pattern": '^["é]+$'}, ['"\\"é"'], ['"""', '"a"']),
        ({"type": "string", "pattern": "b"}, ['"abc"'], ['"ac"']),
        ({"type": "string", "pattern": "^a", "maxLength": 2}, ['"ab"'], ['"abc"', '"b"']),
        ({"type": "string", "format": "date"}, ['"2024-02-28"'], ['"2024-13-01"', '"x"']),
        ({"type": "integer", "enum": [1, "a"]}, ["1"], ['"a"']),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}], "minimum": 5}, ["6", "null"], ["1"]),
        ({"$ref": "#/$defs/a%20b", "type": "null", "$defs": {"a b": {}}}, ["null"], ["1"]),
        ({"allOf": [PERSON, NAMED]}, ['{"a": 1, "b": null}', '{"b":null}'], ["{}", '{"a": 1}']),
        ({**PERSON, "anyOf": [{"required": ["a"]}]}, ['{"a": 1}'], ["{}"]),
        (OPEN, ['{"q": [1]}'], ["{}"]),
        ({"type": "array", "prefixItems": [{"type": "null"}], "items": False}, ["[null]"], ["[null, 1]"]),
        ({"enum": [{"ü": 0.5}, "on\noff"]}, ['{"ü": 0.5}', '"on\\noff"'], ['"on\noff"']),
        (True, ["1", '{"a": []}'], ["a"]),
    ],
)
def test_output_follows_all_that_a_schema_says(wanted: Any, good: list[str], bad: list[str]) -> None:
    found = {text: follows(schema(wanted), text) for text in (*good, *bad)}
    assert found == dict.fromkeys(good, True) | dict.fromkeys(bad, False)


def test_object_has_no_properties_but_those_listed_unless_it_says_so() -> None:
    other = '{"a": 1, "z": 2}'
    assert not follows(schema(PERSON), other)
    assert not follows(schema({"type": "array", "items": PERSON}), f"[{other}]")
    assert follows(schema({**PERSON, "additionalProperties": {"type": "integer"}}), other)


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "array", "items": {"type": "number"}, "uniqueItems": True},
        {"$defs": {"a": {"not": {"type": "string"}}}, "$ref": "#/$defs/a"},
        {"type": "string", "format": "hostname-of-mine"},
        {"oneOf": [{"type": "string"}, {"enum": ["a"]}]},
    ],
)
def test_strict_schema_that_output_cannot_be_held_to_is_refused(wanted: dict[str, Any]) -> None:
    structured = schema(wanted, strict=True)
    with pytest.raises(GrammarError):
        BACKENDS.of(structured).compile(structured)
    structured = schema(wanted)
    assert BACKENDS.of(structured).compile(structured), "only where strict is set"


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        (False, "nothing follows the schema false"),
        ({"enum": []}, "Unsatisfiable schema"),
        ({"$ref": "#/$defs/nowhere"}, "does not exist"),
        ({"$ref": "https://example.com/schema"}, "is not present"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "Unsatisfiable schema"),
    ],
)
def test_schema_that_nothing_can_follow_says_why(wanted: Any, problem: str) -> None:
    structured = schema(wanted)
    with pytest.raises(GrammarError, match=problem):
        BACKENDS.of(structured).compile(structured)


def test_class_of_a_program_is_held_to_as_a_whole() -> None:
    class Cat(BaseModel):
        kind: Literal["cat"]
        lives: int = Field(ge=1, le=9)

    class Dog(BaseModel):
        kind: Literal["dog"]
        name: str | None = Field(max_length=3)

    class Owner(BaseModel):
        pets: list[Cat | Dog] = Field(max_length=2)
        best: Cat | Dog = Field(discriminator="kind")

    structured = of_response_format(Owner)
    assert structured is not None
    cat, dog = '{"kind": "cat", "lives": 9}', '{"kind": "dog", "name": null}'
    assert follows(structured, f'{{"pets": [{cat}, {dog}], "best": {cat}}}')
    assert not follows(structured, f'{{"pets": [{cat}], "best": {{"kind": "cow"}}}}')


def allowed_after(structured: StructuredOutput, text: str) -> set[str]:
    matcher = BACKENDS.of(structured).compile(structured).matcher((EOS,))
    for token_id in TOKENIZER.encode(text, add_special_tokens=False).ids:
        assert matcher.accept(token_id)
    mask = np.zeros(-(-SIZE // 32), dtype=np.int32)
    matcher.fill(mask)
    return {"$" if one == EOS else TOKENIZER.decode([one]) for one in allowed_ids(mask)}


def test_spaces_of_json_do_not_go_on_for_ever() -> None:
    integer = schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    assert allowed_after(integer, "{" + "\n" + " " * 18) > {'"', " ", "\n"}
    assert allowed_after(integer, "{" + "\n" + " " * 19) == {'"'}


def test_spaces_that_have_to_be_there_are_left() -> None:
    assert allowed_after(schema({"const": " " * 40}), '"' + " " * 30) == {" "}
    assert " " in allowed_after(StructuredOutput(regex="a *b"), "a" + " " * 30)
