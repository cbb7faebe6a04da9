"""The asynchronous client against a real gRPC server."""

from __future__ import annotations

import asyncio
import gc
import time

import pytest
from octavo import (
    AsyncClient,
    BatchItem,
    ClientClosedError,
    DeadlineExceededError,
    FinishReason,
    GenerateResult,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    RequestCancelledError,
    UnavailableError,
    UnknownModelError,
)

from tests.unit.client.fake_scheduler import FakeScheduler, expected_text, token_id


async def test_generate_plain_prompt_returns_text_tokens_usage_and_timings(client: AsyncClient) -> None:
    result = await client.generate("hello", max_tokens=5, seed=3)

    assert result.text == expected_text(3, 5)
    assert result.token_ids == tuple(token_id(3, 0, at) for at in range(5))
    assert result.finish_reason is FinishReason.LENGTH
    assert result.seed == 3
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (3, 5)
    assert result.timings.ttft_s == pytest.approx(0.02)


async def test_generate_several_choices_returns_each(client: AsyncClient) -> None:
    result = await client.generate("hello", max_tokens=4, seed=3, n=3)

    assert [choice.text for choice in result.choices] == [expected_text(3, 4, index) for index in range(3)]
    assert result.usage.completion_tokens == 12


async def test_generate_options_arrive_in_the_request(client: AsyncClient, scheduler: FakeScheduler) -> None:
    called_at = time.monotonic()
    await client.generate(
        [1, 2, 3],
        max_tokens=1,
        temperature=0.5,
        stop="END",
        logit_bias={7: -1.0},
        priority="interactive",
        queue_timeout=0,
        deadline=62.5,
        may_trim=True,
        keep_head_tokens=4,
        request_id="mine",
    )

    took_ms = 1000 * (time.monotonic() - called_at)

    request = scheduler.requests[0]
    assert list(request.tokens.ids) == [1, 2, 3]
    assert request.request_id == "mine"
    assert request.sampling.temperature == 0.5
    assert list(request.sampling.stop) == ["END"]
    assert dict(request.sampling.logit_bias) == {7: -1.0}
    assert request.terms.priority == 1
    assert request.terms.HasField("queue_timeout_ms")
    assert request.terms.queue_timeout_ms == 0
    # What went by before it was sent is taken off.
    assert 62_499 - took_ms <= request.terms.deadline_ms <= 62_500
    assert request.terms.may_trim
    assert request.terms.keep_head_tokens == 4


async def test_stream_yields_every_token_once_and_keeps_the_result(client: AsyncClient) -> None:
    stream = client.stream("hello", max_tokens=6, seed=9, logprobs=0)
    deltas = [delta async for delta in stream]

    assert "".join(delta.text for delta in deltas) == expected_text(9, 6)
    assert [token for delta in deltas for token in delta.token_ids] == [token_id(9, 0, at) for at in range(6)]
    assert len([one for delta in deltas for one in delta.logprobs]) == 6
    assert stream.result.text == expected_text(9, 6)
    assert stream.accepted is not None
    assert stream.accepted.queue_position == 2


async def test_stream_consumer_falls_behind_merges_deltas(
    client: AsyncClient, scheduler: FakeScheduler
) -> None:
    stream = client.stream("hello", max_tokens=50, seed=9)
    assert (await stream.wait_accepted()) is not None
    await scheduler.until(lambda: scheduler._steps >= 50)
    await client.generate("another", max_tokens=1)  # by its end, all of the first has arrived

    deltas = [delta async for delta in stream]

    assert len(deltas) == 1
    assert deltas[0].text == expected_text(9, 50)


async def test_stream_waited_for_beside_its_reader_wakes_both(
    client: AsyncClient, scheduler: FakeScheduler
) -> None:
    await scheduler.hold(0)
    stream = client.stream("hello", max_tokens=2, seed=9)
    waiting = [asyncio.create_task(stream.wait_accepted()) for _ in range(2)]
    reading = asyncio.create_task(anext(stream))
    accepted = await asyncio.gather(*waiting)
    await scheduler.allow()

    assert [one.queue_position for one in accepted if one is not None] == [2, 2]
    assert expected_text(9, 2).startswith((await reading).text)


async def test_chat_messages_of_every_form_arrive(client: AsyncClient, scheduler: FakeScheduler) -> None:
    await client.chat("hi", max_tokens=1)
    await client.chat(
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
        max_tokens=1,
        template_vars={"style": "plain"},
        add_generation_prompt=False,
    )

    first, second = scheduler.requests
    assert [(one.role, one.content) for one in first.chat.messages] == [("user", "hi")]
    assert not first.chat.HasField("add_generation_prompt")
    assert [one.role for one in second.chat.messages] == ["system", "user"]
    assert second.chat.template_vars_json == '{"style": "plain"}'
    assert second.chat.HasField("add_generation_prompt")


