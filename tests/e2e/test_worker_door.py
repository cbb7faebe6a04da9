"""The worker's port to a stranger: it answers health checks, and tells nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from octavo.service.private import write_private
from octavo.service.worker_secret import WorkerSecret
from octavo.stack import Stack, StackConfig
from octavo.v1 import worker_pb2 as pb

from tests.doors import methods_of
from tests.e2e.conftest import SIM
from tests.e2e.scheduler_stack import error_of
from tests.e2e.worker_stack import Worker, running
from worker_svc.api.door import Door

SECRET = "a-secret-of-the-tests"  # noqa: S105
KNOWN = (("authorization", f"Bearer {SECRET}"),)
STRANGERS: dict[str, tuple[tuple[str, str], ...]] = {
    "nothing": (),
    "wrong": (("authorization", "Bearer a-secret-of-nobody"),),
    "empty": (("authorization", "Bearer "),),
    "other scheme": (("authorization", f"Basic {SECRET}"),),
    "two": (*KNOWN, *KNOWN),
}


@pytest.fixture
async def closed_worker(tmp_path: Path) -> AsyncIterator[Worker]:
    path = tmp_path / "secret"
    write_private(path, SECRET)
    async with running(door=Door(WorkerSecret(path))) as worker:
        yield worker


async def test_stranger_is_refused_by_every_method_but_health(closed_worker: Worker) -> None:
    async with grpc.aio.insecure_channel(closed_worker.address) as channel:
        methods = await methods_of(channel, KNOWN)
        assert len(methods) >= 13
        for method in methods:
            for who, metadata in STRANGERS.items():
                call: Any = channel.stream_stream(method)(metadata=metadata, timeout=60)
                if method.startswith("/grpc.health.v1.Health/"):
                    call.cancel()
                    continue
                # It sends nothing at all, and is refused all the same.
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED, (method, who)
                assert await call.details() == "this port wants the secret of its schedulers"


async def test_stranger_cannot_attach_in_the_name_of_the_scheduler(closed_worker: Worker) -> None:
    async with closed_worker.attach("one", epoch=5, metadata=KNOWN) as scheduler:
        async with grpc.aio.insecure_channel(closed_worker.address) as channel:
            hello = pb.Hello(scheduler_id="one", epoch=2**64 - 1, protocol_version=1, window=2)
            # Not written by hand: the refusal comes at the headers, perhaps before.
            said = iter((pb.SchedulerMessage(hello=hello).SerializeToString(),))
            call: Any = channel.stream_stream("/octavo.v1.Worker/Attach")(said)
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        assert (await scheduler.run()).step == 1


def test_stack_makes_a_secret_that_only_its_own_processes_have(tmp_path: Path) -> None:
    folder = tmp_path / "stack"
    with Stack(StackConfig(model="sim", worker_args=SIM, folder=folder)) as stack:
        stack.wait_ready(120)
        with grpc.insecure_channel(stack.workers[0].address) as channel:
            describe = channel.unary_unary("/octavo.v1.Worker/Describe")
            with pytest.raises(grpc.RpcError) as caught:
                describe(b"", timeout=60)
            assert error_of(caught.value).reason == "NO_WORKER_SECRET"  # type: ignore[arg-type]
            assert describe(b"", timeout=60, metadata=(("authorization", f"Bearer {stack.worker_secret}"),))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {file.name: file.stat().st_mode & 0o777 for file in folder.iterdir()} == {
        "worker-secret": 0o600,
        "worker-0.log": 0o600,
        "scheduler.log": 0o600,
    }
