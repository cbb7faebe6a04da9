"""What a client makes of a pair of schedulers: hints, health, and waits for a worker."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from octavo import AsyncClient, UnavailableError
from octavo.aio import AsyncStream

from tests.unit.client.fake_scheduler import WAIT_S, FakeScheduler, expected_text, token_id


@asynccontextmanager
async def schedulers(*serving: bool | None) -> AsyncIterator[list[FakeScheduler]]:
    async with AsyncExitStack() as stack:
        made = []
        for says in serving:
            fake = FakeScheduler()
            fake.serving = says
            await fake.start()
            stack.push_async_callback(fake.stop)
            made.append(fake)
        yield made


async def begin(client: AsyncClient, holder: FakeScheduler, seed: int = 3) -> tuple[AsyncStream, str]:
    """Return a stream that has its first two tokens, and their text."""
    await holder.hold(2)
    stream = client.stream("hello", max_tokens=6, seed=seed)
    text = ""
    while text != expected_text(seed, 2):
        text += (await anext(stream)).text
    return stream, text


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0)


async def rest_of(stream: AsyncStream) -> str:
    async with asyncio.timeout(WAIT_S):
        return "".join([delta.text async for delta in stream])


async def test_service_is_serving_when_the_scheduler_that_was_asked_has_given_its_workers_back() -> None:
    async with (
        schedulers(False, True) as (preferred, standby),
        AsyncClient([preferred.endpoint, standby.endpoint]) as client,
    ):
        assert await client.serving(WAIT_S)
        preferred.serving, standby.serving = True, False
        assert await client.serving(WAIT_S)
        preferred.serving = False
        assert not await client.serving(WAIT_S)
        standby.serving = True
        assert await client.serving(WAIT_S)


async def test_call_tries_the_other_scheduler_however_late_it_is_that_the_first_is_known_to_be_gone() -> None:
    async with (
        schedulers(True, True) as (first, second),
        AsyncClient([first.endpoint, second.endpoint], connect_timeout=1e-3) as client,
    ):
        assert await client.models()
        await first.stop()

        assert [model.id for model in await client.models()] == ["fake"]


@pytest.mark.parametrize("reason", ["NO_WORKER", "DRAINING"])
async def test_request_that_is_let_go_goes_on_where_the_hint_says(reason: str) -> None:
    async with (
        schedulers(None, None, None) as (first, second, third),
        AsyncClient([first.endpoint, second.endpoint, third.endpoint]) as client,
    ):
        stream, text = await begin(client, first)
        await first.let_go(reason, third.endpoint)
        text += await rest_of(stream)

        assert text == expected_text(3, 6)
        assert [len(fake.requests) for fake in (first, second, third)] == [1, 0, 1]
        resumed = third.requests[0].resume[0]
        assert list(resumed.token_ids) == [token_id(3, 0, at) for at in range(2)]
        assert (await client.generate("new", max_tokens=1, seed=5)).text == expected_text(5, 1)
        assert len(third.requests) == 2


async def test_hint_to_an_endpoint_that_the_client_was_not_given_is_no_address_to_call() -> None:
    async with (
        schedulers(None, None, None) as (first, second, stranger),
        AsyncClient([first.endpoint, second.endpoint]) as client,
    ):
        stream, text = await begin(client, first)
        await first.let_go("NO_WORKER", stranger.endpoint)

        assert text + await rest_of(stream) == expected_text(3, 6)
        assert (len(second.requests), stranger.sessions) == (1, 0)


async def test_scheduler_that_does_not_serve_is_avoided_where_there_is_another_one() -> None:
    async with schedulers(False, True) as (idle, serving):
        async with AsyncClient([idle.endpoint, serving.endpoint]) as client:
            assert (await client.generate("hello", max_tokens=2, seed=1)).text == expected_text(1, 2)
        assert (idle.sessions, serving.sessions) == (0, 1)


async def test_first_of_those_that_do_not_serve_is_taken_where_nobody_does() -> None:
    async with schedulers(False, False) as (first, second):
        async with AsyncClient([first.endpoint, second.endpoint]) as client:
            assert (await client.generate("hello", max_tokens=2, seed=1)).text == expected_text(1, 2)
        assert (first.sessions, second.sessions) == (1, 0)


async def test_endpoint_that_takes_connections_and_says_nothing_does_not_stand_in_the_way() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        async with (
            schedulers(None) as (serving,),
            AsyncClient([f"127.0.0.1:{port}", serving.endpoint]) as client,
        ):
            assert (await client.generate("hello", max_tokens=2, seed=1)).text == expected_text(1, 2)


async def test_request_leaves_a_scheduler_that_stands_still_when_another_one_serves() -> None:
    async with (
        schedulers(True, False) as (first, second),
        AsyncClient([first.endpoint, second.endpoint]) as client,
    ):
        stream, text = await begin(client, first)
        first.may_answer.clear()
        rest = asyncio.create_task(rest_of(stream))
        await until(lambda: second.asked > 0)
        assert (len(first.requests), len(second.requests)) == (1, 0)
        second.serving = True

        assert text + await rest == expected_text(3, 6)
        assert [len(fake.requests) for fake in (first, second)] == [1, 1]


async def test_request_stays_at_a_scheduler_that_is_only_silent() -> None:
    async with (
        schedulers(True, True) as (first, second),
        AsyncClient([first.endpoint, second.endpoint]) as client,
    ):
        stream, text = await begin(client, first)
        dialled = first.asked
        await until(lambda: first.asked > dialled + 1)
        await first.allow()

        assert text + await rest_of(stream) == expected_text(3, 6)
        assert [len(fake.requests) for fake in (first, second)] == [1, 0]


async def test_only_scheduler_has_lost_its_worker_for_good_fails_with_what_came(
    scheduler: FakeScheduler,
) -> None:
    async with AsyncClient(scheduler.endpoint, reconnect_timeout=0.2) as client:
        stream, text = await begin(client, scheduler)
        scheduler.refusing = "NO_WORKER"
        await scheduler.let_go("NO_WORKER")
        with pytest.raises(UnavailableError) as caught:
            await rest_of(stream)

    assert caught.value.reason == "NO_WORKER"
    assert caught.value.partial is not None
    assert caught.value.partial.text == text


async def test_request_without_a_worker_gives_up_although_others_have_output(
    scheduler: FakeScheduler,
) -> None:
    async with AsyncClient(scheduler.endpoint, reconnect_timeout=0.2) as client:
        stream, _ = await begin(client, scheduler)
        await scheduler.allow()

        async def keep_busy() -> None:
            while True:
                await client.generate("another model", max_tokens=2, seed=1)

        busy = asyncio.create_task(keep_busy())
        scheduler.refusing_resumed = "NO_WORKER"
        await scheduler.let_go("NO_WORKER")
        with pytest.raises(UnavailableError, match="NO_WORKER"):
            await rest_of(stream)
        busy.cancel()


async def test_wait_for_a_worker_is_told_until_output_comes(scheduler: FakeScheduler) -> None:
    async with AsyncClient(scheduler.endpoint) as client:
        stream, text = await begin(client, scheduler)
        assert stream.no_worker_for == 0
        await scheduler.tell_no_worker(2500)
        await until(lambda: stream.no_worker_for > 0)
        assert stream.no_worker_for == 2.5
        await scheduler.allow()

        assert text + await rest_of(stream) == expected_text(3, 6)
        assert stream.no_worker_for == 0
