"""What `octavo chaos` does and how it judges; tests/e2e/test_chaos.py runs it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import grpc
import pytest
from octavo.v1 import generation_pb2 as pb
from octavo_lab.chaos.attack import Done
from octavo_lab.chaos.questions import Reply, difference, questions
from octavo_lab.chaos.raw import GenerateFailed, Resumption, may_go_on
from octavo_lab.chaos.report import Findings
from octavo_lab.chaos.schedule import KINDS, Action, schedule


def test_the_same_seed_does_the_same_at_the_same_time() -> None:
    first, again = (schedule(7, tuple(KINDS), 180, 2.5) for _ in range(2))
    assert first == again
    assert schedule(8, tuple(KINDS), 180, 2.5) != first
    assert schedule(7, tuple(reversed(KINDS)), 180, 2.5) == first


def test_every_kind_comes_up_as_often_as_others() -> None:
    actions = schedule(1, tuple(KINDS), 300, 1.0)
    counts = Counter(action.kind for action in actions)
    assert set(counts) == set(KINDS)
    assert max(counts.values()) - min(counts.values()) <= 1
    assert [action.at_s for action in actions] == sorted(action.at_s for action in actions)


def answer(*choices: list[int]) -> Reply:
    question = replace(questions(1, 1, 30)[0], n=len(choices))
    return Reply(question, token_ids=list(choices), texts=["".join(map(chr, one)) for one in choices])


EXPECTED = list(range(65, 90))


@pytest.mark.parametrize(
    ("got", "told"),
    [
        (EXPECTED, None),
        (EXPECTED[:10] + EXPECTED[8:], "token 10 of 25: 2 doubled"),
        (EXPECTED[:10] + EXPECTED[13:], "token 10 of 25: 3 missing"),
        (EXPECTED[:20], "token 20 of 25: 5 missing at the end"),
        ([*EXPECTED, 90], "token 25 of 25: 1 too many at the end"),
        ([*EXPECTED[:5], 7, *EXPECTED[6:]], "token 5 of 25: 7 instead of 70"),
    ],
)
def test_what_is_wrong_with_an_answer_is_told(got: list[int], told: str | None) -> None:
    assert difference(answer([1], EXPECTED), answer([1], got)) == (told and f"choice 1, {told}")


def test_text_is_compared_where_there_are_no_tokens() -> None:
    seen = answer(EXPECTED)
    seen.token_ids = [[]]
    assert difference(answer(EXPECTED), seen) is None
    seen.texts = [seen.texts[0][:4] + seen.texts[0][2:]]
    assert difference(answer(EXPECTED), seen) == "choice 0, character 4 of 25: 2 doubled"


def test_a_pause_is_told_of_the_action_after_which_it_began() -> None:
    streams = [answer([1]) for _ in range(3)]
    streams[0].arrivals = [9.9, 10.0, 11.5, 11.6]
    streams[1].arrivals = [9.9, 10.1, 12.2, 12.3]  # A fault struck a moment after it was set.
    streams[2].arrivals = [9.9, 10.05, 10.1, 10.15]
    done = [
        Done(Action(0, "kill-worker", 0, 0), 10.02, "worker-0"),
        Done(Action(0, "pings", 0, 1), 11.0, "scheduler-0"),
        Done(Action(0, "drain-worker", 0, 0), 11.1, ""),
    ]
    report = Findings({}, done, streams, 0.0, calm_gap_s=0.1)
    pauses = report.pauses()
    assert sorted(pauses) == ["kill-worker", "pings"]
    assert pauses["kill-worker"] == pytest.approx([1.48, 2.18])
    assert pauses["pings"] == []
    assert report.worst_pause_s == pytest.approx(2.1)


def event(**fields: object) -> pb.GenerateEvent:
    return pb.GenerateEvent(**fields)  # type: ignore[arg-type]


def test_a_request_goes_on_with_what_had_come() -> None:
    request = pb.GenerateRequest(request_id="r", text="Once")
    request.sampling.n = 2
    seen: list[tuple[int, str]] = []
    state = Resumption(request, lambda choice, _, text: seen.append((choice, text)))
    assert state.to_send() == request
    state.take(event(accepted=pb.Accepted(seed=5, prompt_tokens=3)))
    state.take(event(delta=pb.Delta(choice=1, token_ids=[7, 8], text="né")))
    state.take(event(finished=pb.Finished(choice=1)))
    again = state.to_send()
    assert again.sampling.seed == 5
    assert again.accepted_as == pb.AcceptedAs(prompt_tokens=3)
    assert list(again.resume) == [pb.ResumedChoice(choice=1, token_ids=[7, 8], shown_bytes=3)]
    # The next scheduler tells the end of the finished choice once more, and perhaps what led to it.
    state.take(event(delta=pb.Delta(choice=1, token_ids=[9], text="x")))
    state.take(event(finished=pb.Finished(choice=1)))
    assert not state.done
    state.take(event(finished=pb.Finished(choice=0)))
    assert state.done
    assert seen == [(1, "né")]


@pytest.mark.parametrize(
    ("code", "reason", "again"),
    [
        ("UNAVAILABLE", "", True),
        ("UNAVAILABLE", "DRAINING", True),
        ("INTERNAL", "", True),
        ("UNKNOWN", "", True),
        ("CANCELLED", "", True),
        ("INTERNAL", "STEP_FAILED", False),
        ("ABORTED", "POISON", False),
        ("INVALID_ARGUMENT", "INVALID_REQUEST", False),
        ("DEADLINE_EXCEEDED", "", False),
    ],
)
def test_what_only_grpc_says_of_an_end_is_a_lost_stream(code: str, reason: str, again: bool) -> None:
    assert may_go_on(grpc.StatusCode[code], reason) is again


def test_a_bad_end_is_raised() -> None:
    state = Resumption(pb.GenerateRequest(), lambda *_: None)
    bad = pb.Finished(choice=0)
    bad.error.reason = "POISON"
    with pytest.raises(GenerateFailed, match="POISON"):
        state.take(event(finished=bad))
