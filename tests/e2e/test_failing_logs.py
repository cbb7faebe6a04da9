"""A log that cannot be written costs lines and nothing else: real processes, a full disk, a dead pipe."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import random
import resource
import signal
import socket
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc, operations_pb2, operations_pb2_grpc

from scheduler_svc.planlog import replay
from tests.e2e.scheduler_stack import WAIT_S, start_worker, until

REQUESTS = 40


def free_port() -> int:
    """Return a port that can be had, and that no outgoing connection is given in the meantime."""
    while True:
        port = random.randrange(10_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@asynccontextmanager
async def process(
    module: str, stderr: int, *flags: str, limit: Callable[[], None] | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process of which the test reads nothing."""
    command = ["gateway"] if module == "octavo.cli.main" else ["--metrics-port=0"]
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *command, *flags, stderr=stderr, preexec_fn=limit
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
            await started.wait()


async def status_of(channel: grpc.aio.Channel) -> operations_pb2.Status:
    stub: Any = operations_pb2_grpc.OperationsStub(channel)
    response = await stub.GetStatus(operations_pb2.GetStatusRequest(), wait_for_ready=True, timeout=WAIT_S)
    return response.status  # type: ignore[no-any-return]


async def is_ready(channel: grpc.aio.Channel) -> bool:
    return any(worker.state == "ready" for worker in (await status_of(channel)).workers)


async def ask(channel: grpc.aio.Channel, text: str) -> str:
    call: Any = generation_pb2_grpc.GenerationStub(channel).Generate(pb.GenerateRequest(text=text))
    return "".join([event.delta.text async for event in call])


async def metrics_of(port: int) -> str:
    def read() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
            return str(page.read().decode())

    return await asyncio.to_thread(read)


def unread_pipe() -> int:
    """Return the end of a small pipe that takes some lines and then holds up whoever writes."""
    reader, end = os.pipe()
    os.dup(reader)
    fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, 4096)
    return end


