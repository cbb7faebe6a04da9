"""What a client makes of schedulers that die, restart, drain or were never there."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

import pytest
from octavo import AsyncClient, InvalidRequestError, RequestCancelledError, UnavailableError
from octavo._sdk.call import Call
from octavo.protocol.steps import FinishReason
from octavo.v1 import generation_pb2 as pb

from tests.unit.client.fake_scheduler import WAIT_S, FakeScheduler, expected_text, token_id


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def test_scheduler_restarts_in_the_middle_resumes_and_repeats_nothing(
    client: AsyncClient, scheduler: FakeScheduler
) -> None:
    await scheduler.hold(4)
    stream = client.stream("hello", max_tokens=10)
    first = await anext(stream)
    deltas = [first]
    while sum(len(delta.token_ids) for delta in deltas) < 4:
        deltas.append(await anext(stream))

    port = scheduler.port
    await scheduler.stop()
    await scheduler.start(port)
    await scheduler.allow()
    deltas += [delta async for delta in stream]

    seed = stream.result.seed
    assert seed is not None
    assert "".join(delta.text for delta in deltas) == expected_text(seed, 10) == stream.result.text
    assert [one for delta in deltas for one in delta.token_ids] == [token_id(seed, 0, at) for at in range(10)]
    resumed = scheduler.requests[-1]
    assert resumed.sampling.seed == seed
    assert list(resumed.resume[0].token_ids) == [token_id(seed, 0, at) for at in range(4)]
    assert resumed.resume[0].shown_bytes == len(expected_text(seed, 4).encode())


async def test_scheduler_restarts_with_many_choices_running_each_continues(
    client: AsyncClient, scheduler: FakeScheduler
) -> None:
    await scheduler.hold(3)
    tasks = [
        asyncio.create_task(client.generate(f"p{seed}", max_tokens=8, n=2, seed=seed)) for seed in range(20)
    ]
    await scheduler.until(lambda: scheduler._steps >= 3)

    port = scheduler.port
    await scheduler.stop()
    await scheduler.start(port)
    await scheduler.allow()
    results = await asyncio.gather(*tasks)

    for seed, result in enumerate(results):
        assert [choice.text for choice in result.choices] == [expected_text(seed, 8, at) for at in range(2)]


async def test_deadline_of_a_resumed_request_counts_from_its_start(
    client: AsyncClient, scheduler: FakeScheduler
) -> None:
    await scheduler.hold(1)
    stream = client.stream("hello", max_tokens=3, deadline=30.0, ttft_deadline=20.0)
    await anext(stream)

    port = scheduler.port
    await scheduler.stop()
    await scheduler.start(port)
    await scheduler.allow()
    _ = [delta async for delta in stream]

    first, second = scheduler.requests
    assert second.terms.deadline_ms < first.terms.deadline_ms
    assert first.terms.HasField("ttft_deadline_ms")
    assert not second.terms.HasField("ttft_deadline_ms")


async def test_request_that_resumes_says_how_it_was_accepted(
    client: AsyncClient, scheduler: FakeScheduler
) -> None:
    scheduler.accepting = {"prompt_tokens": 9, "trimmed_tokens": 5, "clamped_max_tokens": 3}
    await scheduler.hold(1)
    stream = client.stream("hello", max_tokens=3)
    await anext(stream)
    port = scheduler.port
    await scheduler.stop()
    scheduler.accepting = {"prompt_tokens": 14}
    await scheduler.start(port)
    await scheduler.allow()
    _ = [delta async for delta in stream]

    first, second = scheduler.requests
    assert not first.HasField("accepted_as")
    assert second.accepted_as == pb.AcceptedAs(prompt_tokens=9, clamped_max_tokens=3)


async def test_first_scheduler_dies_the_second_takes_over(scheduler: FakeScheduler) -> None:
    second = FakeScheduler()
    await second.start()
    await scheduler.hold(2)
    async with AsyncClient([scheduler.endpoint, second.endpoint]) as client:
        stream = client.stream("hello", max_tokens=6)
        texts = [(await anext(stream)).text]
        await scheduler.stop()
        texts += [delta.text async for delta in stream]

        assert stream.result.seed is not None
        assert "".join(texts) == expected_text(stream.result.seed, 6)
    await second.stop()


async def test_first_endpoint_unreachable_uses_the_second(scheduler: FakeScheduler) -> None:
    async with AsyncClient(f"127.0.0.1:{free_port()},{scheduler.endpoint}") as client:
        assert (await client.generate("hello", max_tokens=1, seed=1)).text == expected_text(1, 1)
        assert [model.id for model in await client.models()] == ["fake"]


async def test_draining_scheduler_keeps_what_runs_and_new_requests_go_elsewhere(
    scheduler: FakeScheduler,
) -> None:
    second = FakeScheduler()
    await second.start()
    await scheduler.hold(2)
    async with AsyncClient([scheduler.endpoint, second.endpoint]) as client:
        running = asyncio.create_task(client.generate("old", max_tokens=5, seed=1))
        await scheduler.until(lambda: scheduler._steps >= 2)
        scheduler.refusing = "DRAINING"

        assert (await client.generate("new", max_tokens=3, seed=2)).text == expected_text(2, 3)
        await scheduler.allow()
        assert (await running).text == expected_text(1, 5)
        assert scheduler.cancelled == []
    await second.stop()


async def test_only_scheduler_drains_for_good_gives_up_with_its_reason(scheduler: FakeScheduler) -> None:
    scheduler.refusing = "DRAINING"
    async with AsyncClient(scheduler.endpoint, connect_timeout=0.2, reconnect_timeout=0.2) as client:
        with pytest.raises(UnavailableError) as caught:
            await client.generate("hello")
    assert caught.value.reason == "DRAINING"


async def test_only_scheduler_drains_while_it_still_streams_an_old_request_gives_up_in_time(
    scheduler: FakeScheduler,
) -> None:
    await scheduler.hold(1)
    async with AsyncClient(scheduler.endpoint, reconnect_timeout=0.3) as client:
        old = client.stream("old", max_tokens=1_000_000)
        await anext(old)

        async def keep_streaming() -> None:
            while True:
                await scheduler.allow(1)
                await anext(old)

        scheduler.refusing = "DRAINING"
        streaming = asyncio.create_task(keep_streaming())
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(UnavailableError) as caught:
                await client.generate("new")
        assert not streaming.done()
        streaming.cancel()
    assert caught.value.reason == "DRAINING"


async def test_stream_that_dies_after_each_acceptance_gives_up_in_time(scheduler: FakeScheduler) -> None:
    scheduler.dying_after_accepted = True
    async with AsyncClient(scheduler.endpoint, reconnect_timeout=0.3) as client, asyncio.timeout(WAIT_S):
        with pytest.raises(UnavailableError):
            await client.generate("hello")
    assert scheduler.sessions > 1


async def test_no_worker_yet_after_a_restart_is_waited_out(
    client: AsyncClient, scheduler: FakeScheduler
) -> None:
    await scheduler.hold(2)
    stream = client.stream("hello", max_tokens=5, seed=3)
    text = (await anext(stream)).text
    port = scheduler.port
    await scheduler.stop()
    scheduler.refusing, scheduler.retry_delay_ms = "NO_WORKER", None
    await scheduler.start(port)
    await scheduler.until(lambda: len(scheduler.requests) >= 3)
    scheduler.refusing = ""
    await scheduler.allow()
    text += "".join([delta.text async for delta in stream])

    assert text == expected_text(3, 5)


async def test_new_request_waits_for_the_workers_that_a_scheduler_expects(
    client: AsyncClient, scheduler: FakeScheduler
) -> None:
    scheduler.refusing, scheduler.retry_delay_ms = "NO_WORKER", 1
    answer = asyncio.create_task(client.generate("hello", max_tokens=5, seed=3))
    await scheduler.until(lambda: len(scheduler.requests) >= 3)
    scheduler.refusing = ""

    assert (await answer).text == expected_text(3, 5)


async def test_workers_that_never_come_are_waited_for_no_longer_than_for_a_lost_connection(
    scheduler: FakeScheduler,
) -> None:
    scheduler.refusing, scheduler.retry_delay_ms = "NO_WORKER", 1
    async with AsyncClient(scheduler.endpoint, reconnect_timeout=0.1) as client, asyncio.timeout(WAIT_S):
        with pytest.raises(UnavailableError, match="NO_WORKER"):
            await client.generate("hello")
    assert len(scheduler.requests) > 1


async def test_no_worker_that_nobody_expects_fails_a_new_request_at_once(
    client: AsyncClient, scheduler: FakeScheduler
) -> None:
    scheduler.refusing, scheduler.retry_delay_ms = "NO_WORKER", None

    with pytest.raises(UnavailableError) as caught:
        await client.generate("hello")

    assert caught.value.reason == "NO_WORKER"
    assert len(scheduler.requests) == 1


async def test_nothing_listens_raises_unavailable_that_names_the_endpoint() -> None:
    port = free_port()
    async with AsyncClient(f"127.0.0.1:{port}", connect_timeout=0.2) as client:
        for attempt in (client.generate("hello"), client.models()):
            with pytest.raises(UnavailableError, match=f"127.0.0.1:{port}: connection refused"):
                await attempt


async def test_lost_for_longer_than_the_reconnect_timeout_fails_with_the_partial_output(
    scheduler: FakeScheduler,
) -> None:
    await scheduler.hold(2)
    async with AsyncClient(scheduler.endpoint, reconnect_timeout=0.3) as client:
        stream = client.stream("hello", max_tokens=6, seed=4)
        await anext(stream)
        await scheduler.stop()

        with pytest.raises(UnavailableError) as caught:
            async for _ in stream:
                pass

    assert caught.value.partial is not None
    assert caught.value.partial.text.startswith(expected_text(4, 1))


async def test_scheduler_comes_up_late_is_waited_for() -> None:
    late = FakeScheduler()
    port = free_port()
    async with AsyncClient(f"127.0.0.1:{port}", connect_timeout=10) as client:
        task = asyncio.create_task(client.generate("hello", max_tokens=1, seed=1))
        await asyncio.sleep(0)
        await late.start(port)
        assert (await task).text == expected_text(1, 1)
    await late.stop()


@pytest.mark.parametrize(
    "endpoint", ["", "nonsense://x", "http://127.0.0.1:1", "127.0.0.1:notaport", "h:70000"]
)
def test_malformed_endpoint_is_refused_by_name(endpoint: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        AsyncClient(endpoint)

    assert caught.value.violations[0].field == "endpoint"


async def test_scheduler_restarts_keys_of_client_and_request_go_along(scheduler: FakeScheduler) -> None:
    await scheduler.hold(2)
    async with AsyncClient(scheduler.endpoint, api_key="octavo_service") as client:
        stream = client.stream("hello", max_tokens=4, api_key="octavo_of-a-user")
        await anext(stream)
        port = scheduler.port
        await scheduler.stop()
        await scheduler.start(port)
        await scheduler.allow()
        async for _ in stream:
            pass
    assert scheduler.keys == ["Bearer octavo_service"] * 2
    assert [request.api_key for request in scheduler.requests] == ["octavo_of-a-user"] * 2


async def test_unary_call_in_flight_on_a_scheduler_that_drains_outlives_one_that_fails(
    scheduler: FakeScheduler,
) -> None:
    scheduler.may_tokenize.clear()
    async with AsyncClient(scheduler.endpoint, connect_timeout=0.1) as client:
        slow = asyncio.create_task(client.tokenize("hi"))
        await scheduler.until(lambda: scheduler.tokenizing == 1)
        stopping = asyncio.create_task(scheduler.stop(WAIT_S))

        async def ask_until_it_fails() -> None:
            while True:
                with suppress(RequestCancelledError):  # It had come when the server began to stop.
                    await client.models()

        with pytest.raises(UnavailableError):
            await ask_until_it_fails()
        scheduler.may_tokenize.set()

        assert (await slow).token_ids == (104, 105)
        await stopping


async def test_drain_whose_scheduler_is_down_fails_and_asks_no_other(scheduler: FakeScheduler) -> None:
    down = f"127.0.0.1:{free_port()}"
    async with AsyncClient([down, scheduler.endpoint]) as client:
        await client.models()  # The client prefers the second one now.

        with pytest.raises(UnavailableError, match=down):
            await client.drain(endpoint=down)
        for unnamed in (None, "127.0.0.1:1"):
            with pytest.raises(InvalidRequestError) as caught:
                await client.drain(endpoint=unnamed)
            assert caught.value.violations[0].field == "endpoint"
        assert scheduler.operations.drained == []

        await client.drain(endpoint=scheduler.endpoint)
        assert scheduler.operations.drained == [""]


def test_choice_that_had_ended_is_sent_as_such_and_not_what_it_had() -> None:
    call = Call(pb.GenerateRequest(request_id="r", sampling={"n": 2}), lambda: None)
    call.to_send(0.0)
    for event in (
        pb.RequestEvent(request_id="r", accepted=pb.Accepted(request_id="r", seed=7)),
        pb.RequestEvent(request_id="r", delta=pb.Delta(choice=0, text="ab", token_ids=[1, 2])),
        pb.RequestEvent(request_id="r", finished=pb.Finished(choice=0, reason=1)),
        pb.RequestEvent(request_id="r", delta=pb.Delta(choice=1, text="c", token_ids=[3])),
    ):
        call.apply(event)
    rest = call.to_send(1.0)
    assert list(rest.resume) == [
        pb.ResumedChoice(choice=0, finished=True),
        pb.ResumedChoice(choice=1, token_ids=[3], shown_bytes=1),
    ]
    # The next scheduler tells all ends, this one again.
    call.apply(pb.RequestEvent(request_id="r", finished=pb.Finished(choice=0, reason=2)))
    call.apply(pb.RequestEvent(request_id="r", finished=pb.Finished(choice=1, reason=2)))
    assert [(choice.text, choice.finish_reason) for choice in call.result().choices] == [
        ("ab", FinishReason.STOP),
        ("c", FinishReason.LENGTH),
    ]
