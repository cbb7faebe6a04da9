"""What a port offers, as it says itself: so that a method that is added is tested, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc.aio
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

Metadata = Sequence[tuple[str, str]]


async def methods_of(channel: grpc.aio.Channel, metadata: Metadata = ()) -> list[str]:
    """Return the methods of all services of a port, as `/package.Service/Method`, by reflection."""
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(metadata=metadata, timeout=60)
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    names = [service.name for service in (await call.read()).list_services_response.service]
    methods = []
    for name in names:
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=name))
        answer = await call.read()
        for raw in answer.file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(raw)
            methods += [
                f"/{name}/{method.name}"
                for service in file.service
                if f"{file.package}.{service.name}" == name
                for method in service.method
            ]
    call.cancel()
    return methods