async def serves_and_stops(scheduler: asyncio.subprocess.Process, port: int) -> operations_pb2.Status:
    """Have requests answered by a scheduler, and end it; return what it said of itself before."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await until(partial(is_ready, channel))
        for number in range(REQUESTS):
            assert await ask(channel, f"prompt {number}") == f"prompt {number}"
        status = await status_of(channel)
    scheduler.send_signal(signal.SIGTERM)
    async with asyncio.timeout(WAIT_S):
        assert await scheduler.wait() == 0
    return status


async def test_scheduler_whose_log_is_on_a_full_disk_serves_and_counts_the_lines() -> None:
    worker = await start_worker()
    port, metrics_port = free_port(), free_port()
    end = os.open("/dev/full", os.O_WRONLY)
    flags = f"--listen=127.0.0.1:{port}", f"--metrics-port={metrics_port}", f"--workers={worker.address}"
    try:
        async with process("scheduler_svc", end, *flags) as scheduler:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                await until(partial(is_ready, channel))
                assert "octavo_log_lines_dropped_total 0.0" not in await metrics_of(metrics_port)
            status = await serves_and_stops(scheduler, port)
        assert status.log_lines_dropped >= REQUESTS
    finally:
        os.close(end)
        await worker.stop()


@pytest.mark.parametrize("kind", ["pipe", "closed"])
async def test_scheduler_whose_log_nobody_reads_serves_and_ends_in_time(kind: str) -> None:
    worker = await start_worker()
    port = free_port()
    end = unread_pipe()
    try:
        flags = f"--listen=127.0.0.1:{port}", f"--workers={worker.address}"
        limit = partial(os.close, 2) if kind == "closed" else None
        async with process("scheduler_svc", end, *flags, limit=limit) as scheduler:
            status = await serves_and_stops(scheduler, port)
        assert (status.outcomes["STOP"], status.live_requests) == (REQUESTS, 0)
    finally:
        os.close(end)
        await worker.stop()


@pytest.mark.parametrize("kind", ["full", "pipe"])
async def test_worker_and_gateway_whose_logs_cannot_be_written_serve(kind: str) -> None:
    worker_port, port, gateway_port = free_port(), free_port(), free_port()
    end = unread_pipe() if kind == "pipe" else os.open("/dev/full", os.O_WRONLY)
    listen = "--listen=127.0.0.1:"
    try:
        async with (
            process(
                "worker_svc", end, "--runner=sim", "--log-level=debug", f"{listen}{worker_port}"
            ) as worker,
            process(
                "scheduler_svc", end, f"{listen}{port}", f"--workers=127.0.0.1:{worker_port}"
            ) as scheduler,
            process(
                "octavo.cli.main", end, f"{listen}{gateway_port}", f"--endpoint=127.0.0.1:{port}"
            ) as gateway,
        ):
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                await until(partial(is_ready, channel))

            async def is_listening() -> bool:
                return gateway.returncode is None and await asyncio.to_thread(_listens, gateway_port)

            await until(is_listening)
            body = {"prompt": "hello", "max_tokens": 4, "model": ""}
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway_port}", timeout=WAIT_S) as http:
                for _ in range(REQUESTS):
                    assert (await http.post("/v1/completions", json=body)).status_code == 200
            if kind == "full":
                pages = await metrics_of(gateway_port)
                assert "octavo_log_lines_dropped_total" in pages
                assert "octavo_log_lines_dropped_total 0.0" not in pages
            for one in (gateway, scheduler, worker):
                one.send_signal(signal.SIGTERM)
                async with asyncio.timeout(WAIT_S):
                    assert await one.wait() == 0
    finally:
        os.close(end)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def test_scheduler_whose_plan_log_finds_no_room_serves_and_writes_it_again_when_there_is(
    tmp_path: Path,
) -> None:
    """A limit on the size of files stands in for the disk: what comes past it cannot be written."""
    worker = await start_worker()
    port, metrics_port = free_port(), free_port()
    path, log = tmp_path / "plan.log", tmp_path / "log"
    flags = (
        f"--listen=127.0.0.1:{port}",
        f"--metrics-port={metrics_port}",
        f"--workers={worker.address}",
        f"--plan-log={path}",
    )
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    small = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with log.open("w") as stderr:
            async with process("scheduler_svc", stderr.fileno(), *flags, limit=small) as scheduler:
                async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                    await until(partial(is_ready, channel))
                    while not (await status_of(channel)).plan_log.HasField("problem"):
                        assert await ask(channel, "a prompt") == "a prompt"
                    for _ in range(5):
                        assert await ask(channel, "into the gap") == "into the gap"
                    status = await status_of(channel)
                    assert status.plan_log.entries_missed > 5
                    assert "File too large" in status.plan_log.problem
                    assert "octavo_plan_log_writing 0.0" in await metrics_of(metrics_port)

                    resource.prlimit(scheduler.pid, resource.RLIMIT_FSIZE, limits)

                    async def is_written_again() -> bool:
                        await ask(channel, "again")
                        return not (await status_of(channel)).plan_log.HasField("problem")

                    await until(is_written_again)
                    assert await ask(channel, "after the gap") == "after the gap"
                    assert "octavo_plan_log_writing 1.0" in await metrics_of(metrics_port)
                status = await serves_and_stops(scheduler, port)
    finally:
        await worker.stop()
    before, after = replay(path.with_name("plan.log.1")), replay(path)
    assert before.gap is None
    assert not before.differs
    assert after.gap is not None
    assert after.gap.entries == status.plan_log.entries_missed
    assert not after.differs
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    told = [line for line in lines if line["event"].startswith("plan_log")]
    assert [(line["event"], line["level"]) for line in told] == [
        ("plan_log_stopped", "warning"),
        ("plan_log_resumed", "warning"),
    ]
