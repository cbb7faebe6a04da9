"""Prompts that are shortened: what stays, what goes, and how much that was."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from octavo.v1 import generation_pb2 as pb

from scheduler_svc.text.chat import ChatTemplate, InputError
from scheduler_svc.text.trimming import TrimSpec, cut, trim_chat

CHATML = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@given(st.integers(1, 300), st.integers(1, 200), st.integers(0, 120), st.integers(0, 120))
def test_prompt_keeps_its_head_and_its_tail_and_loses_what_is_between(
    length: int, most: int, head: int, tail: int
) -> None:
    ids = array("I", range(length))
    kept, trimmed = cut(ids, TrimSpec(most, head, tail))
    assert len(kept) + trimmed == length
    assert len(kept) <= max(most, head + tail)
    if trimmed:
        assert kept[: max(1, head)] == ids[: max(1, head)]
        assert kept[-min(tail, len(kept) - 1) or len(kept) :] == ids[-min(tail, len(kept) - 1) or length :]
        assert sorted(kept) == list(kept)


def test_prompt_without_a_tail_to_keep_loses_its_end() -> None:
    kept, trimmed = cut(array("I", range(100)), TrimSpec(30))
    assert (list(kept), trimmed) == (list(range(30)), 70)


def test_prompt_that_fits_or_may_not_be_cut_stays_as_it_is() -> None:
    ids = array("I", range(100))
    assert cut(ids, TrimSpec(100)) == (ids, 0)
    assert cut(ids, None) == (ids, 0)


def chat(*turns: tuple[str, str]) -> pb.Chat:
    return pb.Chat(messages=[{"role": role, "content": text} for role, text in turns])


def trim(
    conversation: pb.Chat, spec: TrimSpec | None, source: str = CHATML, most: int = 10**6
) -> tuple[str, int]:
    """Trim with one token per byte."""
    template = ChatTemplate(source, {})
    ids, trimmed = trim_chat(
        conversation, lambda part: array("I", list(template.render(part, most).encode())), spec
    )
    return bytes(list(ids)).decode(), trimmed


TALK = chat(
    ("system", "be kind"),
    ("user", "u1" * 10),
    ("assistant", "a1" * 10),
    ("user", "u2" * 10),
    ("assistant", "a2" * 10),
    ("tool", "t2" * 10),
    ("user", "u3"),
)
WHOLE = trim(TALK, None)[0]


def test_chat_loses_its_oldest_turns_whole_and_no_more_than_it_has_to() -> None:
    limit = len(WHOLE) - 1
    text, trimmed = trim(TALK, TrimSpec(limit))
    assert (
        text == f"<system>be kind<user>{'u2' * 10}<assistant>{'a2' * 10}<tool>{'t2' * 10}<user>u3<assistant>"
    )
    assert trimmed == len(WHOLE) - len(text)
    shortest, _ = trim(TALK, TrimSpec(60))
    assert shortest == "<system>be kind<user>u3<assistant>"


def test_chat_never_loses_its_system_prompt_its_last_turn_or_the_header_of_the_reply() -> None:
    text, _ = trim(TALK, TrimSpec(1))
    assert text == "<system>be kind<user>u3<assistant>"


def test_chat_keeps_turns_that_reach_into_the_head_and_the_tail_that_are_kept() -> None:
    head = len(f"<system>be kind<user>{'u1' * 10}")
    text, _ = trim(TALK, TrimSpec(1, keep_head=head))
    assert text == f"<system>be kind<user>{'u1' * 10}<assistant>{'a1' * 10}<user>u3<assistant>"
    text, _ = trim(TALK, TrimSpec(1, keep_tail=40))
    assert text.startswith("<system>be kind<user>u2u2")


def test_prompt_trimmed_again_to_the_size_it_got_is_the_same() -> None:
    generator = random.Random(6)
    for _ in range(300):
        ids = array("I", range(generator.randint(1, 80)))
        spec = TrimSpec(generator.randint(0, 60), generator.randint(0, 40), generator.randint(0, 40))
        kept, trimmed = cut(ids, spec)
        assert cut(ids, replace(spec, max_tokens=len(kept))) == (kept, trimmed)
        spec = TrimSpec(
            generator.randint(0, len(WHOLE) + 5), generator.randint(0, 60), generator.randint(0, 60)
        )
        text, trimmed = trim(TALK, spec)
        assert trim(TALK, replace(spec, max_tokens=len(text))) == (text, trimmed)


def test_chat_that_is_too_long_to_be_rendered_whole_is_trimmed_all_the_same() -> None:
    text, _ = trim(TALK, TrimSpec(60), most=100)
    assert text == "<system>be kind<user>u3<assistant>"
    with pytest.raises(InputError) as caught:
        trim(TALK, None, most=100)
    assert caught.value.reason == "PROMPT_TOO_LONG"
    with pytest.raises(InputError):
        trim(TALK, TrimSpec(10), most=20)


def test_chat_whose_template_wants_its_first_turn_is_left_as_it_is() -> None:
    source = "{% if messages[1].content[:2] != 'u1' %}{{ raise_exception('no') }}{% endif %}" + CHATML
    assert trim(TALK, TrimSpec(60), source) == (WHOLE, 0)
