"""Which of several schedulers gets a worker, and when; the worker's clock is the test's."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from octavo.v1 import worker_pb2 as pb

from tests.e2e.worker_stack import NUM_BLOCKS, Scheduler, Worker, admit, keys_of, refusal_of


async def refused(worker: Worker, scheduler_id: str, **hello: Any) -> tuple[str, float]:
    """Say Hello in vain; return the reason, and the seconds after which to come again."""
    async with worker.connect() as stub:
        scheduler = Scheduler(stub)
        with pytest.raises((grpc.aio.AioRpcError, EOFError)):
            await scheduler.hello(scheduler_id, 1, 2, **hello)
        _, reason, _ = await refusal_of(scheduler.call)
        details = dict(await scheduler.call.trailing_metadata() or ())["grpc-status-details-bin"]
        retry = error_details_pb2.RetryInfo()
        retries = [one for one in status_pb2.Status.FromString(details).details if one.Unpack(retry)]
        return reason, retry.retry_delay.ToTimedelta().total_seconds() if retries else 0.0


async def lose(worker: Worker) -> None:
    """A preferred scheduler was attached, and its stream broke."""
    async with worker.attach("preferred", rank=0):
        pass
    await worker.vacant()


async def test_better_rank_takes_the_worker_and_finds_its_cache(worker: Worker) -> None:
    message = admit(1, tokens=40)
    message.keys = keys_of(message)
    worker.clock.now += 1
    async with worker.attach("standby", rank=1) as standby:
        await standby.run(admit=[message], prefill_handles=[1], prefill_tokens=[512])
        async with worker.attach("preferred", rank=0, endpoint="preferred:1") as preferred:
            assert await standby.refusal() == (
                grpc.StatusCode.ABORTED,
                "TAKEN_OVER",
                {"scheduler_id": "preferred", "endpoint": "preferred:1"},
            )
            assert preferred.welcome is not None
            assert (preferred.welcome.pool.active, preferred.welcome.device_keys) == (0, message.keys)
            assert (await preferred.run(admit=[message])).admitted[0].cached_tokens == 32


@pytest.mark.parametrize("rank", [1, 2])
async def test_scheduler_of_no_better_rank_is_refused_and_told_of(worker: Worker, rank: int) -> None:
    worker.clock.now += 1
    async with worker.attach("holder", rank=1) as holder:
        assert (await refused(worker, "other", rank=rank, endpoint="other:1"))[0] == "SCHEDULER_ATTACHED"
        said = await holder.read()
        assert said.standby == pb.Standby(scheduler_id="other", rank=rank, endpoint="other:1")
        assert (await holder.run()).status == pb.STEP_STATUS_OK


async def ask(worker: Worker, holder: Scheduler, times: int = 4) -> None:
    """Let a standby ask in vain, and the scheduler that has the worker hear of it each time."""
    for _ in range(times):
        assert (await refused(worker, "standby", rank=1))[0] == "SCHEDULER_ATTACHED"
        assert (await holder.read()).HasField("standby")


async def test_scheduler_that_stands_still_loses_the_worker_to_one_that_stands_by(worker: Worker) -> None:
    async with worker.attach("preferred", rank=0) as preferred:
        await ask(worker, preferred, 1)
        await preferred.send(alive=pb.Alive())
        await preferred.run()
        await ask(worker, preferred)
        worker.clock.now += 1.9
        await ask(worker, preferred, 1)
        worker.clock.now += 0.1
        async with worker.attach("standby", rank=1) as standby:
            _, reason, _ = await preferred.refusal()
            assert reason == "TAKEN_OVER"
            assert (await standby.run()).status == pb.STEP_STATUS_OK


async def test_scheduler_keeps_the_worker_while_it_says_anything_at_all(worker: Worker) -> None:
    async with worker.attach("preferred", rank=0) as preferred:
        await preferred.send(alive=pb.Alive())
        for _ in range(3):
            await ask(worker, preferred)
            worker.clock.now += 1.9
            await preferred.run()
        await ask(worker, preferred)


async def test_scheduler_of_an_older_version_keeps_the_worker_although_it_never_says_that_it_is_alive(
    worker: Worker,
) -> None:
    async with worker.attach("older", rank=0) as older:
        await older.run()
        await ask(worker, older)
        worker.clock.now += 60
        await ask(worker, older)


async def test_worker_that_stood_still_itself_calls_nobody_silent(worker: Worker) -> None:
    async with worker.attach("preferred", rank=0) as preferred:
        await preferred.send(alive=pb.Alive())
        await preferred.run()
        await ask(worker, preferred, 2)
        worker.clock.now += 60
        await ask(worker, preferred, 1)
        await preferred.send(alive=pb.Alive())
        await preferred.run()
        await ask(worker, preferred)


async def test_worker_that_was_just_started_is_kept_for_the_preferred_one(worker: Worker) -> None:
    assert await refused(worker, "standby", rank=1) == ("RESERVED", 1.0)
    worker.clock.now += 0.75
    assert await refused(worker, "standby", rank=1) == ("RESERVED", 0.25)
    async with worker.attach("preferred", rank=0) as preferred:
        assert (await preferred.run()).pool.free == NUM_BLOCKS


async def test_preferred_scheduler_that_lost_its_stream_gets_the_worker_before_a_standby(
    worker: Worker,
) -> None:
    worker.clock.now += 60
    await lose(worker)
    assert await refused(worker, "standby", rank=1) == ("RESERVED", 1.0)
    await lose(worker)
    worker.clock.now += 1
    async with worker.attach("standby", rank=1) as standby:
        assert (await standby.run()).status == pb.STEP_STATUS_OK


async def test_preferred_scheduler_that_leaves_keeps_nobody_waiting(worker: Worker) -> None:
    async with worker.attach("preferred", rank=0) as preferred:
        await preferred.send(leave=pb.Leave())
        with pytest.raises(EOFError):
            await preferred.read()
    async with worker.attach("standby", rank=1) as standby:
        assert (await standby.run()).status == pb.STEP_STATUS_OK


async def test_endpoint_that_is_too_long_is_refused(worker: Worker) -> None:
    assert (await refused(worker, "one", endpoint="x" * 1000))[0] == "MALFORMED_MESSAGE"
