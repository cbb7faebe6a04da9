"""One request as the client knows it, without a scheduler."""

from __future__ import annotations

import pytest
from octavo._sdk.call import Call, _Output
from octavo.types import Delta
from octavo.v1 import common_pb2
from octavo.v1 import generation_pb2 as pb


def request(**terms: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(request_id="r", terms=pb.ServiceTerms(**terms))


def accepted() -> pb.RequestEvent:
    return pb.RequestEvent(request_id="r", accepted=pb.Accepted(seed=1))


def delta(text: str, token_id: int) -> pb.RequestEvent:
    return pb.RequestEvent(request_id="r", delta=pb.Delta(text=text, token_ids=[token_id]))


def test_call_sent_again_before_its_first_token_has_the_rest_of_every_bound() -> None:
    call = Call(request(queue_timeout_ms=4000, ttft_deadline_ms=5000, deadline_ms=9000), lambda: None)
    call.begin(100.0)
    call.to_send(100.0)
    call.apply(accepted())

    again = call.to_send(103.0).terms
    late = call.to_send(106.0).terms

    assert (again.queue_timeout_ms, again.ttft_deadline_ms, again.deadline_ms) == (1000, 2000, 6000)
    # It was taken, and not turned away at the end of its time in the queue: it had begun.
    assert (late.queue_timeout_ms, late.ttft_deadline_ms, late.deadline_ms) == (4000, 1, 3000)


def test_call_that_was_never_taken_has_no_time_left_in_the_queue() -> None:
    call = Call(request(queue_timeout_ms=4000), lambda: None)
    call.begin(100.0)
    call.to_send(100.0)

    late = call.to_send(106.0).terms

    assert late.HasField("queue_timeout_ms")
    assert late.queue_timeout_ms == 0


def test_call_sent_again_with_tokens_has_met_the_bounds_of_its_start() -> None:
    call = Call(request(queue_timeout_ms=4000, ttft_deadline_ms=5000, deadline_ms=9000), lambda: None)
    call.begin(100.0)
    call.to_send(100.0)
    call.apply(accepted())
    call.apply(delta("a", 1))

    again = call.to_send(106.0).terms

    assert (again.queue_timeout_ms, again.deadline_ms) == (4000, 3000)
    assert not again.HasField("ttft_deadline_ms")


def test_call_is_due_at_the_least_bound_that_is_still_to_be_met() -> None:
    call = Call(request(queue_timeout_ms=4000, ttft_deadline_ms=5000, deadline_ms=9000), lambda: None)
    assert call.due_at() is None
    call.begin(100.0)
    dues = [call.due_at()]
    for event in (accepted(), delta("a", 1)):
        call.apply(event)
        dues.append(call.due_at())

    assert dues == [104.0, 105.0, 109.0]


def test_call_put_back_has_all_of_its_time_when_it_is_sent_again() -> None:
    call = Call(request(deadline_ms=9000), lambda: None)
    call.begin(100.0)
    call.put_back()
    call.begin(500.0)

    assert call.to_send(501.0).terms.deadline_ms == 8000


def test_call_output_and_end_arrive_while_another_thread_takes_nothing_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = Call(pb.GenerateRequest(request_id="r"), lambda: None)
    call.apply(delta("a", 1))
    take = _Output.take
    late = [
        delta("b", 2),
        pb.RequestEvent(request_id="r", finished=pb.Finished(reason=common_pb2.FINISH_REASON_STOP)),
    ]

    def take_slowly(output: _Output, choice: int) -> Delta | None:
        taken = take(output, choice)
        while late:
            call.apply(late.pop(0))
        return taken

    monkeypatch.setattr(_Output, "take", take_slowly)
    texts = []
    while (taken := call.take()) is not None:
        texts.append(taken.text)

    assert call.done
    assert "".join(texts) == call.result().text == "ab"
