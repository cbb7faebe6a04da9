"""What waits for a client that does not read: merged, bounded, in order, and cut past a limit."""

from __future__ import annotations

import asyncio

import pytest
from octavo.protocol.steps import TokenLogprobs
from octavo.v1 import generation_pb2 as pb

from scheduler_svc.core import TokenDelta
from scheduler_svc.errors import ServiceError
from scheduler_svc.requests.outbox import GenerateOutbox, SessionOutbox
from tests.unit.scheduler.requests.test_state import request_state, tokens

LIMIT = 1 << 20


def say(request: object, text: str, times: int = 1, *, logprobs: bool = False) -> None:
    """Let a request generate a text again and again, one token per step."""
    for _ in range(times):
        for token in tokens(text):
            found = (TokenLogprobs(token, -0.5, 1, (1, 2), (-1.0, -2.0)),) if logprobs else None
            delta = TokenDelta("r#1", 0, (token,), found)
            request.on_tokens(delta, 1.0, {}, hide_last=False)  # type: ignore[attr-defined]


def taken(outbox: SessionOutbox) -> list[pb.SessionEvent]:
    messages = []
    while outbox.pending:
        messages.append(outbox.take())
    return messages


async def test_tokens_of_a_client_that_is_behind_are_merged_into_few_events() -> None:
    outbox = SessionOutbox(LIMIT)
    request = request_state(outbox, call={"return_token_ids": True}, max_tokens=10_000)
    say(request, "0123456789", 40)
    (message,) = taken(outbox)
    assert len(message.events) == 1
    assert message.events[0].delta.text == "0123456789" * 40
    assert len(message.events[0].delta.token_ids) == 400


@pytest.mark.parametrize("call", [{"return_token_ids": True}, {"return_token_ids": True, "skip_text": True}])
@pytest.mark.parametrize("logprobs", [False, True])
async def test_no_message_is_larger_than_a_slow_client_may_cost_and_nothing_is_lost(
    call: dict[str, bool], *, logprobs: bool
) -> None:
    outbox = SessionOutbox(LIMIT)
    request = request_state(outbox, call=call, max_tokens=10**6)
    say(request, "0123456789", 1000, logprobs=logprobs)
    say(request, "the end")
    messages = taken(outbox)
    assert max(message.ByteSize() for message in messages) < 160 * 1024
    deltas = [event.delta for message in messages for event in message.events]
    expected = "0123456789" * 1000 + "the end"
    assert [one for delta in deltas for one in delta.token_ids] == list(tokens(expected))
    assert "".join(delta.text for delta in deltas) == ("" if "skip_text" in call else expected)
    assert sum(len(delta.logprobs) for delta in deltas) == (10_000 if logprobs else 0)
    assert not outbox.pending


async def test_taking_makes_room_again() -> None:
    outbox = SessionOutbox(30_000)
    request = request_state(outbox, call={"return_token_ids": True}, max_tokens=10**6)
    for _ in range(5):
        say(request, "0123456789", 400)
        taken(outbox)
    assert not outbox.cut


@pytest.mark.parametrize("kind", [SessionOutbox, GenerateOutbox])
async def test_client_that_reads_nothing_is_cut_at_the_limit(
    kind: type[SessionOutbox | GenerateOutbox],
) -> None:
    outboxes = []

    async def write() -> None:
        outboxes.append(kind(100_000))
        await asyncio.Event().wait()

    writer = asyncio.create_task(write())
    await asyncio.sleep(0)
    (outbox,) = outboxes
    request = request_state(outbox, call={"return_token_ids": True}, max_tokens=10**6)
    say(request, "0123456789", 1900)
    assert not outbox.cut
    say(request, "0123456789", 200)
    assert outbox.cut
    with pytest.raises(asyncio.CancelledError):
        await writer
    request.fail(ServiceError("CANCELLED", "its stream was cut"))
    assert request.account._accounts.outcomes == {"SLOW_CONSUMER": 1}
