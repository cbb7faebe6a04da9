"""One request as the client knows it, without a scheduler."""

from __future__ import annotations

import pytest
from octavo._call import Call, _Output
from octavo.types import Delta
from octavo.v1 import common_pb2
from octavo.v1 import generation_pb2 as pb


def test_call_output_and_end_arrive_while_another_thread_takes_nothing_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = object()
    call = Call(pb.GenerateRequest(request_id="r"), 0.0, lambda: None)
    call.apply(pb.RequestEvent(request_id="r", delta=pb.Delta(text="a", token_ids=[1])), stream)
    take = _Output.take
    late = [
        pb.RequestEvent(request_id="r", delta=pb.Delta(text="b", token_ids=[2])),
        pb.RequestEvent(request_id="r", finished=pb.Finished(reason=common_pb2.FINISH_REASON_STOP)),
    ]

    def take_slowly(output: _Output, choice: int) -> Delta | None:
        delta = take(output, choice)
        while late:
            call.apply(late.pop(0), stream)
        return delta

    monkeypatch.setattr(_Output, "take", take_slowly)
    texts = []
    while (delta := call.take()) is not None:
        texts.append(delta.text)

    assert call.done
    assert "".join(texts) == call.result().text == "ab"
