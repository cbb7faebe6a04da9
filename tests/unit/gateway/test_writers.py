"""Answers whole and in events: what was taken from the service is in them, once."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from octavo.gateway.chat_writer import ChatWriter
from octavo.gateway.logprobs import CompletionLogprobs, TokenTexts
from octavo.gateway.responses import degradation_headers, level_header
from octavo.gateway.schemas import ChatRequest, CompletionRequest
from octavo.gateway.writers import CompletionWriter, Head, event, usage_object
from octavo.protocol.steps import FinishReason, TokenLogprobs
from octavo.types import Choice, Delta, Progress, Usage

HEAD = Head("cmpl-1", 1700000000, 'a "model"')


def parsed(data: bytes) -> list[Any]:
    parts = data.decode().split("\n\n")
    assert parts.pop() == ""
    return [json.loads(part.removeprefix("data: ")) for part in parts]


@given(st.lists(st.text(), max_size=5), st.sampled_from([None, "é\n\n", 7]))
def test_events_hold_any_text_and_parse(texts: list[str], stop: str | int | None) -> None:
    request = CompletionRequest.model_validate({"prompt": "x", "stream": True, "stop_token_ids": [7]})
    writer = CompletionWriter(request, HEAD, [""])
    data = b"".join(writer.events(Progress((Delta(0, text, (1,)),), ()), 0, 3) for text in texts)
    end = Choice(0, "".join(texts), (1,), FinishReason.STOP, stop)
    data += writer.events(Progress((), (end,)), 0, 3)
    found = parsed(data)

    assert "".join(event["choices"][0]["text"] for event in found) == "".join(texts)
    assert found[-1]["choices"][0]["finish_reason"] == "stop"
    assert found[-1]["choices"][0]["stop_reason"] == stop
    assert {event["model"] for event in found} == {HEAD.model}


LINE_ENDS = [chr(code) for code in range(0x11000) if len(f"a{chr(code)}b".splitlines()) > 1]


def test_every_event_is_one_line_however_lines_are_split() -> None:
    text = "".join(f"é{end}" for end in LINE_ENDS)
    logprobs = (TokenLogprobs(0, -1.0, 1, (0,), (-1.0,), text.encode(), (text.encode(),)),)
    completion = {"prompt": "x", "stream": True, "logprobs": 1}
    chat = {"messages": [{"role": "user", "content": "x"}], "stream": True, "logprobs": True}
    head = Head("cmpl-1", 1700000000, text)
    writers: list[CompletionWriter | ChatWriter] = [
        CompletionWriter(CompletionRequest.model_validate(completion), head, [text]),
        ChatWriter(ChatRequest.model_validate(chat), head),
    ]
    for writer in writers:
        end = Choice(0, text, (1,), FinishReason.STOP, text)
        data = writer.events(Progress((Delta(0, text, (1,), logprobs),), (end,)), 0, 3)
        data += event({"error": {"message": text}})

        lines = [line for line in data.decode().splitlines() if line]
        found = [json.loads(line.removeprefix("data: ")) for line in lines]
        assert found == parsed(data)
        assert found[0]["model"] == text
        assert found[-1]["error"]["message"] == text
        assert found[-2]["choices"][0]["stop_reason"] == text
    assert {"\x85", "\u2028", "\u2029"} < set(LINE_ENDS)


def test_last_token_and_end_are_one_event() -> None:
    request = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], "stream": True})
    writer = ChatWriter(request, HEAD)
    end = Choice(0, "ab", (1, 2), FinishReason.LENGTH)
    found = parsed(writer.events(Progress((Delta(0, "b", (2,)),), (end,)), 0, 3))

    assert [event["choices"][0]["delta"] for event in found] == [
        {"role": "assistant", "content": ""},
        {"content": "b"},
    ]
    assert found[1]["choices"][0]["finish_reason"] == "length"


def test_usage_sums_prompts_and_tells_what_was_trimmed() -> None:
    usages = [Usage(5, 2, 1, 3, 10), Usage(7, 4)]

    assert usage_object(usages) == {
        "prompt_tokens": 12,
        "completion_tokens": 6,
        "total_tokens": 18,
        "prompt_tokens_details": {"cached_tokens": 1, "trimmed_tokens": 3},
        "completion_tokens_details": {"clamped_max_tokens": 10},
    }
    assert degradation_headers(usages) == {"x-octavo-trimmed-tokens": "3", "x-octavo-max-tokens": "10"}


def test_level_is_the_highest_that_a_prompt_was_taken_at() -> None:
    assert level_header([0, 2, None]) == {"x-octavo-level": "2"}
    assert level_header([None]) == {}


@given(st.text(), st.data())
def test_names_of_tokens_make_up_the_text_wherever_it_is_cut(text: str, data: Any) -> None:
    encoded = text.encode("utf-8", "replace")
    cuts = sorted(data.draw(st.sets(st.integers(0, len(encoded)))) | {0, len(encoded)})
    pieces = [encoded[a:b] for a, b in pairwise(cuts)]
    texts = TokenTexts(as_ids=False)
    names = [texts.at(TokenLogprobs(0, -1.0, 1, (0,), (-1.0,), piece, (piece,))) for piece in pieces]

    assert "".join(name for name, _ in names) == encoded.decode()
    assert all(best == [name] for name, best in names)


def test_logprobs_hold_the_sampled_token_beside_the_best_and_no_infinity() -> None:
    entry = TokenLogprobs(3, float("-inf"), 3, (1, 2), (-0.1, -2.0), b"c", (b"a", b"b"))
    found = CompletionLogprobs(as_ids=False).take([entry])

    assert found["top_logprobs"] == [{"c": -9999.0, "a": -0.1, "b": -2.0}]
    assert json.loads(json.dumps(found, allow_nan=False)) == found
