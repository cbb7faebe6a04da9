"""A worker's server: what it lists of itself, and what it answers while the model loads."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from octavo.v1 import worker_pb2 as pb
from octavo.v1 import worker_pb2_grpc

from tests.e2e.worker_stack import (
    Worker,
    refusal_of,
)
from worker_svc.api import server as server_module
from worker_svc.api.server import Business, WorkerServer, WorkerService


async def test_reflection_lists_what_is_served(worker: Worker) -> None:
    async with grpc.aio.insecure_channel(worker.address) as channel:
        call: Any = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        answer = await call.read()
    assert {service.name for service in answer.list_services_response.service} == {
        "octavo.v1.Worker",
        "grpc.health.v1.Health",
        "grpc.channelz.v1.Channelz",
        "grpc.reflection.v1alpha.ServerReflection",
    }


async def test_channelz_knows_the_server(worker: Worker) -> None:
    async with grpc.aio.insecure_channel(worker.address) as channel:
        call: Any = channelz_pb2_grpc.ChannelzStub(channel).GetServers(channelz_pb2.GetServersRequest())
        answer = await call
    assert len(answer.server) >= 1


async def test_describe_of_a_worker_that_loads_is_answered_once_it_has() -> None:
    service = WorkerService()
    server = WorkerServer(service)
    port = await server.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        call: Any = worker_pb2_grpc.WorkerStub(channel).Describe(pb.DescribeRequest())
        await health.Check(health_pb2.HealthCheckRequest())
        assert not call.done()
        service.open(Business(pb.WorkerDescription(worker_id="w"), sessions=None, faults=None))  # type: ignore[arg-type]
        assert (await call).worker_id == "w"
    await server.stop(0)


async def test_worker_that_ends_while_it_loads_lets_nobody_wait() -> None:
    service = WorkerService()
    server = WorkerServer(service)
    port = await server.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: Any = worker_pb2_grpc.WorkerStub(channel).Describe(pb.DescribeRequest())
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        service.close()
        with pytest.raises(grpc.aio.AioRpcError):
            await call
        assert (await refusal_of(call))[:2] == (grpc.StatusCode.UNAVAILABLE, "LOADING")
    await server.stop(0)


async def test_worker_that_loads_answers_unavailable_and_not_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "LOADING_WAIT_S", 0.0)
    server = WorkerServer(WorkerService())
    port = await server.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service="octavo.v1.Worker"))
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        call: Any = worker_pb2_grpc.WorkerStub(channel).Describe(pb.DescribeRequest())
        with pytest.raises(grpc.aio.AioRpcError):
            await call
        assert (await refusal_of(call))[:2] == (grpc.StatusCode.UNAVAILABLE, "LOADING")
    await server.stop(0)
