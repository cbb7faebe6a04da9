"""A worker whose steps, reports and streams fail, and streams that are half open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc
import grpc.aio
import pytest
from octavo.protocol.transport import PING_INTERVAL_MS
from octavo.v1 import operations_pb2
from octavo.v1 import worker_pb2 as pb

from tests.e2e.scheduler_stack import WAIT_S
from tests.e2e.worker_stack import (
    Scheduler,
    Worker,
    admit,
    refusal_of,
)
from worker_svc.api.session import SchedulerSession


async def test_faults_are_refused_unless_enabled(worker: Worker) -> None:
    async with worker.connect() as stub:
        call = stub.InjectFaults(pb.InjectFaultsRequest())
        with pytest.raises(grpc.aio.AioRpcError):
            await call
        assert (await refusal_of(call))[:2] == (grpc.StatusCode.FAILED_PRECONDITION, "FAULTS_DISABLED")


async def test_fault_that_is_none_is_refused(faulty_worker: Worker) -> None:
    async with faulty_worker.connect() as stub:
        call = stub.InjectFaults(pb.InjectFaultsRequest(faults=[operations_pb2.Fault()]))
        with pytest.raises(grpc.aio.AioRpcError):
            await call
        assert await refusal_of(call) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "MALFORMED_MESSAGE",
            {"field": "faults.kind"},
        )


async def inject(scheduler: Scheduler, kind: operations_pb2.FaultKind.ValueType) -> None:
    await scheduler.stub.InjectFaults(
        pb.InjectFaultsRequest(faults=[operations_pb2.Fault(kind=kind, count=1)])
    )


async def test_fault_step_error_fails_one_step(faulty_worker: Worker) -> None:
    async with faulty_worker.attach() as scheduler:
        await inject(scheduler, operations_pb2.FAULT_KIND_STEP_ERROR)
        failed = await scheduler.run(admit=[admit(1)], prefill_handles=[1], prefill_tokens=[512])
        assert failed.status == pb.STEP_STATUS_FAILED
        assert (await scheduler.run()).status == pb.STEP_STATUS_SKIPPED
        after = await scheduler.run(prefill_handles=[1], prefill_tokens=[512], resume_after=failed.step)
        assert (after.status, list(after.token_handles)) == (pb.STEP_STATUS_OK, [1])


async def test_fault_stream_drop_ends_the_stream_and_leaks_nothing(faulty_worker: Worker) -> None:
    async with faulty_worker.attach() as scheduler:
        await inject(scheduler, operations_pb2.FAULT_KIND_STREAM_DROP)
        await scheduler.plan(admit=[admit(1)], prefill_handles=[1], prefill_tokens=[512])
        assert await scheduler.refusal() == (grpc.StatusCode.UNAVAILABLE, "STREAM_DROPPED", {})
    assert await faulty_worker.quiet() == (0, 0)


async def test_fault_lost_report_is_the_only_one_missing(faulty_worker: Worker) -> None:
    async with faulty_worker.attach() as scheduler:
        await inject(scheduler, operations_pb2.FAULT_KIND_LOST_REPORT)
        await scheduler.plan()
        assert (await scheduler.run()).step == 2


class FreezingProxy:
    """A network that can go silent without closing anything."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def freeze(self) -> None:
        self._thawed.clear()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        try:
            yield "{}:{}".format(*server.sockets[0].getsockname())
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(self._host, self._port)
        for source, sink in ((reader, there[1]), (there[0], writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                await self._thawed.wait()
                sink.write(data)
        finally:
            sink.close()
            # A connection that is closed and not waited for may outlive the event loop.
            with suppress(OSError):
                await sink.wait_closed()


async def test_half_open_stream_is_found_and_makes_room_for_another(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = asyncio.Event()
    close = worker.sessions.close

    def noted(session: SchedulerSession) -> None:
        close(session)
        closed.set()

    monkeypatch.setattr(worker.sessions, "close", noted)
    proxy = FreezingProxy(worker.address)
    async with proxy.listening() as address:
        silent = Worker(address, worker.gate, worker.sessions, worker.loop, worker.clock)
        async with silent.attach() as scheduler:
            await scheduler.run(admit=[admit(1)], prefill_handles=[1], prefill_tokens=[512])
            proxy.freeze()
            async with asyncio.timeout(WAIT_S):
                await closed.wait()
            assert await worker.quiet() == (0, 0)
            with pytest.raises((grpc.aio.AioRpcError, EOFError)):
                await scheduler.read()


async def test_idle_stream_outlives_many_pings(worker: Worker) -> None:
    async with worker.attach() as scheduler:
        report = asyncio.create_task(scheduler.report())
        done, _ = await asyncio.wait({report}, timeout=6 * PING_INTERVAL_MS / 1000)
        assert not done
        await scheduler.plan()
        assert (await report).status == pb.STEP_STATUS_OK
