"""What we use of other libraries that they do not promise: a new version that lacks it fails here first."""

from __future__ import annotations

import ast
import asyncio
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import uvicorn
from octavo.gateway.connections import Connections, Protocol, Timeouts

ROOT = Path(__file__).parents[2]
KNOWN = {
    "torch.ops.mkldnn._reorder_linear_weight",
    "torch.ops.mkldnn._linear_pointwise",
    "torch.ops.mkldnn._is_mkldnn_bf16_supported",
}
"""Private names of torch that have a test here. Those of vLLM have theirs beside its runner."""


def test_every_private_name_of_torch_and_uvicorn_that_is_used_is_tested_here() -> None:
    used = set[str]()
    for room in ("client/octavo", "scheduler_svc", "worker_svc"):
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
                parts = name.split(".")
                if parts[0] in ("torch", "uvicorn") and parts[-1].startswith("_"):
                    used.add(name)
    # vLLM's operators are in _C: its runner has tests of them.
    assert used - {"torch.__version__", "torch.ops._C"} == KNOWN


def test_torch_packs_a_weight_and_multiplies_by_it() -> None:
    weight, rows = torch.randn(8, 16), torch.randn(3, 16)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 3)
    multiply = torch.ops.mkldnn._linear_pointwise
    assert torch.allclose(multiply(rows, packed, None, "none", [], ""), rows @ weight.T, atol=1e-5)
    residual = torch.randn(3, 8)
    added = multiply.binary(rows, residual, packed, None, "add")
    assert torch.allclose(added, rows @ weight.T + residual, atol=1e-5)


def test_torch_says_whether_bfloat16_is_native() -> None:
    assert torch.ops.mkldnn._is_mkldnn_bf16_supported() in (True, False)


class Transport:
    """As much of a transport as a protocol asks of one."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = False

    def get_extra_info(self, _: str, default: object = None) -> object:
        return default

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def write_eof(self) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def test_uvicorn_lets_a_protocol_of_ours_take_the_place_of_its_own() -> None:
    answered = asyncio.Event()

    async def app(scope: Any, _: Any, send: Any) -> None:
        assert scope["type"] == "http"
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})
        answered.set()

    connections = Connections(4, Timeouts(10, 10, 10))
    config = uvicorn.Config(
        app, http=cast("Any", partial(Protocol, connections)), ws="none", lifespan="off", log_config=None
    )
    config.load()
    assert config.ssl is None
    server = uvicorn.Server(config)
    make = cast("Any", config.http_protocol_class)
    protocol = make(config=config, server_state=server.server_state, app_state={})
    transport = Transport()
    protocol.connection_made(transport)
    # What is read and replaced of it.
    for name in ("cycle", "pipeline", "flow", "transport", "app", "loop", "client", "timeout_keep_alive"):
        assert hasattr(protocol, name), name
    protocol.data_received(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n")
    for name in ("parser", "scope", "timeout_keep_alive_task"):
        assert hasattr(protocol, name), name
    for name in ("keep_alive", "disconnected", "message_event", "response_started", "response_complete"):
        assert hasattr(protocol.cycle, name), name
    await answered.wait()
    assert protocol.cycle.response_complete
    assert transport.written.startswith(b"HTTP/1.1 204")
    protocol.connection_lost(None)