async def test_many_concurrent_requests_share_one_stream(
    client: AsyncClient, scheduler: FakeScheduler
) -> None:
    results = await asyncio.gather(
        *(client.generate(f"p{seed}", max_tokens=5, seed=seed) for seed in range(200))
    )

    assert [result.text for result in results] == [expected_text(seed, 5) for seed in range(200)]
    assert scheduler.sessions == 1


async def test_task_cancelled_cancels_the_request_on_the_server(
    client: AsyncClient, scheduler: FakeScheduler
) -> None:
    await scheduler.hold(2)
    task = asyncio.create_task(client.generate("hello", max_tokens=100, request_id="gone"))
    await scheduler.until(lambda: len(scheduler.requests) == 1)

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    await scheduler.until(lambda: scheduler.cancelled == ["gone"])


async def test_break_out_of_a_stream_cancels_the_request_on_the_server(
    client: AsyncClient, scheduler: FakeScheduler
) -> None:
    await scheduler.hold(3)
    async for _ in client.stream("hello", max_tokens=100, request_id="gone"):
        break
    gc.collect()

    await scheduler.until(lambda: scheduler.cancelled == ["gone"])


async def test_stream_left_through_async_with_is_cancelled(
    client: AsyncClient, scheduler: FakeScheduler
) -> None:
    await scheduler.hold(3)
    async with client.stream("hello", max_tokens=100, request_id="gone") as stream:
        await anext(stream)
    await scheduler.until(lambda: scheduler.cancelled == ["gone"])

    with pytest.raises(RequestCancelledError):
        _ = stream.result


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        ("refuse QUEUE_FULL 8", OverloadedError),
        ("refuse UNKNOWN_MODEL 5", UnknownModelError),
        ("refuse INVALID_REQUEST 3", InvalidRequestError),
        ("refuse QUEUE_TIMEOUT 4", DeadlineExceededError),
        ("refuse UNAVAILABLE 14", UnavailableError),
        ("refuse POISON 13", InternalError),
    ],
)
async def test_refused_request_raises_the_typed_error_with_its_facts(
    client: AsyncClient, prompt: str, kind: type[Exception]
) -> None:
    with pytest.raises(kind) as caught:
        await client.generate(prompt)

    error = caught.value
    assert error.reason == prompt.split()[1]
    assert error.retry_after_s == 1.5
    assert error.metadata == {"limit": "7"}
    assert error.partial is None


async def test_invalid_request_names_its_fields(client: AsyncClient) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await client.generate("refuse INVALID_REQUEST 3")

    assert [(one.field, one.description) for one in caught.value.violations] == [("text", "is bad")]


async def test_deadline_while_running_keeps_the_partial_output(client: AsyncClient) -> None:
    with pytest.raises(DeadlineExceededError) as caught:
        await client.generate("fail DEADLINE_RUNNING 4", seed=5)

    assert caught.value.phase == "decode"
    assert caught.value.partial is not None
    assert caught.value.partial.text == expected_text(5, 2)


async def test_stream_that_fails_yields_what_came_before_the_error(client: AsyncClient) -> None:
    stream = client.stream("fail STEP_FAILED 13", seed=5)
    texts = []
    while "".join(texts) != expected_text(5, 2):
        texts.append((await anext(stream)).text)

    with pytest.raises(InternalError):
        await anext(stream)


