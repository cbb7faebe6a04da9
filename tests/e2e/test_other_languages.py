"""The examples in Node, against real processes: what docs/resuming.md promises to any client."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from octavo import AsyncClient
from octavo.v1 import operations_pb2, operations_pb2_grpc

from tests.e2e.scheduler_stack import WAIT_S, until
from tests.e2e.test_failing_logs import free_port

ROOT = Path(__file__).parents[2]
MODULES = ROOT / "build" / "node" / "node_modules"
PROMPT, SEED, CHOICES, TOKENS = "Once upon a time", 2**63 + 12345, 2, 256
NEEDED = not os.environ.get("OCTAVO_REQUIRE_NODE")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        NEEDED and not (shutil.which("node") and MODULES.is_dir()), reason="needs Node: make node installs it"
    ),
]


@asynccontextmanager
async def running(*command: str, **options: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(*command, **options)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def service(module: str, *flags: str) -> Any:
    return running(
        sys.executable, "-m", module, "--metrics-port=0", *flags, stderr=asyncio.subprocess.DEVNULL
    )


def node(endpoints: list[str]) -> Any:
    command = ["node", str(ROOT / "examples/node/resuming.js"), str(ROOT / "protos"), ",".join(endpoints)]
    return running(
        *command,
        PROMPT,
        str(CHOICES),
        str(SEED),
        env={**os.environ, "NODE_PATH": str(MODULES)},
        stdout=asyncio.subprocess.PIPE,
    )


async def has_a_worker(endpoint: str) -> bool:
    async with grpc.aio.insecure_channel(endpoint) as channel:
        stub: Any = operations_pb2_grpc.OperationsStub(channel)
        request = operations_pb2.GetStatusRequest()
        response = await stub.GetStatus(request, wait_for_ready=True, timeout=WAIT_S)
        return any(worker.state == "ready" for worker in response.status.workers)


async def lines_of(client: asyncio.subprocess.Process) -> AsyncIterator[dict[str, Any]]:
    assert client.stdout is not None
    async with asyncio.timeout(WAIT_S):
        async for line in client.stdout:
            yield json.loads(line)
        assert await client.wait() == 0


async def undisturbed(endpoint: str) -> list[str]:
    """What the SDK gets when nothing happens."""
    async with AsyncClient(endpoint) as client:
        result = await client.generate(
            PROMPT, n=CHOICES, seed=SEED, max_tokens=TOKENS, temperature=0.7, ignore_eos=True
        )
    return [choice.text for choice in result.choices]


async def test_client_in_node_outlives_two_schedulers_and_has_the_text_of_an_undisturbed_one() -> None:
    """Each time in the middle of its stream its scheduler is killed; the other one takes the worker."""
    port = free_port()
    endpoints = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    flags = [(f"--listen={endpoint}", f"--workers=127.0.0.1:{port}") for endpoint in endpoints]
    async with AsyncExitStack() as stack:
        worker = f"--listen=127.0.0.1:{port}", "--runner=sim", "--sim-speed=0.3"
        await stack.enter_async_context(service("worker_svc", *worker))
        first = await stack.enter_async_context(service("scheduler_svc", *flags[0]))
        await until(lambda: has_a_worker(endpoints[0]))
        second = await stack.enter_async_context(service("scheduler_svc", *flags[1]))
        wanted = await undisturbed(endpoints[0])
        assert len(set(wanted)) == CHOICES

        client = await stack.enter_async_context(node(endpoints))
        pieces, texts, attempts = 0, [""] * CHOICES, 0
        async for line in lines_of(client):
            if "texts" in line:
                assert line["texts"] == texts
                attempts = line["attempts"]
                continue
            pieces += 1
            texts[line["choice"]] += line["text"]
            if pieces == 100:
                first.kill()
                await first.wait()
                await stack.enter_async_context(service("scheduler_svc", *flags[0]))
            if pieces == 250:
                second.kill()
        assert texts == wanted
        assert attempts >= 3


async def test_client_in_node_tells_what_is_wrong_with_a_request_and_does_not_send_it_again() -> None:
    port, endpoint = free_port(), f"127.0.0.1:{free_port()}"
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(
            service("worker_svc", f"--listen=127.0.0.1:{port}", "--runner=sim", "--max-model-len=64")
        )
        flags = f"--listen={endpoint}", f"--workers=127.0.0.1:{port}"
        await stack.enter_async_context(service("scheduler_svc", *flags))
        await until(lambda: has_a_worker(endpoint))
        command = ["node", str(ROOT / "examples/node/resuming.js"), str(ROOT / "protos"), endpoint, PROMPT]
        client = await stack.enter_async_context(
            running(*command, env={**os.environ, "NODE_PATH": str(MODULES)}, stderr=asyncio.subprocess.PIPE)
        )
        async with asyncio.timeout(WAIT_S):
            _, error = await client.communicate()
        assert client.returncode == 1
        assert error.startswith(b"INVALID_ARGUMENT: sampling.max_tokens: must be at most")
