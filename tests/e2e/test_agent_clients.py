"""Programs that nobody here wrote call tools, want objects, and use the newer APIs: `make clients` installs them."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.e2e.agent_stack import agent_gateway

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build/clients/bin/python"
MODULES = ROOT / "build/clients-node/node_modules"
WAIT_S = 120
NEEDED = bool(os.environ.get("OCTAVO_REQUIRE_CLIENTS"))

pytestmark = pytest.mark.slow


async def said(*command: str) -> str:
    """What a program says that works."""
    env = {**os.environ, "NODE_PATH": str(MODULES.parent)}
    async with agent_gateway() as base:
        process = await asyncio.create_subprocess_exec(
            *command, base, "m", "--auto", stdout=-1, stderr=asyncio.subprocess.STDOUT, env=env
        )
        try:
            async with asyncio.timeout(WAIT_S):
                output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    text = output.decode()
    assert process.returncode == 0, text
    return text


@pytest.mark.parametrize(
    ("program", "checks"),
    [
        ("openai_tools", 10),
        ("anthropic", 7),
        ("instructor", 3),
        ("pydantic_ai", 7),
        ("agents", 5),
        ("langchain_tools", 5),
    ],
)
@pytest.mark.skipif(not (NEEDED or PYTHON.exists()), reason="needs clients: make clients installs them")
async def test_program_of_others_works_unmodified(program: str, checks: int) -> None:
    text = await said(str(PYTHON), str(ROOT / f"tests/clients/{program}_client.py"))

    assert re.search(rf"\b{checks} of {checks} work", text), text
    assert text.count("ok      ") == checks


@pytest.mark.skipif(
    not (NEEDED or (shutil.which("node") and MODULES.is_dir())), reason="needs Node: make clients installs it"
)
async def test_ai_sdk_works_unmodified() -> None:
    text = await said("node", str(ROOT / "tests/clients/ai_sdk_client.mjs"))

    assert "ai-sdk: 6 of 6 work" in text, text
