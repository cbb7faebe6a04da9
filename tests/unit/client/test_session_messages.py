"""What goes together in one message of a Session."""

from __future__ import annotations

from collections import deque

from octavo._sdk.session import next_message
from octavo.v1 import generation_pb2 as pb


def messages(*waiting: pb.SessionRequest | pb.GenerateRequest) -> list[pb.SessionRequest]:
    outbox = deque(waiting)
    made = []
    while outbox:
        made.append(next_message(outbox))
    return made


def request(name: str, size: int = 1) -> pb.GenerateRequest:
    return pb.GenerateRequest(request_id=name, text="x" * size)


def test_request_that_waits_alone_has_its_own_message() -> None:
    assert messages(request("a")) == [pb.SessionRequest(generate=request("a"))]


def test_requests_that_wait_at_the_same_time_go_together_in_order() -> None:
    (message,) = messages(request("a"), request("b"), request("c"))
    assert [one.request_id for one in message.generate_many.requests] == ["a", "b", "c"]


def test_cancel_keeps_its_place_among_requests() -> None:
    cancel = pb.SessionRequest(cancel=pb.CancelRequest(request_id="a"))
    made = messages(request("a"), request("b"), cancel, request("a"))
    assert [one.WhichOneof("message") for one in made] == ["generate_many", "cancel", "generate"]


def test_large_requests_do_not_share_a_message() -> None:
    made = messages(request("a", 200_000), request("b", 200_000), request("c", 10**6), request("d"))
    assert [one.WhichOneof("message") for one in made] == ["generate"] * 4
    assert [one.generate.request_id for one in made] == ["a", "b", "c", "d"]