async def test_service_silent_past_deadline_and_grace_raises_and_cancels(
    client: AsyncClient, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo._sdk.session.GRACE_S", 0.05)
    # A request that is still waiting for its connection would end here without the service knowing.
    await client.generate("connect", max_tokens=1)
    await scheduler.hold(0)

    with pytest.raises(DeadlineExceededError) as caught:
        await client.generate("hello", deadline=0.05, request_id="late")

    assert caught.value.phase == "unknown"
    await scheduler.until(lambda: scheduler.cancelled == ["late"])


async def test_service_silent_past_the_time_to_the_first_token_raises_and_cancels(
    client: AsyncClient, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo._sdk.session.GRACE_S", 0.05)
    await client.generate("connect", max_tokens=1)
    await scheduler.hold(0)

    with pytest.raises(DeadlineExceededError):
        await client.generate("hello", deadline=600, ttft_deadline=0.05, request_id="late")

    await scheduler.until(lambda: scheduler.cancelled == ["late"])


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("x", {"temperature": float("nan")}, "sampling.temperature"),
        ("x", {"top_p": -0.5}, "sampling.top_p"),
        ("x", {"max_tokens": 0}, "sampling.max_tokens"),
        ("x", {"deadline": -1.0}, "terms.deadline_ms"),
        ("x", {"deadline": float("inf")}, "terms.deadline_ms"),
        ("x", {"priority": "urgent"}, "terms.priority"),
        ("bad \ud800 surrogate", {}, "text"),
        (b"hi", {}, "text"),
        (bytearray(b"hi"), {}, "text"),
        ([1, -2], {}, "tokens.ids"),
        ([2**32], {}, "tokens.ids"),
    ],
)
async def test_value_that_cannot_be_sent_is_refused_by_field(
    client: AsyncClient, prompt: str | bytes | list[int], options: dict[str, object], field: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await client.generate(prompt, **options)  # type: ignore[arg-type]

    assert [one.field for one in caught.value.violations] == [field]


async def test_unknown_option_raises_type_error(client: AsyncClient) -> None:
    with pytest.raises(TypeError, match="temprature"):
        await client.generate("x", temprature=1.0)  # type: ignore[call-arg]


async def test_message_too_large_is_refused_while_others_go_on(
    client: AsyncClient, scheduler: FakeScheduler
) -> None:
    await scheduler.hold(1)
    other = asyncio.create_task(client.generate("other", max_tokens=5, seed=1))
    await scheduler.until(lambda: len(scheduler.requests) == 1)

    with pytest.raises(InvalidRequestError) as caught:
        await client.generate("x" * 100_000_000)
    await scheduler.allow()

    assert caught.value.reason == "MESSAGE_TOO_LARGE"
    assert (await other).text == expected_text(1, 5)
    assert scheduler.sessions == 1


async def test_batch_more_prompts_than_credits_completes_all_in_order(
    client: AsyncClient, scheduler: FakeScheduler
) -> None:
    ends = await client.batch([f"p{index}" for index in range(40)], max_tokens=3, seed=2)

    assert [end.text for end in ends if isinstance(end, GenerateResult)] == [expected_text(2, 3)] * 40
    assert scheduler.most_live <= scheduler.credits_per_session
    assert {request.terms.priority for request in scheduler.requests} == {3}


async def test_batch_one_prompt_bad_returns_its_error_in_place(client: AsyncClient) -> None:
    ends = await client.batch(["a", [-1], "refuse POISON 13", "b"], max_tokens=1, seed=2)

    assert [type(end) for end in ends] == [
        GenerateResult,
        InvalidRequestError,
        InternalError,
        GenerateResult,
    ]


async def test_batch_prompts_waiting_for_credit_keep_the_whole_of_their_deadline(
    client: AsyncClient, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo._sdk.session.GRACE_S", 0.0)
    scheduler.credits_per_session = 1
    await scheduler.hold(0)
    task = asyncio.create_task(client.batch(["a", "b"], max_tokens=1, seed=1, deadline=600))
    await scheduler.until(lambda: len(scheduler.requests) == 1)
    clock = asyncio.get_running_loop().time
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: clock() + 300)
    await scheduler.allow()
    ends = await task

    assert [type(end) for end in ends] == [GenerateResult] * 2
    assert scheduler.requests[1].terms.deadline_ms == 600_000


async def test_batch_iter_left_early_cancels_the_rest(client: AsyncClient, scheduler: FakeScheduler) -> None:
    await scheduler.hold(3)
    ends = client.batch_iter([f"p{index}" for index in range(10)], max_tokens=3)
    await anext(ends)
    await scheduler.until(lambda: len(scheduler.requests) > 4)

    await ends.aclose()

    await scheduler.until(lambda: len(scheduler.cancelled) >= 4)


async def test_request_id_of_a_live_request_is_refused_and_the_first_goes_on(
    client: AsyncClient, scheduler: FakeScheduler
) -> None:
    await scheduler.hold(0)
    first = asyncio.create_task(client.generate("one", max_tokens=2, seed=1, request_id="same"))
    await scheduler.until(lambda: len(scheduler.requests) == 1)

    with pytest.raises(InvalidRequestError) as caught:
        await client.generate("two", request_id="same")
    await scheduler.allow()

    assert caught.value.reason == "DUPLICATE_REQUEST_ID"
    assert (await first).text == expected_text(1, 2)
    assert (await client.generate("three", max_tokens=2, seed=3, request_id="same")).text == expected_text(
        3, 2
    )


@pytest.mark.parametrize("n", [1, 2])
async def test_request_id_reused_after_close_gets_nothing_of_the_old_request(
    client: AsyncClient, scheduler: FakeScheduler, n: int
) -> None:
    await scheduler.hold(2)
    stream = client.stream("old", max_tokens=50, seed=1, n=n, request_id="same")
    await anext(stream)
    await stream.aclose()

    task = asyncio.create_task(client.generate("new", max_tokens=3, seed=2, n=n, request_id="same"))
    await scheduler.until(lambda: len(scheduler.requests) == 2)
    await scheduler.allow()
    result = await task

    assert [choice.text for choice in result.choices] == [expected_text(2, 3, at) for at in range(n)]


async def test_request_id_reused_while_the_end_of_the_old_is_not_told_waits_for_it(
    client: AsyncClient, scheduler: FakeScheduler
) -> None:
    scheduler.answering_cancels = False
    await scheduler.hold(1)
    stream = client.stream("old", max_tokens=3, seed=1, request_id="same")
    await anext(stream)
    await stream.aclose()
    task = asyncio.create_task(client.generate("new", max_tokens=3, seed=2, request_id="same"))
    await scheduler.until(lambda: scheduler.cancelled == ["same"])
    assert len(scheduler.requests) == 1

    await scheduler.allow()  # the old one runs to its end

    assert (await task).text == expected_text(2, 3)


async def test_request_id_for_a_whole_batch_is_refused_by_name(client: AsyncClient) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await client.batch(["a", "b"], request_id="same")
    assert [one.field for one in caught.value.violations] == ["request_id"]

    items = [BatchItem("a", {"request_id": "same"}), BatchItem("b", {"request_id": "same"})]
    first, second = await client.batch(items, max_tokens=2, seed=1)
    assert isinstance(first, GenerateResult)
    assert isinstance(second, InvalidRequestError)


async def test_unary_calls_return_typed_records(client: AsyncClient) -> None:
    tokens = await client.tokenize("hi", pieces=True)
    chat = await client.tokenize_chat("hi")

    assert tokens.token_ids == (104, 105)
    assert tokens.pieces == ("h", "i")
    assert chat.token_ids == (104, 105)
    assert await client.detokenize([104, 105]) == "hi"
    assert [model.id for model in await client.models()] == ["fake"]


async def test_unary_call_refused_raises_the_typed_error(client: AsyncClient) -> None:
    with pytest.raises(UnknownModelError, match="nobody"):
        await client.tokenize("hi", model="nobody")


@pytest.mark.parametrize("key", ["clé", "two words", "a\tb", "a\x00"])
async def test_key_of_a_call_that_cannot_be_sent_is_refused_and_not_repeated(
    client: AsyncClient, key: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await client.models(api_key=key)

    assert [one.field for one in caught.value.violations] == ["api_key"]
    assert key not in str(caught.value)


@pytest.mark.parametrize("interval", [-1, 1e9, float("nan")])
async def test_watch_interval_that_cannot_be_sent_is_refused_by_name(
    client: AsyncClient, interval: float
) -> None:
    with pytest.raises(InvalidRequestError, match="interval_ms"):
        await anext(client.watch_status(interval))


async def test_closed_client_refuses(client: AsyncClient) -> None:
    await client.generate("x", max_tokens=1)
    await client.aclose()

    with pytest.raises(ClientClosedError):
        await client.generate("x")


async def test_close_while_a_request_runs_ends_it_on_both_sides(
    client: AsyncClient, scheduler: FakeScheduler
) -> None:
    await scheduler.hold(2)
    task = asyncio.create_task(client.generate("hello", max_tokens=100, request_id="cut"))
    await scheduler.until(lambda: len(scheduler.requests) == 1)

    await client.aclose()

    with pytest.raises(ClientClosedError):
        await task
    await scheduler.until(lambda: scheduler.cancelled == ["cut"])


async def test_client_dropped_without_close_ends_its_stream(scheduler: FakeScheduler) -> None:
    await scheduler.hold(1)
    client = AsyncClient(scheduler.endpoint)
    stream = client.stream("hello", max_tokens=100, request_id="dropped")
    await anext(stream)

    del client
    gc.collect()

    await scheduler.until(lambda: scheduler.cancelled == ["dropped"])
    with pytest.raises(ClientClosedError):
        await anext(stream)


async def test_client_on_a_second_loop_is_refused(client: AsyncClient) -> None:
    await client.generate("x", max_tokens=1)

    def elsewhere() -> None:
        asyncio.run(client.models())

    with pytest.raises(ClientClosedError, match="loop"):
        await asyncio.to_thread(elsewhere)
