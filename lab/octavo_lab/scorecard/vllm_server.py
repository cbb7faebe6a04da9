"""`vllm serve` with the demo model, for measures that compare with it."""

# ruff: noqa: PLC0415 - torch and vLLM take seconds to import, and need not be installed

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
from octavo.stack import free_port

MODEL: Final = "demo"
"""Name under which the model is served."""
READY_S: Final = 1200.0
_BENCH_SERVE: Final = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
BENCH_SERVE: Final = (sys.executable, "-c", _BENCH_SERVE)
"""What `vllm bench serve` runs; the command itself does not start from the CPU build's package."""


@dataclass(frozen=True, slots=True)
class VllmServer:
    """A server that is up."""

    base_url: str
    model_folder: Path
    """The model with its tokenizer, as Hugging Face lays them out."""
    environment: dict[str, str]
    """In which it runs, and in which vLLM's other commands should."""


@asynccontextmanager
async def vllm_serve(*arguments: str, dtype: str = "auto") -> AsyncIterator[VllmServer]:
    """Run `vllm serve` in the environment that our worker makes for itself; arguments come last.

    Raises:
        RuntimeError: it does not come up; with the end of what it said.
    """
    port = free_port()
    base_url = f"http://127.0.0.1:{port}"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="octavo-vllm-serve-")))
        model, dtype = model_with_tokenizer(folder, dtype)
        environment = _environment()
        flags = (
            *("--host", "127.0.0.1", "--port", str(port), "--dtype", dtype),
            *("--gpu-memory-utilization", "0.25", "--disable-uvicorn-access-log"),
            *("--served-model-name", MODEL),
        )
        log = folder / "log"
        server = _start(log, environment, [str(model), *flags, *arguments])
        stack.callback(_end, server)
        await _until_up(server, base_url, log)
        yield VllmServer(base_url, model, environment)


def _environment() -> dict[str, str]:
    from worker_svc.runner.vllm import installed, placement

    cores = len(os.sched_getaffinity(0))
    environment = {
        **os.environ,
        **(installed.compile_environment() if installed.is_cpu_build() else {}),
        **placement.environment(os.environ, cores, 1, None),
    }
    # vLLM binds its threads itself, to both cores if told to reserve none.
    environment.pop("VLLM_CPU_OMP_THREADS_BIND", None)
    environment["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"
    return environment


def _start(log: Path, environment: dict[str, str], arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    # What `vllm serve` runs; the command itself does not start from the CPU build's package.
    model, *flags = arguments
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *flags]
    with log.open("wb") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=file)  # noqa: S603 - fixed


def model_with_tokenizer(folder: Path, wanted_dtype: str) -> tuple[Path, str]:
    """Return the demo model's folder as vLLM serves it, and the type of its weights."""
    from worker_svc.models.resolve import resolve
    from worker_svc.runner.torch.gguf_file import open_gguf
    from worker_svc.runner.vllm.gguf_folder import hf_folder_of
    from worker_svc.runner.vllm.settings import chosen_dtype

    model = resolve("demo", lambda what, fraction: None)
    dtype = chosen_dtype(wanted_dtype, dequantized=True)
    target = folder / "model"
    target.mkdir()
    for file in hf_folder_of(model, dtype, lambda what, fraction: None).iterdir():
        (target / file.name).symlink_to(file)
    text = open_gguf(model.path).text
    for name, content in text.tokenizer_files.items():
        (target / name).write_bytes(content)
    # Without it vLLM knows no end of sequence, and takes each for a stop token that was asked for.
    special = {"tokenizer_class": "PreTrainedTokenizerFast", **text.special_tokens}
    (target / "tokenizer_config.json").write_text(json.dumps(special))
    if text.chat_template is not None:
        (target / "chat_template.jinja").write_text(text.chat_template)
    return target, dtype


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a server and what it started."""
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in children:
        if child.is_running():
            child.kill()


async def _until_up(server: subprocess.Popen[bytes], base_url: str, log: Path) -> None:
    import aiohttp

    give_up_at = time.monotonic() + READY_S
    async with aiohttp.ClientSession() as session:
        while server.poll() is None and time.monotonic() < give_up_at:
            try:
                async with session.get(f"{base_url}/health") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                pass
            await asyncio.sleep(0.5)
    said = await asyncio.to_thread(log.read_text, errors="replace")
    raise RuntimeError(f"vllm serve did not come up: {said[-500:]}")
