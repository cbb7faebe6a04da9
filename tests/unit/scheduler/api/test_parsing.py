"""Messages that do not parse say why, by field."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from octavo.v1 import generation_pb2 as pb

from scheduler_svc.api import parsing
from scheduler_svc.api.parsing import Malformed, Parser, accept
from scheduler_svc.errors import ServiceError


def request(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**fields)


def session(**generate: Any) -> pb.SessionRequest:
    return pb.SessionRequest(generate=request(**generate))


parse_request = Parser(pb.GenerateRequest).parse


def parse_session(data: bytes) -> tuple[parsing.SessionPart | Malformed, ...]:
    return asyncio.run(parsing.parse_session(data))


def spoiled(message: pb.GenerateRequest | pb.SessionRequest) -> bytes:
    return message.SerializeToString().replace(b"@@", b"\xff\xfe")


def test_good_message_passes() -> None:
    message = request(text="hello", sampling={"n": 2})
    assert accept(parse_request(message.SerializeToString())) == message


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (request(text="@@"), "text"),
        (request(model="@@", text="@@"), "model"),
        (request(sampling={"stop": ["fine", "@@"]}), "sampling.stop[1]"),
        (request(chat={"messages": [{"role": "@@"}]}), "chat.messages[0].role"),
    ],
)
def test_field_that_is_not_utf8_is_named(message: pb.GenerateRequest, field: str) -> None:
    parsed = parse_request(spoiled(message))
    assert isinstance(parsed, Malformed)
    assert parsed.error.violations == ((field, "is not valid UTF-8"),)
    with pytest.raises(ServiceError):
        accept(parsed)


def test_session_message_keeps_the_id_of_its_request() -> None:
    (parsed,) = parse_session(spoiled(session(request_id="r7", text="@@")))
    assert isinstance(parsed, Malformed)
    assert (parsed.request_id, parsed.error.violations[0][0]) == ("r7", "text")
    (nameless,) = parse_session(spoiled(session(request_id="@@")))
    assert isinstance(nameless, Malformed)
    assert (nameless.request_id, nameless.error.violations[0][0]) == ("", "request_id")


def test_of_requests_that_come_together_only_the_bad_one_is_lost() -> None:
    requests = [request(request_id=name, text=text) for name, text in (("a", "x"), ("b", "@@"), ("c", "y"))]
    message = pb.SessionRequest(generate_many=pb.GenerateRequests(requests=requests))
    first, bad, last = parse_session(spoiled(message))
    assert (first, last) == (requests[0], requests[2])
    assert isinstance(bad, Malformed)
    assert (bad.request_id, bad.error.violations[0][0]) == ("b", "text")


@given(data=st.binary(max_size=200))
def test_any_bytes_become_messages_or_reasons(data: bytes) -> None:
    for parsed in parse_session(data):
        if isinstance(parsed, Malformed):
            assert parsed.error.reason == "INVALID_REQUEST"
            assert parsed.error.message
