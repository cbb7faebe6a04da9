"""JSON that costs too much to read is known as such however it comes in pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from octavo.gateway.json_bounds import MAX_DEPTH, MAX_WEIGHT, JsonScale, TooDeep, TooHeavy

TEXTS = st.text(st.sampled_from('"\\,:[]{}e.1 aé\n'), max_size=6)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def weight_of(data: bytes, sizes: list[int]) -> int:
    scale, start = JsonScale(), 0
    for size in sizes:
        scale.add(data[start : start + size])
        start += size
    scale.add(data[start:])
    assert scale.depth == 0
    return scale.weight


def without_texts(value: Any) -> Any:
    match value:
        case str():
            return ""
        case list():
            return [without_texts(item) for item in value]
        case dict():
            return {f"{number:c}": without_texts(item) for number, item in enumerate(value.values(), 0x4E00)}
        case _:
            return value


@given(VALUES, st.lists(st.integers(0, 9), max_size=30), st.booleans())
def test_weight_is_the_same_however_it_is_cut_and_whatever_its_texts_hold(
    value: Any, sizes: list[int], ascii_only: bool
) -> None:
    whole = weight_of(json.dumps(value, ensure_ascii=ascii_only).encode(), [])
    assert weight_of(json.dumps(value, ensure_ascii=ascii_only).encode(), sizes) == whole
    assert weight_of(json.dumps(without_texts(value), ensure_ascii=False).encode(), []) == whole


@pytest.mark.parametrize(
    "body",
    [
        [1] * MAX_WEIGHT,
        [{}] * (MAX_WEIGHT // 8),
        {f"k{number}": 1 for number in range(MAX_WEIGHT // 16)},
        [1e999] * (MAX_WEIGHT // 8),
        [0.5] * (MAX_WEIGHT // 16),
    ],
)
def test_too_many_values_are_too_heavy(body: Any) -> None:
    with pytest.raises(TooHeavy):
        JsonScale().add(json.dumps(body).replace("Infinity", "1e999").encode())


def test_digits_of_a_whole_body_are_too_heavy() -> None:
    with pytest.raises(TooHeavy):
        JsonScale().add(b"[" + b"9" * (16 * MAX_WEIGHT) + b"]")


def test_a_prompt_of_200_000_tokens_and_a_text_of_8_mib_are_not() -> None:
    JsonScale().add(json.dumps({"prompt": list(range(100_000, 300_000))}).encode())
    JsonScale().add(json.dumps({"prompt": 'a, "b": [1.5e3]' * 500_000}).encode())


@pytest.mark.parametrize("sizes", [[], [100], [1] * 400])
def test_nesting_is_bounded(sizes: list[int]) -> None:
    assert weight_of(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH, sizes)
    with pytest.raises(TooDeep):
        weight_of(b'["[",' + b"[" * MAX_DEPTH + b"]" * (MAX_DEPTH + 1), sizes)


def test_many_lists_beside_each_other_are_not_deep() -> None:
    assert weight_of(b"[" + b",".join([b"[{}]"] * 1000) + b"]", [])
