"""Finding workers and keeping them: names, doubles, misfits, standbys, and other schedulers' leavings."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
import pytest
import structlog
from octavo.v1 import common_pb2
from octavo.v1 import generation_pb2 as pb

from scheduler_svc.fleet import worker_link
from scheduler_svc.fleet.way import Ways
from tests.e2e.scheduler_stack import (
    WAIT_S,
    EchoRunner,
    Stack,
    error_of,
    one_worker,
    request,
    scheduler,
    start_worker,
    until,
)
from worker_svc.runner.base import StepBatch, StepResult
from worker_svc.runner.sim import built_in_model


def port_of(address: str) -> str:
    return address.rpartition(":")[2]


def problems(stack: Stack) -> dict[str, str]:
    return {link.status.address: link.last_problem for link in stack.process.fleet}


async def test_dns_name_is_every_address_behind_it() -> None:
    worker = await start_worker()
    try:
        async with scheduler(f"dns:localhost:{port_of(worker.address)}") as stack:
            await stack.wait_ready()
            assert (await stack.generate(text="found")).text[0] == "found"
            # The worker listens on 127.0.0.1 only; where localhost is ::1, too, that link keeps trying.
            states = {link.status.address: link.status.state for link in stack.process.fleet}
            assert states[worker.address] == "ready"
    finally:
        await worker.stop()


async def test_one_worker_behind_two_addresses_is_attached_once() -> None:
    worker = await start_worker()
    try:
        async with scheduler(worker.address, f"localhost:{port_of(worker.address)}") as stack:
            await stack.wait_ready()
            await until(lambda: any("attached already" in problem for problem in problems(stack).values()))
            assert stack.process.fleet.num_ready == 1
            assert (await stack.generate(text="once")).text[0] == "once"
    finally:
        await worker.stop()


async def test_worker_that_does_not_match_its_model_is_kept_out() -> None:
    first = await start_worker("w1")
    other = replace(built_in_model(), model_id="echo", revision="another")
    misfit = await start_worker("w2", info=other)
    try:
        async with scheduler(first.address) as before:
            await before.wait_ready()
        async with scheduler(first.address, misfit.address) as stack:
            await stack.wait_ready()
            await until(lambda: any("others have" in problem for problem in problems(stack).values()))
            assert stack.process.fleet.num_ready == 1
            assert (await stack.generate(text="fine")).text[0] == "fine"
    finally:
        await first.stop()
        await misfit.stop()


async def test_two_models_are_told_apart_by_name() -> None:
    first = await start_worker("w1")
    second = await start_worker("w2", info=replace(built_in_model(), model_id="other"))
    try:
        async with scheduler(first.address, second.address) as stack:
            await stack.wait_ready(2)
            assert (await stack.generate(text="to echo", model="echo")).text[0] == "to echo"
            assert (await stack.generate(text="to other", model="other")).text[0] == "to other"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stack.generate(text="to whom?")
            error = error_of(caught.value)
            assert error.violations[0].field == "model"
            assert "echo, other" in error.message
            models = await stack.generation.ListModels(pb.ListModelsRequest())
            assert {model.id for model in models.models} == {"echo", "other"}
    finally:
        await first.stop()
        await second.stop()


async def test_prompts_may_be_as_long_as_the_workers_of_the_moment_allow() -> None:
    small, large = await start_worker("w1", max_model_len=64), await start_worker("w2")
    text = "x" * 100

    async def refusal(**sampling: int) -> common_pb2.Error:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.generate(text=text, sampling=sampling)
        return error_of(caught.value)

    try:
        async with scheduler(small.address) as stack:
            await stack.wait_ready()
            error = await refusal()
            assert (error.reason, "holds 64" in error.message) == ("PROMPT_TOO_LONG", True)
            stack.process.fleet._add(Ways().to(large.address))
            await stack.wait_ready(2)
            assert (await stack.generate(text=text)).text[0] == text
            await large.stop()
            await until(lambda: stack.process.fleet.num_ready == 1)
            error = await refusal(max_tokens=5)
            assert (error.reason, "holds 64" in error.message) == ("PROMPT_TOO_LONG", True)
    finally:
        await small.stop()


async def test_standby_takes_over_when_the_first_scheduler_is_gone() -> None:
    worker = await start_worker()
    try:
        async with scheduler(worker.address, scheduler_id="one") as first:
            await first.wait_ready()
            async with scheduler(worker.address, scheduler_id="two") as standby:
                await until(lambda: [link.status.state for link in standby.process.fleet] == ["held"])
                running = asyncio.create_task(first.generate(text="with the first"))
                assert (await running).text[0] == "with the first"
                first.process.stop("test", 0.0)
                await standby.wait_ready()
                assert (await standby.generate(text="with the second")).text[0] == "with the second"
    finally:
        await worker.stop()


async def test_scheduler_that_comes_back_finds_the_cache_warm() -> None:
    worker = await start_worker()
    text = "a prompt that fills some blocks, so that they can be found again later on"
    try:
        for expected in (0, len(text) // 16 * 16):
            async with scheduler(worker.address, scheduler_id="one") as stack:
                await stack.wait_ready()
                output = await stack.generate(text=text)
                assert output.finished[0].usage.cached_tokens == expected
    finally:
        await worker.stop()


async def test_cache_salt_narrows_who_shares_a_prefix() -> None:
    text = "the same prompt for everybody, but not the same blocks for everybody"
    async with one_worker() as (stack, _):
        cached = []
        for salt in ("", "mine", "mine", ""):
            output = await stack.generate(text=text, terms={"cache_salt": salt})
            cached.append(output.finished[0].usage.cached_tokens)
        assert cached == [0, 0, 64, 64]


async def test_call_held_open_for_long_is_not_killed_for_its_silence() -> None:
    async with one_worker() as (stack, worker):
        worker.gate.close()
        options = [("grpc.keepalive_time_ms", 1000), ("grpc.keepalive_permit_without_calls", 1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{stack.port}", options=options) as channel:
            quiet = Stack(stack.process, stack.port, channel)
            call = quiet.generation.Generate(request(text="patient", terms={"queue_timeout_ms": 60_000}))
            assert await call.read()
            await asyncio.sleep(4)  # Four pings, which a server with gRPC's defaults punishes.
            worker.gate.open()
            events = []
            while isinstance(event := await call.read(), pb.GenerateEvent):
                events.append(event)
            assert "".join(event.delta.text for event in events) == "patient"


async def test_adapter_named_as_model_is_applied_and_shares_no_cache_with_the_bare_model() -> None:
    info = replace(built_in_model(), model_id="echo", adapters=("poet", "critic"))
    worker = await start_worker(info=info)
    seen: set[str | None] = set()
    execute = EchoRunner.execute

    def watch(self: EchoRunner, batch: StepBatch) -> StepResult:
        seen.update(sequence.adapter for sequence in batch.added)
        return execute(self, batch)

    EchoRunner.execute = watch  # type: ignore[method-assign]
    try:
        async with scheduler(worker.address) as stack:
            await stack.wait_ready()
            (model,) = (await stack.generation.ListModels(pb.ListModelsRequest())).models
            assert list(model.adapters) == ["critic", "poet"]
            cached = {}
            for name in ("poet", "critic", "", "poet"):
                output = await stack.generate(text="x" * 100, model=name)
                assert output.text[0] == "x" * 100
                cached.setdefault(name, []).append(output.finished[0].usage.cached_tokens)
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await stack.generate(text="x", model="painter")
    finally:
        EchoRunner.execute = execute  # type: ignore[method-assign]
        await worker.stop()
    assert seen == {"poet", "critic", None}
    assert cached["critic"] == cached[""] == [0]
    first, second = cached["poet"]
    assert (first, second > 0) == (0, True)
    error = error_of(failure.value)
    assert error.reason == "UNKNOWN_MODEL"
    assert "critic, echo, poet" in error.message


async def test_unknown_model_is_unknown_only_once_all_workers_have_been_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_link, "_DESCRIBE_TIMEOUT_S", WAIT_S)
    first = await start_worker("w1")
    late = await start_worker("w2")
    await late.stop()

    async def refusal(model: str) -> common_pb2.Error:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.generate(text="a", model=model)
        return error_of(caught.value)

    try:
        async with scheduler(first.address, late.address) as stack:
            await stack.wait_ready()
            error = await refusal("other")
            assert (error.reason, error.retry_delay_ms > 0) == ("NO_WORKER", True)
            other = replace(built_in_model(), model_id="other")
            late = await start_worker("w2", port=int(port_of(late.address)), info=other)
            await stack.wait_ready(2)
            assert (await stack.generate(text="a", model="other")).text[0] == "a"
            assert (await refusal("third")).reason == "UNKNOWN_MODEL"
            await late.stop()
            await until(lambda: stack.process.fleet.num_ready == 1)
            assert (await refusal("third")).reason == "UNKNOWN_MODEL"
    finally:
        await first.stop()


async def test_requests_for_an_adapter_wait_for_the_return_of_its_only_worker() -> None:
    poet = replace(built_in_model(), model_id="echo", adapters=("poet",))
    plain, adapted = await start_worker("w1"), await start_worker("w2", info=poet)
    try:
        async with scheduler(plain.address, adapted.address) as stack:
            await stack.wait_ready(2)
            await adapted.stop()
            await until(lambda: stack.process.fleet.num_ready == 1)
            waiting = asyncio.create_task(stack.generate(text="a verse", model="poet"))
            await until(lambda: stack.process.accounts.live)
            assert (await stack.generate(text="prose")).text[0] == "prose"
            adapted = await start_worker("w2", port=int(port_of(adapted.address)), info=poet)
            assert (await waiting).text[0] == "a verse"
            await adapted.stop()
    finally:
        await plain.stop()


async def test_adapter_that_went_to_another_model_is_found_there() -> None:
    names = ("echo", "other")
    infos = [replace(built_in_model(), model_id=name, adapters=("poet",)) for name in names]
    former = await start_worker("w1", info=infos[0])
    plain = await start_worker("w2", info=replace(infos[0], adapters=()))
    try:
        async with scheduler(former.address, plain.address) as stack:
            await stack.wait_ready(2)
            await former.stop()
            await until(lambda: stack.process.fleet.num_ready == 1)
            latter = await start_worker("w3", info=infos[1])
            stack.process.fleet._add(Ways().to(latter.address))
            await stack.wait_ready(2)
            assert (await stack.generate(text="a verse", model="poet")).text[0] == "a verse"
            await latter.stop()
    finally:
        await plain.stop()


async def test_worker_whose_adapter_is_named_as_a_model_is_kept_out() -> None:
    first = await start_worker("w1", info=replace(built_in_model(), model_id="echo", adapters=("poet",)))
    misfit = await start_worker("w2", info=replace(built_in_model(), model_id="poet"))
    try:
        async with scheduler(first.address, misfit.address) as stack:
            await stack.wait_ready()
            await until(lambda: any("has the name of" in problem for problem in problems(stack).values()))
            assert stack.process.fleet.num_ready == 1
    finally:
        await first.stop()
        await misfit.stop()


async def test_two_schedulers_of_one_name_say_so() -> None:
    worker = await start_worker()
    try:
        with structlog.testing.capture_logs() as logs:
            async with (
                scheduler(worker.address, scheduler_id="twin"),
                scheduler(worker.address, scheduler_id="twin"),
            ):
                await until(lambda: any(line["event"] == "scheduler_id_not_unique" for line in logs))
    finally:
        await worker.stop()
    told = next(line for line in logs if line["event"] == "scheduler_id_not_unique")
    assert (told["log_level"], told["scheduler_id"]) == ("error", "twin")
