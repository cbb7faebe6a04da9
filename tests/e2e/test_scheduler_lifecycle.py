"""Ends of requests over real ports: clients that leave, clocks that run out, workers that die, drains."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from octavo.aio import AsyncClient
from octavo.v1 import common_pb2, operations_pb2
from octavo.v1 import generation_pb2 as pb

from scheduler_svc.process import EXIT_FAILED
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

Pair = tuple[Stack, Worker]
ENDS_OF_THE_HURRIED = {"DEADLINE_RUNNING", "DEADLINE_QUEUED", "TTFT_DEADLINE", "DEADLINE_INFEASIBLE"}


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with one_worker() as pair:
        yield pair


async def failure(stack: Stack, **fields: Any) -> tuple[common_pb2.Error, Output]:
    """Run a request that fails; return its error and what had come before."""
    output = Output()

    async def run() -> None:
        async for event in stack.generation.Generate(request(**fields), timeout=WAIT_S):
            output.take(event)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await run()
    error = error_of(caught.value)
    assert caught.value.code().value[0] == error.code
    return error, output


async def test_cancelled_call_frees_its_blocks(pair: Pair) -> None:
    stack, worker = pair
    worker.gate.close()
    call = stack.generation.Generate(pb.GenerateRequest(text="x" * 200))
    await call.read()
    worker.gate.let_go(3)
    call.cancel()
    await until(lambda: stack.process.accounts.live == 0)
    worker.gate.open()
    await until(worker.is_empty)
    assert (await stack.status()).outcomes == {"CANCELLED": 1}


async def test_call_cancelled_while_it_is_tokenized_is_accounted_for(pair: Pair) -> None:
    stack, _ = pair
    calls = [stack.generation.Generate(pb.GenerateRequest(text="x" * 900)) for _ in range(20)]
    await until(lambda: stack.process.accounts.live == 20)
    for call in calls:
        call.cancel()
    await until(lambda: stack.process.accounts.live == 0)
    await stack.status()


async def test_deadline_while_running_delivers_what_there_is(pair: Pair) -> None:
    stack, worker = pair
    worker.gate.close()
    worker.gate.let_go(4)
    ended = asyncio.create_task(failure(stack, text="partial output", terms={"deadline_ms": 20_000}))
    await until(lambda: stack.process.accounts.recent_output_tokens.per_s(0) > 0)
    stack.let_time_pass(20.0)
    error, output = await ended
    assert error.reason == "DEADLINE_RUNNING"
    assert error.metadata["phase"] == "decode"
    assert "partial output".startswith(output.text[0])
    assert output.finished[0].reason == common_pb2.FINISH_REASON_DEADLINE
    assert output.finished[0].error.reason == "DEADLINE_RUNNING"
    worker.gate.open()
    await until(worker.is_empty)
    assert (await stack.status()).outcomes == {"DEADLINE_RUNNING": 1}


async def test_deadlines_while_queued_say_so() -> None:
    async with one_worker({"max_num_seqs": 1}) as (stack, worker):
        worker.gate.close()
        running = stack.generation.Generate(pb.GenerateRequest(text="first"))
        await until(lambda: any(w.running for w in stack.process.driver.snapshot().workers))
        error, output = await failure(stack, text="a", terms={"deadline_ms": 50})
        assert (error.reason, error.metadata["phase"]) == ("DEADLINE_QUEUED", "queued")
        assert not output.finished
        error, _ = await failure(stack, text="a", terms={"queue_timeout_ms": 50})
        assert error.reason == "QUEUE_TIMEOUT"
        error, _ = await failure(stack, text="a", terms={"ttft_deadline_ms": 50})
        assert (error.reason, error.metadata["phase"]) == ("DEADLINE_QUEUED", "queued")
        worker.gate.open()
        assert [event async for event in running]


async def test_interactive_class_times_out_in_the_queue_by_default() -> None:
    async with one_worker({"max_num_seqs": 1}, queue_timeout_interactive_s=0.05) as (stack, worker):
        worker.gate.close()
        running = stack.generation.Generate(pb.GenerateRequest(text="first"))
        await until(lambda: any(w.running for w in stack.process.driver.snapshot().workers))
        error, _ = await failure(stack, text="a", terms={"priority": common_pb2.PRIORITY_INTERACTIVE})
        assert error.reason == "QUEUE_TIMEOUT"
        worker.gate.open()
        assert [event async for event in running]


async def test_bare_grpc_deadline_is_told_with_its_phase() -> None:
    async with one_worker(step_watchdog_s=1000.0) as (stack, worker):
        worker.gate.close()
        call = stack.generation.Generate(pb.GenerateRequest(text="abc"), timeout=WAIT_S)
        await until(lambda: any(w.running for w in stack.process.driver.snapshot().workers))
        # The service ends it a moment before the client's own clock would, and can say why.
        stack.let_time_pass(WAIT_S - 0.4)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [event async for event in call]
        assert error_of(caught.value).reason == "TTFT_DEADLINE"
        worker.gate.open()
        await until(worker.is_empty)


async def test_request_survives_the_death_of_its_worker() -> None:
    first = await start_worker("w1")
    second = await start_worker("w2")
    try:
        async with scheduler(first.address, second.address) as stack:
            await stack.wait_ready(2)
            text = "a text that is long enough to be moved in its middle"
            first.gate.close()
            second.gate.close()
            first.gate.let_go(8)
            second.gate.let_go(8)
            running = [asyncio.create_task(stack.generate(text=text, sampling={"n": 2})) for _ in range(2)]
            await until(lambda: stack.process.accounts.recent_output_tokens.per_s(0) > 0)
            # Both requests may run on one of them.
            busy = next(one.worker_id for one in stack.process.driver.snapshot().workers if one.running)
            lost, other = (first, second) if busy == "w1" else (second, first)
            await lost.stop()
            other.gate.open()
            outputs = await asyncio.gather(*running)
            assert all(output.text == {0: text, 1: text} for output in outputs)
            recoveries = [f.timings.recoveries for output in outputs for f in output.finished.values()]
            assert sum(recoveries) > 0
            await until(other.is_empty)
            states = {worker.worker_id: worker.state for worker in (await stack.status()).workers}
            assert states == {lost.worker_id: "lost", other.worker_id: "ready"}
            await other.stop()
    finally:
        first.gate.open()
        second.gate.open()


async def test_worker_that_comes_back_is_attached_again() -> None:
    worker = await start_worker()
    async with scheduler(worker.address) as stack:
        await stack.wait_ready()
        worker.gate.close()
        running = asyncio.create_task(stack.generate(text="patience"))
        await until(lambda: any(w.running for w in stack.process.driver.snapshot().workers))
        await worker.stop()
        await until(lambda: stack.process.fleet.num_ready == 0)
        # With no worker the request waits, and so does a new one.
        waiting = asyncio.create_task(stack.generate(text="more patience"))
        again = await start_worker(port=int(worker.address.rpartition(":")[2]))
        try:
            assert (await running).text[0] == "patience"
            assert (await waiting).text[0] == "more patience"
        finally:
            await again.stop()


@pytest.mark.parametrize(
    "kind", ["STREAM_DROP", "STEP_OOM", "STEP_ERROR", "LOST_REPORT", "SLOW_STEP", "ALLOCATION"]
)
async def test_fault_of_a_worker_is_a_pause_and_nothing_else(kind: str) -> None:
    # Only a report that never comes is for the watchdog, which must not bite on a slow machine's pauses.
    step_watchdog_s = 1.0 if kind == "LOST_REPORT" else 30.0
    async with one_worker(enable_faults=True, step_watchdog_s=step_watchdog_s, max_worker_deaths=20) as (
        stack,
        worker,
    ):
        fault = operations_pb2.Fault(
            kind=operations_pb2.FaultKind.Value(f"FAULT_KIND_{kind}"), count=1, duration_ms=200
        )
        await stack.operations.SetFaults(operations_pb2.SetFaultsRequest(faults=[fault]))
        texts = [f"request {index} goes through" for index in range(6)]
        outputs = await asyncio.gather(*(stack.generate(text=text) for text in texts))
        assert [output.text[0] for output in outputs] == texts
        await until(worker.is_empty)
        await stack.status()


async def test_faults_are_refused_unless_enabled(pair: Pair) -> None:
    stack, _ = pair
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.operations.SetFaults(operations_pb2.SetFaultsRequest())
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert error_of(caught.value).reason == "FAULTS_DISABLED"


async def test_no_worker_yet_is_unavailable_with_a_retry_delay() -> None:
    async with scheduler("127.0.0.1:1") as stack:
        error, _ = await failure(stack, text="a")
        assert (error.reason, error.code) == ("NO_WORKER", grpc.StatusCode.UNAVAILABLE.value[0])
        assert error.retry_delay_ms > 0


async def test_client_of_one_scheduler_that_was_just_started_waits_for_its_worker() -> None:
    worker = await start_worker()
    address = worker.address
    await worker.stop()
    async with scheduler(address) as stack, AsyncClient(f"127.0.0.1:{stack.port}") as client:
        answer = asyncio.create_task(client.generate("abc", max_tokens=3))
        await until(lambda: _has_refused(stack, "NO_WORKER"))
        worker = await start_worker(port=int(address.rpartition(":")[2]))
        try:
            assert (await answer).text == "abc"
        finally:
            await worker.stop()


async def _has_refused(stack: Stack, reason: str) -> bool:
    return bool((await stack.status()).outcomes[reason])


async def health(stack: Stack, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(stack.channel)
    response = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    status: int = response.status
    return status


async def test_health_follows_the_workers() -> None:
    worker = await start_worker()
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    async with scheduler(worker.address) as stack:
        await stack.wait_ready()
        await until(lambda: _is(stack, "", serving))
        assert await health(stack, "octavo.v1.Generation") == serving
        await worker.stop()
        await until(lambda: _is(stack, "", not_serving))
        assert await health(stack, "octavo.v1.Operations") == serving


async def _is(stack: Stack, service: str, status: int) -> bool:
    return await health(stack, service) == status


async def test_drain_refuses_new_requests_and_finishes_the_old() -> None:
    worker = await start_worker()
    try:
        async with scheduler(worker.address) as stack:
            await stack.wait_ready()
            worker.gate.close()
            running = asyncio.create_task(stack.generate(text="the last one"))
            await until(lambda: any(w.running for w in stack.process.driver.snapshot().workers))
            response = await stack.operations.Drain(operations_pb2.DrainRequest())
            assert response.running == 1
            await until(lambda: stack.process.driver.draining)
            error, _ = await failure(stack, text="too late")
            assert (error.reason, error.code) == ("DRAINING", grpc.StatusCode.UNAVAILABLE.value[0])
            worker.gate.open()
            assert (await running).text[0] == "the last one"
    finally:
        await worker.stop()


async def test_drain_without_an_end_gets_one_when_told_again(pair: Pair) -> None:
    stack, worker = pair
    worker.gate.close()
    running = asyncio.create_task(stack.generate(text="never done"))
    await until(lambda: any(w.running for w in stack.process.driver.snapshot().workers))
    await stack.operations.Drain(operations_pb2.DrainRequest())
    await until(lambda: stack.process.driver.draining)
    stack.process.stop("a signal", 0.0)
    with pytest.raises(grpc.aio.AioRpcError):
        await running
    worker.gate.open()


@pytest.mark.parametrize("who", ["driver", "tokenizer"])
@pytest.mark.parametrize("draining", [False, True])
async def test_bug_that_ends_what_all_requests_need_ends_the_process(
    pair: Pair, who: str, draining: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack, worker = pair
    process = stack.process
    worker.gate.close()
    running = asyncio.create_task(stack.generate(text="never done"))
    await until(lambda: any(w.running for w in process.driver.snapshot().workers))
    if draining:
        await stack.operations.Drain(operations_pb2.DrainRequest())
        await until(lambda: process.driver.draining)
    if who == "driver":
        monkeypatch.setattr(process.driver._core, "drain", None)
        process.driver.drain()
    else:
        monkeypatch.setattr(process.pool, "_prepare", None)
        for wake in process.pool._wakes:
            wake.set()
    with pytest.raises(grpc.aio.AioRpcError):
        await running
    stack.exit_code = EXIT_FAILED
    worker.gate.open()


async def test_draining_one_worker_leaves_the_other() -> None:
    first, second = await start_worker("w1"), await start_worker("w2")
    try:
        async with scheduler(first.address, second.address) as stack:
            await stack.wait_ready(2)
            await stack.operations.Drain(operations_pb2.DrainRequest(worker_id="w1"))
            outputs = await asyncio.gather(*(stack.generate(text="hello") for _ in range(8)))
            assert all(output.text[0] == "hello" for output in outputs)
            steps = {w.worker_id: w.steps for w in (await stack.status()).workers}
            assert steps["w1"] == 0
            assert steps["w2"] > 0
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stack.operations.Drain(operations_pb2.DrainRequest(worker_id="w9"))
            assert error_of(caught.value).reason == "UNKNOWN_WORKER"
    finally:
        await first.stop()
        await second.stop()


async def test_drained_worker_stays_drained_until_its_process_is_another() -> None:
    worker = await start_worker()
    async with scheduler(worker.address) as stack:
        await stack.wait_ready()
        await stack.operations.Drain(operations_pb2.DrainRequest(worker_id="w1"))
        assert await state_of_worker(stack) == "draining"
        waiting = asyncio.create_task(stack.generate(text="patience"))
        await until(lambda: sum(queue.waiting for queue in stack.process.driver.snapshot().queues) == 1)
        for _ in range(2):
            stack.process.fleet.find("w1").detach("test")
            await until(lambda: not stack.process.driver.snapshot().workers)
            await until(lambda: stack.process.driver.snapshot().workers)
            assert await state_of_worker(stack) == "draining"
            assert stack.process.fleet.num_ready == 0
        assert (await stack.status()).workers[0].steps == 0
        await worker.stop()
        again = await start_worker(port=int(worker.address.rpartition(":")[2]))
        try:
            assert (await waiting).text[0] == "patience"
            assert await state_of_worker(stack) == "ready"
        finally:
            await again.stop()


async def state_of_worker(stack: Stack) -> str:
    (worker,) = (await stack.status()).workers
    return worker.state


async def test_grace_for_one_worker_is_refused_by_name(pair: Pair) -> None:
    stack, _ = pair
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.operations.Drain(operations_pb2.DrainRequest(worker_id="w1", grace_ms=1))
    assert [violation.field for violation in error_of(caught.value).violations] == ["grace_ms"]
    assert await state_of_worker(stack) == "ready"


async def test_pinned_prefix_stays_and_can_be_lifted(pair: Pair) -> None:
    stack, worker = pair
    text = "a system prompt that many requests share, word for word"
    pin = operations_pb2.PinPrefixRequest(name="greeting", text=text)
    response = await stack.operations.PinPrefix(pin)
    assert (response.blocks, response.workers) == (len(text) // 16, 1)
    await stack.generate(text=text + " and more")

    async def pinned() -> bool:
        return bool((await worker.pool()).pinned == response.blocks)

    await until(pinned)
    lifted = await stack.operations.UnpinPrefix(operations_pb2.UnpinPrefixRequest(name="greeting"))
    assert lifted.blocks == response.blocks
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.operations.UnpinPrefix(operations_pb2.UnpinPrefixRequest(name="greeting"))
    assert error_of(caught.value).reason == "UNKNOWN_PIN"


async def test_pins_beyond_the_budget_are_refused() -> None:
    async with one_worker({"pin_budget_blocks": 8}) as (stack, _):
        first = operations_pb2.PinPrefixRequest(name="first", text="x" * 100)
        assert (await stack.operations.PinPrefix(first)).blocks == 6
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.operations.PinPrefix(operations_pb2.PinPrefixRequest(name="second", text="y" * 100))
        assert error_of(caught.value).reason == "PIN_BUDGET"
        first.text = "z" * 120
        assert (await stack.operations.PinPrefix(first)).blocks == 7


async def test_pins_end_with_their_scheduler_and_follow_a_worker_that_attaches_again() -> None:
    worker = await start_worker(pin_budget_blocks=8)
    first = operations_pb2.PinPrefixRequest(name="first", text="x" * 100)
    second = operations_pb2.PinPrefixRequest(name="second", text="y" * 120)

    async def holds(blocks: int) -> None:
        async def held() -> bool:
            return bool((await worker.pool()).pinned == blocks)

        await until(held)

    try:
        async with scheduler(worker.address) as stack:
            await stack.wait_ready()
            await stack.operations.PinPrefix(first)
            await stack.generate(text=first.text)
            await holds(6)
        async with scheduler(worker.address) as stack:
            await stack.wait_ready()
            await stack.operations.PinPrefix(second)
            await stack.generate(text=second.text)
            await holds(7)
            link = next(iter(stack.process.fleet))
            link.detach("test")
            await until(lambda: not link.attached)
            await until(lambda: link.attached)
            await holds(7)
            link.detach("test")
            await until(lambda: not link.attached)
            await stack.operations.UnpinPrefix(operations_pb2.UnpinPrefixRequest(name="second"))
            await until(lambda: link.attached)
            await holds(0)
    finally:
        await worker.stop()


async def test_tokenize_and_detokenize_are_each_others_inverse(pair: Pair) -> None:
    stack, _ = pair
    text = "Grüße 🎉"
    tokens = await stack.generation.Tokenize(pb.TokenizeRequest(text=text, return_pieces=True))
    assert len(tokens.pieces) == len(tokens.token_ids) == len(text.encode())
    assert tokens.max_model_len == 1024
    back = await stack.generation.Detokenize(pb.DetokenizeRequest(token_ids=tokens.token_ids))
    assert back.text == text
    chat = pb.TokenizeRequest(chat=request(chat={"messages": [{"role": "user", "content": "a"}]}).chat)
    assert len((await stack.generation.Tokenize(chat)).token_ids) > 5
    models = (await stack.generation.ListModels(pb.ListModelsRequest())).models
    assert [(model.id, model.workers, model.has_chat_template) for model in models] == [("echo", 1, True)]


async def client_of_the_storm(stack: Stack, index: int, dice: random.Random) -> None:
    """Ask for something; perhaps leave in the middle, perhaps set a deadline that cannot be met."""
    choices = dice.randint(1, 3)
    message = request(text=f"client {index} " * 10, sampling={"n": choices})
    message.terms.priority = common_pb2.PRIORITY_BATCH  # Waits for as long as it takes.
    hurried = dice.random() < 0.3
    if hurried:
        message.terms.deadline_ms = dice.randint(1, 300)
    call = stack.generation.Generate(message)
    events_wanted = dice.randint(0, 5) if dice.random() < 0.4 else None
    output = Output()
    try:
        async for event in call:
            output.take(event)
            if events_wanted is not None and len(output.deltas) >= events_wanted:
                call.cancel()
                return
    except grpc.aio.AioRpcError as error:
        late = error_of(error).reason in ENDS_OF_THE_HURRIED
        assert hurried and late, error  # noqa: PT017, PT018 - one of their fine ends
    else:
        assert len(output.finished) == choices


async def test_storm_of_clients_that_leave_leaks_nothing() -> None:
    dice = random.Random(1)
    async with one_worker({"max_num_seqs": 8}) as (stack, worker):
        async with asyncio.timeout(10 * WAIT_S):
            await asyncio.gather(*(client_of_the_storm(stack, index, dice) for index in range(100)))
        await until(lambda: stack.process.accounts.live == 0)
        await until(worker.is_empty)
        assert (await stack.status()).arrivals == 100
        pool = await worker.pool()
        assert pool.free + pool.evictable == worker.num_blocks
