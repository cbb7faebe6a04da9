"""The scheduler as a process: ports, signals, metrics, idleness, and what it leaves behind."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc, operations_pb2, operations_pb2_grpc

from tests.e2e.idleness import idle_share
from tests.e2e.scheduler_stack import WAIT_S, start_worker, until


class Process:
    """A scheduler process, and what it logs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.lines: list[dict[str, Any]] = []
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            self.lines.append(json.loads(line))

    @property
    def pid(self) -> int:
        return self._process.pid

    async def event(self, name: str) -> dict[str, Any]:
        """Wait for a line with this event."""
        await until(lambda: any(line["event"] == name for line in self.lines) or self._reader.done())
        return next(line for line in self.lines if line["event"] == name)

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    async def wait(self) -> int:
        async with asyncio.timeout(WAIT_S):
            code = await self._process.wait()
            await self._reader
        return code


@asynccontextmanager
async def scheduler_process(*flags: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "scheduler_svc",
        "--listen=127.0.0.1:0",
        "--metrics-port=0",
        *flags,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield Process(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_process_serves_metrics_and_drains_on_sigterm() -> None:
    worker = await start_worker()
    try:
        async with scheduler_process(f"--workers={worker.address}") as process:
            listening = await process.event("scheduler_listening")
            await process.event("worker_up")
            children = psutil.Process(process.pid).children(recursive=True)
            assert children
            async with grpc.aio.insecure_channel(f"127.0.0.1:{listening['port']}") as channel:
                stub = generation_pb2_grpc.GenerationStub(channel)
                worker.gate.close()
                request = pb.GenerateRequest(request_id="last", text="a secret prompt")
                running: Any = stub.Generate(request)
                await until(lambda: _running(channel))
                process.send(signal.SIGTERM)
                await process.event("draining")
                worker.gate.open()
                text = "".join([event.delta.text async for event in running])
                assert text == "a secret prompt"
            assert await process.wait() == 0
            line = next(line for line in process.lines if line["event"] == "request")
            assert (line["request_id"], line["outcome"], line["prompt_tokens"]) == ("last", "STOP", 15)
            assert not any("secret" in json.dumps(line) for line in process.lines)
            await until(lambda: not any(child.is_running() for child in children))
    finally:
        await worker.stop()


async def _running(channel: grpc.aio.Channel) -> bool:
    stub: Any = operations_pb2_grpc.OperationsStub(channel)
    response = await stub.GetStatus(operations_pb2.GetStatusRequest())
    return any(worker.running for worker in response.status.workers)


async def test_metrics_tell_of_requests_queues_and_pools() -> None:
    worker = await start_worker()
    try:
        async with scheduler_process(f"--workers={worker.address}") as process:
            listening = await process.event("scheduler_listening")
            await process.event("worker_up")
            async with grpc.aio.insecure_channel(f"127.0.0.1:{listening['port']}") as channel:
                stub = generation_pb2_grpc.GenerationStub(channel)
                call: Any = stub.Generate(pb.GenerateRequest(text="hello"))
                assert [event async for event in call]
            url = f"http://127.0.0.1:{listening['metrics_port']}/metrics"
            text = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())
            assert 'octavo_requests_total{model="echo",outcome="STOP",priority="standard"} 1.0' in text
            assert 'octavo_ttft_seconds_count{priority="standard"} 1.0' in text
            assert "octavo_inter_token_seconds_count 5.0" in text
            assert 'octavo_kv_blocks{state="active",worker="w1"} 0.0' in text
            assert 'octavo_waiting_sequences{model="echo",priority="batch"} 0.0' in text
            assert "_created" not in text
    finally:
        await worker.stop()


async def test_first_signal_after_a_drain_lets_what_runs_finish() -> None:
    worker = await start_worker()
    try:
        async with scheduler_process(f"--workers={worker.address}") as process:
            listening = await process.event("scheduler_listening")
            await process.event("worker_up")
            async with grpc.aio.insecure_channel(f"127.0.0.1:{listening['port']}") as channel:
                generation: Any = generation_pb2_grpc.GenerationStub(channel)
                operations: Any = operations_pb2_grpc.OperationsStub(channel)
                worker.gate.close()
                running = generation.Generate(pb.GenerateRequest(text="the last words"))
                await until(lambda: _running(channel))
                await operations.Drain(operations_pb2.DrainRequest())
                process.send(signal.SIGTERM)
                await until(lambda: any(line.get("cause") == "SIGTERM" for line in process.lines))
                worker.gate.open()
                assert "".join([event.delta.text async for event in running]) == "the last words"
            assert await process.wait() == 0
    finally:
        await worker.stop()


async def test_second_signal_ends_the_process_at_once() -> None:
    worker = await start_worker()
    try:
        async with scheduler_process(f"--workers={worker.address}") as process:
            listening = await process.event("scheduler_listening")
            await process.event("worker_up")
            async with grpc.aio.insecure_channel(f"127.0.0.1:{listening['port']}") as channel:
                worker.gate.close()
                stub = generation_pb2_grpc.GenerationStub(channel)
                running: Any = stub.Generate(pb.GenerateRequest(text="never done"))
                await until(lambda: _running(channel))
                process.send(signal.SIGINT)
                await process.event("draining")
                process.send(signal.SIGINT)
                assert await process.wait() == 128 + signal.SIGINT
                running.cancel()
    finally:
        await worker.stop()


@pytest.mark.parametrize("flag", ["--listen", "--metrics-port"])
async def test_port_in_use_is_one_clear_line(flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        value = f"127.0.0.1:{port}" if flag == "--listen" else str(port)
        async with scheduler_process(f"{flag}={value}") as process:
            assert await process.wait() == 4
            assert len(process.lines) == 1
            assert process.lines[0]["reason"] == "ADDRESS_TAKEN"
            assert f"127.0.0.1:{port}" in process.lines[0]["problem"]


async def test_unknown_setting_is_one_clear_line(tmp_path: Path) -> None:
    config = tmp_path / "octavo.toml"
    config.write_text("[scheduler]\nwindwo = 3\n")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "scheduler_svc", f"--config-file={config}", stderr=asyncio.subprocess.PIPE
    )
    _, stderr = await process.communicate()
    assert process.returncode == 2
    assert "windwo: no such setting" in stderr.decode()


async def test_idle_process_uses_hardly_any_cpu() -> None:
    worker = await start_worker()
    try:
        async with scheduler_process(f"--workers={worker.address}") as process:
            await process.event("worker_up")
            started = psutil.Process(process.pid)
            assert await idle_share([started, *started.children(recursive=True)]) < 0.1
    finally:
        await worker.stop()
