"""A worker's session: what a scheduler may say, in which order, and what it gets back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from octavo.v1 import common_pb2
from octavo.v1 import worker_pb2 as pb

from tests.e2e.scheduler_stack import WAIT_S
from tests.e2e.worker_stack import (
    MAX_MODEL_LEN,
    NUM_BLOCKS,
    Scheduler,
    Worker,
    admit,
    keys_of,
    refusal_of,
)
from worker_svc.engine.loop import StepEngine


async def test_describe_has_all_that_a_scheduler_needs(worker: Worker) -> None:
    async with worker.connect() as stub:
        description = await stub.Describe(pb.DescribeRequest())
    assert (description.worker_id, description.incarnation, description.runner) == ("w", "i", "sim")
    assert (description.geometry.num_blocks, description.max_model_len) == (NUM_BLOCKS, MAX_MODEL_LEN)
    assert [file.name for file in description.tokenizer_files] == ["tokenizer.json"]
    assert list(description.eos_token_ids) == [2]


async def test_session_runs_sequences_to_their_end(worker: Worker) -> None:
    async with worker.attach() as scheduler:
        assert scheduler.welcome is not None
        assert scheduler.welcome.pool.free == NUM_BLOCKS
        first = await scheduler.run(
            admit=[admit(1, sampling=common_pb2.SamplingParams(max_tokens=3)), admit(2)],
            prefill_handles=[1, 2],
            prefill_tokens=[512, 5],
        )
        assert (first.status, first.simulated, first.live_count) == (pb.STEP_STATUS_OK, True, 2)
        assert list(first.token_handles) == [1]
        assert list(first.first_positions) == [20]
        second = await scheduler.run(prefill_handles=[2], prefill_tokens=[15])
        assert list(second.token_handles) == [1, 2]
        third = await scheduler.run()
        assert [(end.handle, end.reason) for end in third.finished] == [(1, common_pb2.FINISH_REASON_LENGTH)]
        fourth = await scheduler.run(release=[2])
        assert (list(fourth.released), fourth.live_count, fourth.pool.active) == ([2], 0, 0)


async def test_session_same_seed_yields_the_same_tokens_in_another_session(worker: Worker) -> None:
    tokens = []
    for epoch in (1, 2):
        async with worker.attach(epoch=epoch) as scheduler:
            reports = [await scheduler.run(admit=[admit(5)], prefill_handles=[5], prefill_tokens=[512])]
            reports += [await scheduler.run() for _ in range(5)]
            tokens.append([token for report in reports for token in report.token_ids])
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 6


async def test_session_end_drops_sequences_and_keeps_the_cache(worker: Worker) -> None:
    message = admit(1, tokens=40)
    keys = keys_of(message)
    message.keys = keys
    async with worker.attach() as scheduler:
        await scheduler.run(admit=[message], prefill_handles=[1], prefill_tokens=[512])
    assert await worker.quiet() == (0, 0)
    await worker.vacant()
    async with worker.attach("two") as scheduler:
        assert scheduler.welcome is not None
        assert scheduler.welcome.device_keys == keys
        report = await scheduler.run(admit=[message])
        assert report.admitted[0].cached_tokens == 32


async def test_session_end_is_seen_in_the_gauges_without_another_session(worker: Worker) -> None:
    gauge = worker.sessions._metrics.registry.get_sample_value
    async with worker.attach() as scheduler:
        await scheduler.run(admit=[admit(1, tokens=40)], prefill_handles=[1], prefill_tokens=[512])
        assert gauge("octavo_worker_sequences") == 1
        assert gauge("octavo_worker_kv_blocks", {"state": "active"}) == 3
    await worker.vacant()
    await worker.loop.call(lambda engine: engine.num_live)
    assert gauge("octavo_worker_sequences") == 0
    assert gauge("octavo_worker_kv_blocks", {"state": "active"}) == 0
    assert gauge("octavo_worker_kv_blocks", {"state": "free"}) == NUM_BLOCKS


async def test_welcome_waits_for_the_running_step_and_for_its_sequences_to_go(worker: Worker) -> None:
    worker.gate.held = True
    async with worker.attach(epoch=1) as former:
        await former.plan(admit=[admit(1)], prefill_handles=[1], prefill_tokens=[512])
        await former.plan()
        await worker.gate.step_is_running()
        async with worker.connect() as stub:
            scheduler = Scheduler(stub)
            welcomed = asyncio.create_task(scheduler.hello("one", 2, 2))
            assert await former.refusal() == (grpc.StatusCode.ABORTED, "SUPERSEDED", {})
            assert not welcomed.done()
            worker.gate.let_go()
            await welcomed
            assert scheduler.welcome is not None
            assert (scheduler.welcome.pool.active, scheduler.welcome.pool.free) == (0, NUM_BLOCKS)
            # The second plan of the former session never ran.
            worker.gate.held = False
            assert (await scheduler.run()).step == 1


async def test_second_scheduler_is_refused_until_the_first_has_gone(worker: Worker) -> None:
    async with worker.attach("one", endpoint="one:1"), worker.connect() as stub:
        second = Scheduler(stub)
        with pytest.raises((grpc.aio.AioRpcError, EOFError)):
            await second.hello("two", 9, 2)
        assert await refusal_of(second.call) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "SCHEDULER_ATTACHED",
            {"scheduler_id": "one", "endpoint": "one:1", "incarnation": "i"},
        )
    await worker.vacant()
    async with worker.attach("two") as scheduler:
        assert (await scheduler.run()).status == pb.STEP_STATUS_OK


@pytest.mark.parametrize("epoch", [4, 5])
async def test_older_stream_of_the_same_scheduler_is_refused(worker: Worker, epoch: int) -> None:
    async with worker.attach(epoch=5) as current, worker.connect() as stub:
        late = Scheduler(stub)
        with pytest.raises((grpc.aio.AioRpcError, EOFError)):
            await late.hello("one", epoch, 2)
        assert (await refusal_of(late.call))[:2] == (grpc.StatusCode.FAILED_PRECONDITION, "STALE_EPOCH")
        assert (await current.run()).status == pb.STEP_STATUS_OK


@pytest.mark.parametrize(
    ("message", "refusal"),
    [
        ({"plan": pb.Plan(step=2)}, (grpc.StatusCode.FAILED_PRECONDITION, "STEP_OUT_OF_ORDER", {})),
        ({"plan": pb.Plan()}, (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE", {"field": "step"})),
        (
            {"plan": pb.Plan(step=1, prefill_handles=[1])},
            (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE", {"field": "prefill_tokens"}),
        ),
        (
            {"pin": pb.Pin(name="p", keys=b"short")},
            (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE", {"field": "pin.keys"}),
        ),
        ({}, (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE", {"field": "message"})),
        (
            {"hello": pb.Hello(scheduler_id="one", epoch=2)},
            (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE", {"field": "message"}),
        ),
    ],
)
async def test_message_against_the_protocol_ends_the_stream_and_nothing_else(
    worker: Worker, message: dict[str, Any], refusal: tuple[grpc.StatusCode, str, dict[str, str]]
) -> None:
    async with worker.attach() as scheduler:
        await scheduler.send(**message)
        assert await scheduler.refusal() == refusal
    assert await worker.quiet() == (0, 0)


async def test_more_plans_than_the_window_end_the_stream(worker: Worker) -> None:
    worker.gate.held = True
    async with worker.attach(window=2) as scheduler:
        await scheduler.plan(admit=[admit(1)], prefill_handles=[1], prefill_tokens=[512])
        await scheduler.plan()
        await scheduler.plan()
        code, reason, _ = await scheduler.refusal()
        assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "WINDOW_EXCEEDED")
    worker.gate.open()
    assert await worker.quiet() == (0, 0)


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (pb.SchedulerMessage(plan=pb.Plan(step=1)), "MALFORMED_MESSAGE"),
        (pb.SchedulerMessage(hello=pb.Hello(epoch=1, protocol_version=1, window=2)), "MALFORMED_MESSAGE"),
        (
            pb.SchedulerMessage(hello=pb.Hello(scheduler_id="s", protocol_version=1, window=0)),
            "MALFORMED_MESSAGE",
        ),
        (
            pb.SchedulerMessage(hello=pb.Hello(scheduler_id="s", protocol_version=99, window=2)),
            "PROTOCOL_VERSION",
        ),
    ],
)
async def test_stream_that_begins_wrongly_is_refused(
    worker: Worker, first: pb.SchedulerMessage, reason: str
) -> None:
    async with worker.connect() as stub:
        scheduler = Scheduler(stub)
        await scheduler.call.write(first)
        assert (await scheduler.refusal())[1] == reason


@pytest.mark.parametrize("method", ["Attach", "Describe", "InjectFaults", "Audit"])
async def test_what_is_no_message_or_too_large_is_refused_and_not_parsed(worker: Worker, method: str) -> None:
    large = pb.SchedulerMessage(hello=pb.Hello(scheduler_id="s" * 100_000)).SerializeToString()
    async with grpc.aio.insecure_channel(worker.address) as channel:
        path = f"/octavo.v1.Worker/{method}"
        for raw in (b"\xff\xff", large):
            call = (
                channel.stream_stream(path)(iter([raw]))
                if method == "Attach"
                else channel.unary_unary(path)(raw)
            )
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await (call.read() if method == "Attach" else call)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    async with worker.attach() as scheduler:
        await scheduler.plan()
        assert (await scheduler.report()).status == pb.STEP_STATUS_OK


@pytest.mark.parametrize(
    ("bad", "detail"),
    [
        (pb.Admit(handle=1, token_ids=[5, 10**6], prompt_len=2), "token id 1000000"),
        (pb.Admit(handle=1, token_ids=[5] * MAX_MODEL_LEN, prompt_len=2), "leave no room"),
        (pb.Admit(handle=1, token_ids=[5] * 3_000_000, prompt_len=2), "leave no room"),
        (
            pb.Admit(handle=1, token_ids=[5] * 16, prompt_len=2, keys=b"j" * 16 + b"k" * 16),
            "2 keys for 16 tokens",
        ),
        (pb.Admit(handle=1, token_ids=[5], prompt_len=1, adapter="poet"), "no adapter poet"),
        (
            pb.Admit(
                handle=1,
                token_ids=[5],
                prompt_len=1,
                sampling=common_pb2.SamplingParams(logit_bias={10**6: 1.0}),
            ),
            "token id 1000000",
        ),
    ],
)
async def test_sequence_that_cannot_run_is_refused_and_the_others_run(
    worker: Worker, bad: pb.Admit, detail: str
) -> None:
    async with worker.attach() as scheduler:
        report = await scheduler.run(admit=[bad, admit(2)], prefill_handles=[1, 2], prefill_tokens=[512, 512])
        assert [(entry.handle, entry.reason) for entry in report.refused] == [
            (1, pb.REFUSE_REASON_UNSUPPORTED)
        ]
        assert detail in report.refused[0].detail
        assert list(report.token_handles) == [2]


async def test_cancel_overtakes_the_plans_that_wait(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    async with worker.attach() as scheduler:
        await scheduler.run(admit=[admit(1), admit(2)], prefill_handles=[1, 2], prefill_tokens=[512, 512])
        worker.gate.held = True
        await scheduler.plan()
        await worker.gate.step_is_running()
        await scheduler.plan()
        taken = asyncio.Event()
        call = worker.loop.call

        def noted(function: Callable[[StepEngine], object]) -> asyncio.Future[object]:
            taken.set()
            return call(function)

        monkeypatch.setattr(worker.loop, "call", noted)
        await scheduler.send(cancel=pb.Cancel(handles=[1]))
        await taken.wait()
        worker.gate.open()
        assert list((await scheduler.report()).token_handles) == [1, 2]
        after = await scheduler.report()
        assert (list(after.released), list(after.token_handles)) == ([1], [2])


async def test_pinned_prefix_counts_as_pinned(worker: Worker) -> None:
    message = admit(1, tokens=40)
    message.keys = keys_of(message)
    async with worker.attach() as scheduler:
        await scheduler.run(admit=[message], prefill_handles=[1], prefill_tokens=[512])
        await scheduler.send(pin=pb.Pin(name="system", keys=message.keys))
        assert (await scheduler.run(release=[1])).pool.pinned == 2
        await scheduler.send(pin=pb.Pin(name="system"))
        assert (await scheduler.run()).pool.pinned == 0


async def test_drain_turns_new_sequences_away_and_ends_with_the_last_one(worker: Worker) -> None:
    async with worker.attach() as scheduler:
        await scheduler.run(admit=[admit(1)], prefill_handles=[1], prefill_tokens=[512])
        worker.sessions.drain("SIGTERM")
        assert (await scheduler.read()).draining.reason == "SIGTERM"
        report = await scheduler.run(admit=[admit(2)], prefill_handles=[2], prefill_tokens=[512])
        assert [entry.reason for entry in report.refused] == [pb.REFUSE_REASON_DRAINING]
        assert list(report.token_handles) == [1]
        assert not worker.sessions.drained.is_set()
        assert (await scheduler.run(release=[1])).live_count == 0
        with pytest.raises(EOFError) as end:
            await scheduler.read()
        assert end.value.args == (grpc.StatusCode.OK,)
        async with asyncio.timeout(WAIT_S):
            await worker.sessions.drained.wait()
    async with worker.connect() as stub:
        late = Scheduler(stub)
        with pytest.raises((grpc.aio.AioRpcError, EOFError)):
            await late.hello("two", 1, 2)
        assert (await refusal_of(late.call))[:2] == (grpc.StatusCode.UNAVAILABLE, "DRAINING")


async def test_drain_of_an_idle_session_ends_it_at_once(worker: Worker) -> None:
    async with worker.attach() as scheduler:
        worker.sessions.drain("SIGTERM")
        assert (await scheduler.read()).draining.reason == "SIGTERM"
        with pytest.raises(EOFError):
            await scheduler.read()
