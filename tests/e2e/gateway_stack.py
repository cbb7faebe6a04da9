"""A gateway on a real port, in this process, in front of a scheduler and a worker that repeats its prompt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import httpx
import uvicorn
from octavo import AsyncClient
from octavo.gateway.app import create_app
from octavo.gateway.config import GatewaySettings
from octavo.gateway.main import server_config

from tests.e2e.scheduler_stack import WAIT_S, Stack, Worker, one_worker, until


@dataclass
class Served:
    """What a test speaks to."""

    http: httpx.AsyncClient
    stack: Stack
    worker: Worker
    port: int

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def complete(self, **body: Any) -> Any:
        answer = await self.post("/v1/completions", **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def chat(self, **body: Any) -> Any:
        answer = await self.post("/v1/chat/completions", **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def metric(self, name: str, **labels: str) -> float:
        """The value of a sample that /metrics shows; 0 when it is not there."""
        pairs = ",".join(f'{key}="{value}"' for key, value in labels.items())
        wanted = f"{name}{{{pairs}}}" if pairs else name
        for line in (await self.http.get("/metrics")).text.splitlines():
            if line.startswith(f"{wanted} "):
                return float(line.rpartition(" ")[2])
        return 0.0


@asynccontextmanager
async def listening(
    client: AsyncClient | None = None, lifespan: Literal["on", "off"] = "on", **flags: Any
) -> AsyncIterator[int]:
    """Run a gateway; yields its port."""
    settings = GatewaySettings.load({"listen": "127.0.0.1:0", "drain_grace_s": 1, **flags})
    config = server_config(create_app(settings, client), settings)
    config.port, config.lifespan = 0, lifespan
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    ticking = asyncio.create_task(server.main_loop())
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await ticking
        await server.shutdown()


@asynccontextmanager
async def gateway(endpoint: str, **flags: Any) -> AsyncIterator[tuple[httpx.AsyncClient, int]]:
    """Run a gateway for a scheduler."""
    async with (
        listening(endpoint=endpoint, **flags) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S) as http,
    ):
        yield http, port


@asynccontextmanager
async def served(
    worker_flags: dict[str, Any] | None = None, gateway_flags: dict[str, Any] | None = None, **flags: Any
) -> AsyncIterator[Served]:
    """Run a whole stack."""
    async with one_worker(worker_flags, **flags) as (stack, worker):
        async with gateway(f"127.0.0.1:{stack.port}", **(gateway_flags or {})) as (http, port):
            yield Served(http, stack, worker, port)
        await until(worker.is_empty)
