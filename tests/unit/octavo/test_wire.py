"""Messages are counted on the wire: every field has its bound, and no bytes are too much to look at."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.internal.encoder import _VarintBytes  # type: ignore[attr-defined]  # the stubs lag
from hypothesis import given
from hypothesis import strategies as st
from octavo.protocol.bounds import BOUNDS, MAX_FIELDS, FieldBound, short
from octavo.protocol.wire import Scanner, TooManyFields, WireError, fields, is_repeated
from octavo.v1 import generation_pb2, operations_pb2
from octavo.v1 import generation_pb2 as pb

DOCS = Path(__file__).parents[3] / "docs/limits.md"
DELIMITED = 2
REQUEST = Scanner(pb.GenerateRequest.DESCRIPTOR)


def field_of(number: int, content: bytes) -> bytes:
    """A field on the wire."""
    return _VarintBytes(number << 3 | DELIMITED) + _VarintBytes(len(content)) + content


def reachable() -> Iterator[Any]:
    """Every field of every message that comes to the scheduler's port."""
    waiting = [
        method.input_type
        for module in (generation_pb2, operations_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]
    seen = set()
    while waiting:
        message = waiting.pop()
        if message.full_name in seen or message.GetOptions().map_entry:
            continue
        seen.add(message.full_name)
        for field in message.fields:
            yield field
            if field.message_type is not None:
                waiting.append(field.message_type)


FIELDS = {f"{field.containing_type.name}.{field.name}": field for field in reachable()}
COUNTED = [name for name, bound in BOUNDS.items() if bound.count is not None]
SIZED = [name for name, bound in BOUNDS.items() if bound.bytes is not None]


def test_every_field_that_can_grow_has_a_bound() -> None:
    assert set(BOUNDS) <= set(FIELDS)
    for name, field in FIELDS.items():
        bound = BOUNDS.get(name, FieldBound())
        if field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            assert bound.bytes is not None, name
        assert (bound.count is not None) == is_repeated(field), name


def test_page_of_limits_has_the_table_of_the_code() -> None:
    rows = re.findall(
        r"^\| `(\w+\.\w+)` \| ([\d,]*) \| ([\d,]*)(, together)? \|", DOCS.read_text(), re.MULTILINE
    )
    said = {
        name: FieldBound(
            *(int(cell.replace(",", "")) if cell else None for cell in cells), together=bool(mark)
        )
        for name, *cells, mark in rows
    }

    assert said == dict(BOUNDS)
    assert f"{MAX_FIELDS:,} fields" in DOCS.read_text()


@pytest.mark.parametrize("name", COUNTED)
def test_list_may_have_as_many_entries_as_its_bound_and_not_one_more(name: str) -> None:
    field = FIELDS[name]
    count = BOUNDS[name].count
    assert count is not None
    scanner = Scanner(field.containing_type)
    inner = field.message_type
    if inner is None and field.type != FieldDescriptor.TYPE_STRING:
        ways = [lambda many: field_of(field.number, b"\x83\x07" * many)]
        if count < MAX_FIELDS:
            ways.append(lambda many: (_VarintBytes(field.number << 3) + b"\x07") * many)
            ways.append(
                lambda many: field_of(field.number, b"\x07") + field_of(field.number, b"\x07" * (many - 1))
            )
    else:
        ways = [lambda many: field_of(field.number, b"") * many]
    for way in ways:
        scanner.check(way(count))
        with pytest.raises(WireError, match="entries") as caught:
            scanner.check(way(count + 1))
        assert caught.value.field == field.name


@pytest.mark.parametrize("name", SIZED)
def test_field_may_have_as_many_bytes_as_its_bound_and_not_one_more(name: str) -> None:
    field, size = FIELDS[name], BOUNDS[name].bytes
    assert size is not None
    scanner = Scanner(field.containing_type)
    # A field that no version knows fills up a message.
    content = b"x" * size if field.message_type is None else field_of(99, b"x" * (size - 5))
    scanner.check(field_of(field.number, content))
    with pytest.raises(WireError, match=f"more than {size}") as caught:
        scanner.check(field_of(field.number, content + bytes(5)))
    assert caught.value.field == field.name


def test_excess_is_named_by_its_path_wherever_it_is() -> None:
    message = pb.SessionRequest(
        generate_many={"requests": [{"text": "x"}, {"sampling": {"stop": ["s"] * 17}}, {"text": "x"}]}
    )
    with pytest.raises(WireError) as caught:
        Scanner(pb.SessionRequest.DESCRIPTOR).check(message.SerializeToString())
    assert caught.value.field == "generate_many.requests[1].sampling.stop"


def test_parts_of_one_message_are_counted_together() -> None:
    part = pb.GenerateRequest(sampling={"stop": ["s"] * 9}).SerializeToString()
    REQUEST.check(part)
    with pytest.raises(WireError, match="more than 16"):
        REQUEST.check(part + part)


def test_tokens_of_all_resumed_choices_are_counted_together() -> None:
    most = BOUNDS["ResumedChoice.token_ids"].count or 0
    choices = [{"choice": choice, "token_ids": [7] * (most // 4)} for choice in range(4)]
    REQUEST.check(pb.GenerateRequest(resume=choices).SerializeToString())
    with pytest.raises(WireError) as caught:
        REQUEST.check(pb.GenerateRequest(resume=[*choices, {"token_ids": [7]}]).SerializeToString())
    assert caught.value.field == "resume[4].token_ids"


def test_fields_that_nobody_knows_are_passed_over_and_counted() -> None:
    unknown = b"\x78\x05" + field_of(2000, b"?") + b"\x7d1234" + b"\x7912345678"
    REQUEST.check(pb.GenerateRequest(text="x").SerializeToString() + unknown)
    REQUEST.check(b"\x78\x05" * MAX_FIELDS)
    with pytest.raises(TooManyFields):
        REQUEST.check(b"\x78\x05" * (MAX_FIELDS + 1))


texts = st.text(max_size=5)
requests = st.builds(
    pb.GenerateRequest,
    request_id=texts,
    text=texts,
    sampling=st.fixed_dictionaries(
        {},
        optional={"temperature": st.floats(0, 1), "stop": st.lists(texts), "seed": st.integers(0, 2**64 - 1)},
    ),
    resume=st.lists(
        st.fixed_dictionaries({"token_ids": st.lists(st.integers(0, 2**32 - 1), max_size=5)}), max_size=3
    ),
)


@given(message=requests, cut=st.integers(0, 60))
def test_what_protobuf_reads_is_passed_and_what_is_cut_short_is_not(
    message: pb.GenerateRequest, cut: int
) -> None:
    data = message.SerializeToString()
    if len(message.sampling.stop) <= 16:
        REQUEST.check(data)
    assert [number for number, _, _ in fields(data)] == sorted(number for number, _, _ in fields(data))
    try:
        pb.GenerateRequest.FromString(data[:cut])
    except Exception:  # noqa: BLE001 - whatever protobuf says
        with pytest.raises(WireError):
            REQUEST.check(data[:cut])


@given(data=st.binary(max_size=300))
def test_any_bytes_are_checked_without_a_surprise(data: bytes) -> None:
    with suppress(WireError):
        REQUEST.check(data)
    with suppress(WireError):
        list(fields(data))
    REQUEST.find_not_utf8(data)


def test_what_an_error_repeats_is_cut() -> None:
    assert short("name") == "name"
    assert len(short("n" * 10**6)) == 101
