"""What all ports of the services have in common."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import grpc
import grpc.aio
import pytest
from octavo.service.grpc_port import GrpcPort
from octavo.service.status import abort
from octavo.v1 import common_pb2

WAIT_S = 20.0


class Message:
    """Something that tells when nobody has it any more."""


def check(message: Message) -> None:
    raise ValueError(message)


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream", "stream_stream"])
async def test_message_of_a_call_that_is_refused_is_let_go_at_once(kind: str) -> None:
    gone = asyncio.Event()

    def parse(_: bytes) -> Message:
        message = Message()
        weakref.finalize(message, gone.set)
        return message

    async def refuse(request: Any, context: Any) -> None:
        message = await context.read() if kind == "stream_stream" else request
        try:
            check(message)
        except ValueError:
            await abort(context, common_pb2.Error(code=3))

    port = GrpcPort(("Echo",), options=())
    handler = getattr(grpc, f"{kind}_rpc_method_handler")(refuse, parse)
    port.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Echo", {"Refuse": handler}),))
    address = f"127.0.0.1:{await port.start('127.0.0.1', 0)}"
    gc.disable()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            call: Any = channel.stream_stream("/Echo/Refuse")(iter([b"x"]))
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            await asyncio.wait_for(gone.wait(), WAIT_S)
    finally:
        gc.enable()
        await port.stop(0)
