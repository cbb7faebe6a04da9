"""Programs of others call tools, want objects, and use the newer APIs: `make clients` installs them."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.agent_stack import agent_gateway
from tests.e2e.test_up import read_until_up, up

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build/clients/bin/python"
MODULES = ROOT / "build/clients-node/node_modules"
WAIT_S = 300
INSTALLED = bool(os.environ.get("OCTAVO_REQUIRE_CLIENTS")) or (
    PYTHON.exists() and MODULES.is_dir() and shutil.which("node") is not None
)
CHECKS = {
    "openai_tools_client.py": 9,
    "anthropic_client.py": 6,
    "instructor_client.py": 3,
    "pydantic_ai_client.py": 6,
    "agents_client.py": 4,
    "langchain_tools_client.py": 4,
    "ai_sdk_client.mjs": 5,
}
"""Programs, and how many things each tries with any model."""
WITH_AUTO = {"instructor_client.py": 0}
"""How many more with a model that calls a tool when it sees fit: one, but for these."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not INSTALLED, reason="needs clients and Node: make clients"),
]


async def said(program: str, *arguments: str) -> str:
    """What a program says."""
    runs = "node" if program.endswith(".mjs") else str(PYTHON)
    command = (runs, str(ROOT / "tests/clients" / program), *arguments)
    env = {**os.environ, "NODE_PATH": str(MODULES.parent)}
    process = await asyncio.create_subprocess_exec(
        *command, stdout=-1, stderr=asyncio.subprocess.STDOUT, env=env
    )
    try:
        async with asyncio.timeout(WAIT_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return output.decode()


@pytest.mark.parametrize("program", CHECKS)
async def test_program_of_others_works_unmodified(program: str) -> None:
    async with agent_gateway() as base:
        text = await said(program, base, "m", "--auto")

    checks = CHECKS[program] + WITH_AUTO.get(program, 1)
    assert text.count("ok      ") == checks, text
    assert re.search(rf"\b{checks} of {checks} work", text), text


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the API of a whole stack with the demo model."""
    ports = ("--port", "0", "--worker-port", "0", "--gateway-port", "0")
    with up(tmp_path_factory.mktemp("demo"), *ports) as process:
        address = re.search(r"gateway +(http\S+)", read_until_up(process))
        assert address is not None
        yield address[1]


@pytest.mark.model
@pytest.mark.parametrize("program", CHECKS)
async def test_program_of_others_works_with_the_demo_model(program: str, demo: str) -> None:
    """It is too small to call a tool when it should, but grammars make it."""
    text = await said(program, demo, "SmolLM2-135M-Instruct")

    checks = CHECKS[program]
    assert text.count("ok      ") == checks, text
    assert re.search(rf"\b{checks} of {checks} work", text), text
