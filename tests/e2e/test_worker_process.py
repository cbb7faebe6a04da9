"""The worker as a process: how it starts, what it says, and how it ends. Steps are simulated."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc.aio
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from octavo.protocol.transport import CLIENT_OPTIONS
from octavo.v1 import common_pb2, operations_pb2, worker_pb2_grpc
from octavo.v1 import worker_pb2 as pb

from tests.e2e.idleness import idle_share

WAIT_S = 90.0
SLOW = '{"step_s": 0.05}'
HANGING = '{"step_s": 1e6}'


class WorkerProcess:
    """A child process and its log."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.log: list[dict[str, Any]] = []

    async def event(self, name: str) -> dict[str, Any]:
        """Read the log on to an event; raises EOFError when it ends without it."""
        assert self.process.stderr is not None
        async with asyncio.timeout(WAIT_S):
            while line := await self.process.stderr.readline():
                self.log.append(json.loads(line))
                if self.log[-1]["event"] == name:
                    return self.log[-1]
        raise EOFError(f"no {name} in {self.log}")

    async def exit_code(self) -> int:
        async with asyncio.timeout(WAIT_S):
            await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode


@asynccontextmanager
async def started(**settings: object) -> AsyncIterator[WorkerProcess]:
    defaults = {"model": "sim", "runner": "sim", "listen": "127.0.0.1:0", "metrics_port": "none"}
    environment = {
        f"OCTAVO_WORKER_{name}".upper(): str(value) for name, value in {**defaults, **settings}.items()
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "worker_svc", stderr=asyncio.subprocess.PIPE, env={**os.environ, **environment}
    )
    try:
        yield WorkerProcess(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


@asynccontextmanager
async def attached(port: int) -> AsyncIterator[Any]:
    """Attach and start one long sequence."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CLIENT_OPTIONS) as channel:
        call = cast("Any", worker_pb2_grpc.WorkerStub(channel)).Attach()
        hello = pb.Hello(scheduler_id="s", epoch=1, protocol_version=1, window=2)
        await call.write(pb.SchedulerMessage(hello=hello))
        assert (await call.read()).welcome.last
        sampling = common_pb2.SamplingParams(seed=1, max_tokens=8000)
        admit = pb.Admit(handle=1, token_ids=[9] * 20, prompt_len=20, sampling=sampling)
        plan = pb.Plan(step=1, admit=[admit], prefill_handles=[1], prefill_tokens=[100])
        await call.write(pb.SchedulerMessage(plan=plan))
        yield call
        call.cancel()


async def test_worker_sigterm_while_idle_exits_zero() -> None:
    async with started() as worker:
        await worker.event("worker_ready")
        worker.process.send_signal(signal.SIGTERM)
        await worker.event("worker_stopped")
        assert await worker.exit_code() == 0


async def test_worker_says_its_names_and_how_its_limits_came_about() -> None:
    async with started(served_model_name="chat,gpt-4", max_num_seqs=8) as worker:
        ready = await worker.event("worker_ready")
        limits = await worker.event("worker_limits")
    assert (ready["model"], ready["aliases"]) == ("chat", ["gpt-4"])
    assert (limits["max_num_seqs"], limits["max_num_batched_tokens"]) == (8, 512)
    assert limits["reason"] == "8 sequences (set), 512 tokens a step (chosen for a CPU)"


async def test_worker_sigterm_waits_until_its_sequences_are_gone() -> None:
    async with started() as worker:
        port = (await worker.event("worker_listening"))["port"]
        await worker.event("worker_ready")
        async with attached(port) as call:
            assert (await call.read()).report.live_count == 1
            worker.process.send_signal(signal.SIGTERM)
            assert (await call.read()).draining.reason == "SIGTERM"
            await call.write(pb.SchedulerMessage(plan=pb.Plan(step=2)))
            assert (await call.read()).report.live_count == 1
            await call.write(pb.SchedulerMessage(plan=pb.Plan(step=3, release=[1])))
            assert (await call.read()).report.live_count == 0
            assert await worker.exit_code() == 0


async def test_worker_sigterm_exits_zero_when_the_grace_time_is_over() -> None:
    async with started(drain_grace_s=0.2) as worker:
        port = (await worker.event("worker_listening"))["port"]
        await worker.event("worker_ready")
        async with attached(port) as call:
            assert (await call.read()).report.live_count == 1
            worker.process.send_signal(signal.SIGTERM)
            assert (await worker.event("drain_grace_over"))["num_live"] == 1
            assert await worker.exit_code() == 0


async def test_worker_with_a_hanging_step_still_dies_of_sigterm(tmp_path: Any) -> None:
    profile = tmp_path / "hang.json"
    profile.write_text(HANGING)
    async with started(drain_grace_s=0.2, sim_profile=profile) as worker:
        port = (await worker.event("worker_listening"))["port"]
        await worker.event("worker_ready")
        async with attached(port):
            await worker.event("session_started")
            worker.process.send_signal(signal.SIGTERM)
            assert await worker.exit_code() == 0


async def test_worker_second_signal_ends_it_at_once() -> None:
    async with started(drain_grace_s=1000) as worker:
        port = (await worker.event("worker_listening"))["port"]
        await worker.event("worker_ready")
        async with attached(port) as call:
            assert (await call.read()).report.live_count == 1
            worker.process.send_signal(signal.SIGTERM)
            await worker.event("worker_draining")
            worker.process.send_signal(signal.SIGTERM)
            assert await worker.exit_code() == 128 + signal.SIGTERM


@pytest.mark.parametrize("setting", ["listen", "metrics_port"])
async def test_worker_port_in_use_is_one_clear_line_and_an_exit_code(setting: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        value = f"127.0.0.1:{port}" if setting == "listen" else port
        async with started(**{setting: value}) as worker:
            failure = await worker.event("worker_cannot_start")
            assert await worker.exit_code() == 4
    assert failure["reason"] == "ADDRESS_TAKEN"
    assert failure["problem"] == f"cannot listen on 127.0.0.1:{port}: Address already in use"


async def test_worker_settings_that_cannot_work_exit_with_the_arithmetic() -> None:
    async with started(num_blocks=4, max_model_len=1000) as worker:
        failure = await worker.event("worker_cannot_start")
        assert await worker.exit_code() == 2
    assert failure["problem"].startswith("max_model_len 1000 needs 63 blocks of 16 tokens, the pool has 4")


async def test_worker_model_that_is_missing_exits_naming_it() -> None:
    async with started(model="/no/such/folder", runner="torch") as worker:
        failure = await worker.event("worker_cannot_start")
        assert await worker.exit_code() == 3
    assert failure["reason"] == "MODEL_LOAD"
    assert failure["problem"].startswith("/no/such/folder: no such file or folder")


async def test_worker_flag_that_is_unknown_exits_with_the_usage() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "worker_svc", "--no-such-flag", stderr=asyncio.subprocess.PIPE
    )
    _, said = await process.communicate()
    assert process.returncode == 2
    assert "--no-such-flag" in said.decode()


async def test_worker_that_is_told_to_crash_dies_without_a_word() -> None:
    async with started(enable_faults=True) as worker:
        port = (await worker.event("worker_listening"))["port"]
        await worker.event("worker_ready")
        async with attached(port) as call:
            assert (await call.read()).report.live_count == 1
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                fault = operations_pb2.Fault(kind=operations_pb2.FAULT_KIND_CRASH)
                stub = cast("Any", worker_pb2_grpc.WorkerStub(channel))
                await stub.InjectFaults(pb.InjectFaultsRequest(faults=[fault]))
            await call.write(pb.SchedulerMessage(plan=pb.Plan(step=2)))
            assert await worker.exit_code() == -signal.SIGKILL


async def test_worker_idle_uses_hardly_any_cpu() -> None:
    async with started(metrics_port=0) as worker:
        port = (await worker.event("worker_listening"))["port"]
        await worker.event("worker_ready")
        async with attached(port) as call:
            assert (await call.read()).report.live_count == 1
            assert await idle_share([psutil.Process(worker.process.pid)]) < 0.1


async def test_worker_logs_never_hold_what_a_request_says() -> None:
    async with started(log_level="debug") as worker:
        port = (await worker.event("worker_listening"))["port"]
        await worker.event("worker_ready")
        async with attached(port) as call:
            assert (await call.read()).report.live_count == 1
        await worker.event("session_ended")
    assert "session_started" in [event["event"] for event in worker.log]
    assert not [event for event in worker.log if "9, 9" in json.dumps(event)]


async def test_step_that_never_ends_takes_the_worker_out_of_service_and_ends_it(tmp_path: Any) -> None:
    profile = tmp_path / "hang.json"
    profile.write_text(HANGING)
    async with started(sim_profile=profile, step_limit_s=0.2, first_step_limit_s=0.5) as worker:
        port = (await worker.event("worker_listening"))["port"]
        await worker.event("worker_ready")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CLIENT_OPTIONS) as channel:
            watch = cast("Any", health_pb2_grpc.HealthStub(channel)).Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            async with attached(port) as call:
                assert (await worker.event("step_stuck"))["allowed_s"] == 0.5
                assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
                with pytest.raises(grpc.aio.AioRpcError):
                    await call.read()
            assert await worker.exit_code() == 1
