"""Overload over real ports: what is refused costs nothing, what is trimmed is told, the accounts close."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import grpc
import pytest
from octavo import AsyncClient
from octavo.aio import AsyncStream
from octavo.v1 import common_pb2
from octavo.v1 import generation_pb2 as pb

from tests.e2e.scheduler_stack import (
    WAIT_S,
    Output,
    Stack,
    Worker,
    error_of,
    one_worker,
    request,
    scheduler,
    start_worker,
    until,
)
from worker_svc.runner.sim import built_in_model

ONE_SEAT = {"max_num_seqs": 1}
INTERACTIVE, STANDARD, BATCH = (
    common_pb2.PRIORITY_INTERACTIVE,
    common_pb2.PRIORITY_STANDARD,
    common_pb2.PRIORITY_BATCH,
)


def running(stack: Stack) -> bool:
    return any(worker.running for worker in stack.process.driver.snapshot().workers)


def waiting(stack: Stack) -> int:
    return sum(queue.waiting for queue in stack.process.driver.snapshot().queues)


async def occupy(stack: Stack, worker: Worker, backlog: int) -> list[Any]:
    """Let one request run without end, and others wait behind it."""
    worker.gate.close()
    calls = [stack.generation.Generate(request(text="first"))]
    await until(lambda: running(stack))
    calls += [stack.generation.Generate(request(text=f"waits {n}")) for n in range(backlog)]
    await until(lambda: waiting(stack) == backlog)
    return calls


async def refused(stack: Stack, **fields: Any) -> common_pb2.Error:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.generate(**fields)
    return error_of(caught.value)


async def test_refused_for_load_says_when_to_come_back_and_touches_no_tokenizer() -> None:
    async with one_worker(ONE_SEAT, max_waiting_requests=3) as (stack, worker):
        calls = await occupy(stack, worker, 3)
        jobs = 0

        async def encode(*_: object) -> None:
            nonlocal jobs
            jobs += 1

        stack.process.pool.encode = encode  # type: ignore[method-assign,assignment]  # a spy
        error = await refused(stack, text="no room " * 100)
        assert (error.reason, error.code) == ("QUEUE_FULL", grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])
        assert error.retry_delay_ms > 0
        session = stack.generation.Session()
        for number in range(200):
            await session.write(pb.SessionRequest(generate=request(request_id=str(number), text="no room")))
        reasons: list[str] = []
        while len(reasons) < 200:
            message = await session.read()
            reasons += [event.error.reason for event in message.events]
        assert set(reasons) == {"QUEUE_FULL"}
        assert jobs == 0
        status = await stack.status()
        assert (status.outcomes["QUEUE_FULL"], status.live_requests) == (201, 4)
        session.cancel()
        for call in calls:
            call.cancel()
        worker.gate.open()
        await until(worker.is_empty)


async def test_burst_that_the_queue_has_room_for_is_not_refused_on_its_way_there() -> None:
    flags = {"max_waiting_requests": 1500, "max_session_requests": 2000}
    async with one_worker(ONE_SEAT, **flags) as (stack, worker):
        calls = await occupy(stack, worker, 1)
        session = stack.generation.Session()
        burst = [request(request_id=str(number), text="room") for number in range(1400)]
        await session.write(pb.SessionRequest(generate_many=pb.GenerateRequests(requests=burst)))
        accepted = 0
        while accepted < 1400:
            message = await session.read()
            for event in message.events:
                assert event.HasField("accepted"), event
                accepted += 1
        session.cancel()
        for call in calls:
            call.cancel()
        worker.gate.open()
        await until(worker.is_empty)


async def test_level_is_told_in_status_metadata_and_events_and_trims_who_allows_it() -> None:
    flags = {
        "overload_control": True,
        "max_waiting_requests": 10,
        "level_backlog": "0.3,none,none,none",
        "level_wait": "none,none,none,none",
        "trim_prompt_tokens": "64,8",
        "trim_max_tokens": "16,4",
    }
    async with one_worker({"max_num_seqs": 1, "max_model_len": 256}, **flags) as (stack, worker):
        assert (await stack.generate(text="x")).accepted.level == 0  # type: ignore[union-attr]
        calls = await occupy(stack, worker, 3)

        async def at_level_one() -> bool:
            return (await stack.status()).level == 1

        await until(at_level_one)
        (overload,) = (await stack.status()).overload
        assert overload.backlog == pytest.approx(0.3)
        assert 4 <= overload.trim_max_tokens <= 16
        terms = {"may_trim": True, "keep_head_tokens": 10, "keep_tail_tokens": 5}
        text = "".join(chr(97 + i % 26) for i in range(200))
        sampling = {"max_tokens": 40, "ignore_eos": True}
        trimmed = stack.generation.Generate(request(text=text, terms=terms, sampling=sampling))
        metadata = dict(await trimmed.initial_metadata())
        assert metadata["octavo-level"] == "1"
        whole = stack.generation.Generate(request(text=text, sampling=sampling))
        await until(lambda: waiting(stack) == 5)
        worker.gate.open()
        output = Output()
        async for event in trimmed:
            output.take(event)
        usage = output.finished[0].usage
        assert output.accepted is not None
        assert output.accepted.level == 1
        assert usage.prompt_tokens + usage.trimmed_tokens == 200
        assert 8 <= usage.prompt_tokens <= 64
        assert usage.completion_tokens == usage.clamped_max_tokens <= 16
        # The echo says its prompt again: the head that was asked for, and then the cut.
        assert output.text[0].startswith(text[:10])
        ends = [event.finished async for event in whole if event.WhichOneof("event") == "finished"]
        assert (ends[0].usage.prompt_tokens, ends[0].usage.completion_tokens) == (200, 40)
        assert not ends[0].usage.HasField("clamped_max_tokens")
        for call in calls:
            assert [event async for event in call]

        async def calm() -> bool:
            return (await stack.status()).level == 0

        await until(calm)


@pytest.mark.parametrize("kind", ["text", "chat"])
async def test_trimmed_request_goes_on_with_another_scheduler_from_the_prompt_that_it_had(kind: str) -> None:
    flags = {
        "overload_control": True,
        "max_waiting_requests": 10,
        "level_backlog": "0.3,none,none,none",
        "level_wait": "none,none,none,none",
        "trim_prompt_tokens": "64,64",
        "trim_max_tokens": "100,100",
    }
    words = "".join(chr(97 + i % 26) for i in range(200))
    turns: list[Any] = [{"role": "user", "content": words[i : i + 20]} for i in range(0, 200, 20)]
    worker = await start_worker(max_num_seqs=1)
    async with AsyncExitStack() as stacks:
        stacks.push_async_callback(worker.stop)
        first = await stacks.enter_async_context(scheduler(worker.address, **flags))
        await first.wait_ready()
        second = await stacks.enter_async_context(scheduler(worker.address))
        client = await stacks.enter_async_context(
            AsyncClient([f"127.0.0.1:{stack.port}" for stack in (first, second)])
        )

        def ask(text: str, turns: list[Any], **options: Any) -> AsyncStream:
            return (
                client.stream(text, ignore_eos=True, **options)
                if kind == "text"
                else client.chat_stream(turns, ignore_eos=True, **options)
            )

        calls = await occupy(first, worker, 3)
        await until(lambda: first.process.driver.level_of("echo") == 1)
        stream = ask(words, turns, max_tokens=150, may_trim=True, keep_head_tokens=10, keep_tail_tokens=5)
        await until(lambda: waiting(first) == 4)
        for call in calls:
            call.cancel()
        begun = asyncio.ensure_future(anext(stream))
        while not begun.done():
            worker.gate.let_go()
            await until(lambda: begun.done() or worker.gate.is_spent)
        text = begun.result().text
        first.process.stop("test", 0.0)
        await until(lambda: not first.process.accounts.live)
        worker.gate.open()
        text += "".join([delta.text async for delta in stream])
        (choice,) = stream.result.choices
        usage = choice.usage
        assert usage is not None
        assert second.process.accounts.live == 0
        assert (await second.status()).outcomes["LENGTH"] == 1

        # The echo says its prompt again and again: it is that of the first scheduler, as short and as cut.
        cut = ask(words[:59] + words[-5:], [turns[0], turns[-1]], max_tokens=100)
        assert text == choice.text == "".join([delta.text async for delta in cut])
        assert cut.result.choices[0].usage is not None
        assert usage.prompt_tokens == cut.result.choices[0].usage.prompt_tokens
        assert usage.trimmed_tokens > 100
        assert usage.completion_tokens == usage.clamped_max_tokens == 100


async def test_classes_are_shed_from_below_and_a_paced_session_gets_no_credits_meanwhile() -> None:
    flags = {
        "overload_control": True,
        "max_waiting_requests": 10,
        "level_backlog": "0.1,0.2,none,none",
        "level_wait": "none,none,none,none",
    }
    async with one_worker(ONE_SEAT, level_dwell_s=0.1, **flags) as (stack, worker):
        calls = await occupy(stack, worker, 3)

        async def shedding() -> bool:
            return (await stack.status()).level == 2

        await until(shedding)
        error = await refused(stack, text="b", terms={"priority": BATCH})
        assert (error.reason, error.metadata["level"]) == ("SHED", "2")
        assert error.retry_delay_ms > 0
        paced = stack.generation.Session()
        await paced.write(pb.SessionRequest(open=pb.OpenSession(paced=True)))
        interactive = stack.generation.Generate(request(text="i", terms={"priority": INTERACTIVE}))
        assert (await interactive.read()).accepted.level == 2
        credits_ = asyncio.create_task(paced.read())
        await asyncio.sleep(0.1)
        assert not credits_.done()
        worker.gate.open()
        assert (await credits_).credits >= 16
        paced.cancel()
        for call in calls:
            assert [event async for event in call]


async def test_load_on_one_model_leaves_the_paced_work_of_another_alone() -> None:
    flags = {
        "overload_control": True,
        "max_waiting_requests": 10,
        "level_backlog": "0.1,0.2,none,none",
        "level_wait": "none,none,none,none",
    }
    other = replace(built_in_model(), model_id="other")
    busy, calm = await start_worker("w1", max_num_seqs=1), await start_worker("w2", info=other)
    async with AsyncExitStack() as stacks:
        for worker in (busy, calm):
            stacks.push_async_callback(worker.stop)
        stack = await stacks.enter_async_context(scheduler(busy.address, calm.address, **flags))
        await stack.wait_ready(2)
        sessions = {}
        for model in ("echo", "other"):
            session = sessions[model] = stack.generation.Session()
            await session.write(pb.SessionRequest(open=pb.OpenSession(paced=True)))
            assert (await session.read()).credits >= 16
        busy.gate.close()
        calls = [stack.generation.Generate(request(text=f"{n}", model="echo")) for n in range(4)]
        await until(lambda: stack.process.driver.level_of("echo") == 2)
        for model, session in sessions.items():
            batch = request(request_id="r", text="a", model=model, terms={"priority": BATCH})
            await session.write(pb.SessionRequest(generate=batch))
        granted = 0
        async with asyncio.timeout(WAIT_S):
            while not granted:
                granted += (await sessions["other"].read()).credits

        def echo_gets_none() -> bool:
            live = [session for session in stack.process._sessions._sessions if session._models == {"echo"}]
            return [session._credit_limit(session._models) for session in live] == [0]

        await until(echo_gets_none)
        busy.gate.open()
        for call in calls:
            assert [event async for event in call]
        for session in sessions.values():
            session.cancel()


async def test_half_of_the_clients_giving_up_while_queued_costs_nothing_and_leaks_nothing() -> None:
    async with one_worker(ONE_SEAT, max_waiting_requests=40) as (stack, worker):
        calls = await occupy(stack, worker, 40)
        assert (await refused(stack, text="no room")).reason == "QUEUE_FULL"
        for call in calls[1::2]:
            call.cancel()
        await until(lambda: waiting(stack) == 20)
        again = [stack.generation.Generate(request(text="again")) for _ in range(20)]
        await until(lambda: waiting(stack) == 40)
        worker.gate.open()
        for call in (*calls[::2], *again):
            assert [event async for event in call][-1].finished.reason == common_pb2.FINISH_REASON_STOP
        await until(worker.is_empty)
        pool = await worker.pool()
        # What was computed is the prompts of the first, of 20 that went on waiting and of 20 that came later.
        stayed = len("first") + sum(len(f"waits {n}") for n in range(1, 40, 2)) + 20 * len("again")
        assert pool.miss_tokens + pool.hit_tokens == stayed
        status = await stack.status()
        assert dict(status.outcomes) == {"STOP": 41, "CANCELLED": 20, "QUEUE_FULL": 1}


async def test_accounts_close_at_every_instant_under_a_mixed_overload() -> None:
    rng = random.Random(6)
    async with one_worker({"max_num_seqs": 2}, overload_control=True, max_waiting_requests=8) as (stack, _):
        accounts = stack.process.accounts
        checks = 0

        async def watch() -> None:
            nonlocal checks
            while True:
                assert accounts.arrivals == sum(accounts.outcomes.values()) + accounts.live
                checks += 1
                await asyncio.sleep(0)

        async def client(number: int) -> None:
            terms = {
                "priority": rng.choice((INTERACTIVE, STANDARD, BATCH)),
                "may_trim": rng.random() < 0.5,
                "may_shed": rng.random() < 0.5,
            }
            if rng.random() < 0.3:
                terms["deadline_ms"] = rng.randint(1, 200)
            call = stack.generation.Generate(
                request(text="x" * rng.randint(1, 300), terms=terms), timeout=WAIT_S
            )
            try:
                async for _ in call:
                    if rng.random() < 0.1:
                        call.cancel()
            except (grpc.aio.AioRpcError, asyncio.CancelledError):
                pass

        watcher = asyncio.create_task(watch())
        for _ in range(4):
            await asyncio.gather(*(client(number) for number in range(60)))
        await until(lambda: accounts.live == 0)
        assert not watcher.done()
        watcher.cancel()
        assert accounts.arrivals == 240
        assert checks > 100
