"""A live request between the core's effects and its client's outbox."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from octavo.protocol.steps import FinishReason
from octavo.sampling import SamplingParams
from octavo.v1 import common_pb2
from octavo.v1 import generation_pb2 as pb
from tokenizers import Tokenizer

from scheduler_svc.core import (
    ChoiceTimings,
    CoreError,
    FinishChoice,
    NewRequest,
    Reason,
    RequestAccepted,
    TokenDelta,
)
from scheduler_svc.errors import ServiceError
from scheduler_svc.observe.metrics import SchedulerMetrics
from scheduler_svc.requests.accounts import Accounts
from scheduler_svc.requests.messages import GenerateCall, ResumedChoice, TextPrompt
from scheduler_svc.requests.outbox import Outbox, SessionOutbox
from scheduler_svc.requests.state import PreparedRequest, RequestState
from scheduler_svc.text.tokenization import make_table
from worker_svc.runner.sim import byte_level_tokenizer

TOKENIZER = Tokenizer.from_str(byte_level_tokenizer())
EOS = 2
TIMINGS = ChoiceTimings(0.1, 0.2, 0.01, 0.5, 0, 0)


def tokens(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text).ids)


def request_state(
    outbox: Outbox,
    *,
    resumed: dict[int, ResumedChoice] | None = None,
    call: dict[str, Any] | None = None,
    **fields: Any,
) -> RequestState:
    table = make_table(TOKENIZER)
    assert table is not None
    sampling = SamplingParams(**{"n": 1, "seed": 7, "max_tokens": 100, **fields})
    request = NewRequest(request_id="r#1", model="m", prompt_token_ids=list(tokens("hi")), sampling=sampling)
    generate = GenerateCall("r", "", TextPrompt("hi"), sampling, resumed=resumed or {}, **(call or {}))
    account = Accounts(SchedulerMetrics(), time.monotonic).open("session")
    return RequestState(PreparedRequest(generate, request, table, frozenset({EOS})), outbox, account)


def feed(state: RequestState, text: str, *, choice: int = 0, hide_last: bool = False) -> bool:
    delta = TokenDelta("r#1", choice, tokens(text), None)
    return state.on_tokens(delta, time.monotonic(), {}, hide_last=hide_last)


def finish(reason: FinishReason, *, choice: int = 0, last: bool = True, **fields: Any) -> FinishChoice:
    given: dict[str, Any] = {"stop_token_id": None, "cached_tokens": 0, "completion_tokens": 0, "error": None}
    return FinishChoice("r#1", choice, reason, timings=TIMINGS, last=last, **{**given, **fields})


@pytest.fixture
async def outbox() -> SessionOutbox:
    return SessionOutbox(limit_bytes=1 << 20)


async def test_deltas_merge_while_their_client_is_behind(outbox: SessionOutbox) -> None:
    state = request_state(outbox, n=2, call={"return_token_ids": True})
    for word in ("one ", "two ", "three"):
        feed(state, word, choice=0)
        feed(state, word, choice=1)
    events = outbox.take().events
    assert [(event.delta.choice, event.delta.text) for event in events] == [
        (0, "one two three"),
        (1, "one two three"),
    ]
    assert list(events[0].delta.token_ids) == list(tokens("one two three"))
    feed(state, "!")
    assert [event.delta.text for event in outbox.take().events] == ["!"]


async def test_merged_delta_is_bounded(outbox: SessionOutbox) -> None:
    state = request_state(outbox, max_tokens=100_000)
    for _ in range(100):
        feed(state, "x" * 100)
    texts = [event.delta.text for event in outbox.take().events]
    assert "".join(texts) == "x" * 10_000
    assert max(map(len, texts)) <= 4096


async def test_output_is_held_until_there_is_as_much_as_was_asked_for(outbox: SessionOutbox) -> None:
    state = request_state(outbox, call={"return_token_ids": True, "stream_interval": 4})
    texts = []
    for letter in "abcdefghij":
        feed(state, letter)
        texts += [event.delta.text for event in outbox.take().events]
    assert texts == ["a", "bcde", "fghi"]
    state.on_finish(finish(FinishReason.LENGTH))
    assert outbox.take().events[0].delta.text == "j"


async def test_output_is_not_held_beyond_the_bound_of_a_delta(outbox: SessionOutbox) -> None:
    state = request_state(outbox, max_tokens=100_000, call={"stream_interval": 2**32 - 1})
    for _ in range(1 + 512):
        feed(state, "x")
    assert "".join(event.delta.text for event in outbox.take().events) == "x" * 513


async def test_output_beyond_the_limit_cuts_the_stream() -> None:
    outboxes = []

    async def write() -> None:
        outboxes.append(SessionOutbox(limit_bytes=1000))
        await asyncio.Event().wait()

    writer = asyncio.create_task(write())
    await asyncio.sleep(0)
    state = request_state(outboxes[0])
    for _ in range(20):
        feed(state, "x" * 100)
    with pytest.raises(asyncio.CancelledError):
        await writer
    assert outboxes[0].cut


async def test_token_that_stopped_a_choice_is_counted_but_not_shown(outbox: SessionOutbox) -> None:
    state = request_state(outbox, stop_token_ids=tokens("!"), call={"return_token_ids": True})
    feed(state, "done!", hide_last=True)
    state.on_finish(finish(FinishReason.STOP, stop_token_id=tokens("!")[0]))
    delta, finished = (event for event in outbox.take().events)
    assert (delta.delta.text, len(delta.delta.token_ids)) == ("done", 5)
    assert finished.finished.usage.completion_tokens == 5
    assert state.ended


async def test_stop_string_wins_over_a_limit_reached_by_the_same_token(outbox: SessionOutbox) -> None:
    state = request_state(outbox, stop=("END",))
    assert not feed(state, "the EN")
    assert feed(state, "D")
    state.on_finish(finish(FinishReason.LENGTH))
    events = outbox.take().events
    assert "".join(event.delta.text for event in events) == "the "
    assert events[-1].finished.reason == common_pb2.FINISH_REASON_STOP
    assert events[-1].finished.stop == "END"


async def test_tokens_past_a_stop_string_are_neither_shown_nor_billed(outbox: SessionOutbox) -> None:
    state = request_state(outbox, stop=("END",), call={"return_token_ids": True})
    assert feed(state, "the END and more")
    assert not feed(state, "still more")
    assert state.choices[0].over is FinishReason.STOP
    state.on_finish(finish(FinishReason.STOP))
    events = outbox.take().events
    assert sum(len(event.delta.token_ids) for event in events) == len("the END")
    assert events[-1].finished.usage.completion_tokens == len("the END")


async def test_stop_strings_do_not_count_before_min_tokens(outbox: SessionOutbox) -> None:
    state = request_state(outbox, stop=("b",), min_tokens=3)
    assert not feed(state, "abc")
    assert feed(state, "ab")
    assert "".join(event.delta.text for event in outbox.take().events) == "abca"


async def test_text_is_not_shown_to_a_client_that_wants_none(outbox: SessionOutbox) -> None:
    state = request_state(outbox, stop=("b",), call={"skip_text": True, "return_token_ids": True})
    assert feed(state, "aab")
    events = outbox.take().events
    assert [event.delta.text for event in events] == [""]
    assert len(events[0].delta.token_ids) == 3


async def test_failure_is_told_once_however_it_ends(outbox: SessionOutbox) -> None:
    state = request_state(outbox)
    ended = []
    state.on_end = lambda: ended.append(True)
    error = CoreError(Reason.DEADLINE_RUNNING, "too late", metadata={"phase": "decode"})
    state.on_finish(finish(FinishReason.DEADLINE, error=error))
    state.fail(ServiceError("INTERNAL", "again"))
    assert [event.WhichOneof("event") for event in outbox.take().events] == ["finished"]
    assert ended == [True]
    other = request_state(outbox)
    other.fail(ServiceError("QUEUE_FULL", "no"))
    assert [event.error.reason for event in outbox.take().events] == ["QUEUE_FULL"]


async def test_others_get_a_turn_while_many_choices_are_resumed(outbox: SessionOutbox) -> None:
    state = request_state(outbox, n=9, resumed={index: ResumedChoice(tokens("abc"), 1) for index in range(9)})
    resuming = asyncio.create_task(state.resume())
    turns = 0
    while not resuming.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns >= 9


async def test_accepted_names_the_seed_and_shows_what_a_resumed_client_lacks(outbox: SessionOutbox) -> None:
    resumed = {0: ResumedChoice(tokens("héllo w"), len("hé".encode()))}
    state = request_state(outbox, resumed=resumed)
    await state.resume()
    state.on_accepted(RequestAccepted("r#1", 3, 0.25))
    feed(state, "orld")
    accepted, delta = outbox.take().events
    assert accepted.accepted == pb.Accepted(
        request_id="r", queue_position=3, estimated_wait_ms=250, prompt_tokens=2, seed=7
    )
    assert delta.delta.text == "llo world"


@pytest.mark.parametrize(
    ("sampling", "token_ids", "reason"),
    [
        ({}, (*tokens("ab"), EOS), FinishReason.STOP),
        ({"stop_token_ids": tokens("b")}, tokens("ab"), FinishReason.STOP),
        ({"stop": ("b",)}, tokens("ab"), FinishReason.STOP),
        ({"max_tokens": 2}, tokens("ab"), FinishReason.LENGTH),
        ({"ignore_eos": True}, (*tokens("ab"), EOS), None),
    ],
)
async def test_resumed_choice_that_was_complete_is_over(
    outbox: SessionOutbox, sampling: dict[str, Any], token_ids: tuple[int, ...], reason: FinishReason | None
) -> None:
    state = request_state(outbox, resumed={0: ResumedChoice(token_ids, 0)}, **sampling)
    await state.resume()
    assert state.request.finished_choices == ({0} if reason is not None else set())
    state.on_finish(finish(reason or FinishReason.LENGTH))
    message = outbox.take().events[-1].finished
    assert FinishReason(message.reason) == (reason or FinishReason.LENGTH)
    assert message.usage.completion_tokens == len(token_ids)


@pytest.mark.parametrize("shown_bytes", [4, 2])
async def test_resumed_text_that_cannot_be_is_refused(outbox: SessionOutbox, shown_bytes: int) -> None:
    state = request_state(outbox, resumed={0: ResumedChoice(tokens("aé"), shown_bytes)})
    with pytest.raises(ServiceError) as caught:
        await state.resume()
    assert caught.value.violations[0][0] == "resume[0].shown_bytes"


async def test_request_that_is_moved_ends_as_a_whole_and_shows_nothing_that_was_held_back(
    outbox: SessionOutbox,
) -> None:
    state = request_state(outbox, n=2, stop=("stop",))
    feed(state, "some text, then sto", choice=0)
    feed(state, "all of it", choice=1)
    state.on_finish(finish(FinishReason.LENGTH, choice=1, last=False))
    state.move(ServiceError("NO_WORKER", "gone").elsewhere("there:1"))
    state.on_finish(finish(FinishReason.CANCELLED, choice=0))

    events = outbox.take().events
    assert [event.delta.text for event in events if event.HasField("delta")] == [
        "some text, then ",
        "all of it",
    ]
    assert [event.finished.choice for event in events if event.HasField("finished")] == [1]
    assert (events[-1].error.reason, events[-1].error.metadata["endpoint"]) == ("NO_WORKER", "there:1")
    assert state.ended


async def test_request_that_ends_before_it_is_moved_has_its_own_end(outbox: SessionOutbox) -> None:
    state = request_state(outbox)
    state.move(ServiceError("DRAINING", "draining"))
    state.on_finish(finish(FinishReason.STOP))

    (event,) = outbox.take().events
    assert event.finished.reason == common_pb2.FINISH_REASON_STOP


async def test_wait_for_a_worker_is_told_with_what_is_left_of_it(outbox: SessionOutbox) -> None:
    state = request_state(outbox)
    state.tell_wait(2.5, 7.5)
    state.tell_wait(3.5, None)

    first, second = (event.progress for event in outbox.take().events)
    assert (first.reason, first.waited_ms, first.left_ms) == (pb.WAIT_REASON_NO_WORKER, 2500, 7500)
    assert not second.HasField("left_ms")
