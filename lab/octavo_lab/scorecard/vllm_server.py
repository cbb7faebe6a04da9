"""`vllm serve` with the demo model, for measures that compare with it."""

# ruff: noqa: PLC0415 - vLLM takes seconds to import, and need not be installed

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp
import psutil
from octavo.sampling import OF_MODEL
from octavo.stack import free_port

from octavo_lab.scorecard.demo_model import quiet
from octavo_lab.scorecard.system import READY_S

MODEL: Final = "demo"
"""Name under which the model is served."""
_BENCH_SERVE: Final = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
BENCH_SERVE: Final = (sys.executable, "-c", _BENCH_SERVE)
"""What `vllm bench serve` runs; the command itself does not start from the CPU build's package."""


def limits(max_num_seqs: int, *, serve: bool = False) -> tuple[str, ...]:
    """Return flags that give Octavo's worker and `vllm serve` the same room."""
    # vLLM keeps one block for itself.
    blocks = "--block-size 32 --num-gpu-blocks-override 1025" if serve else "--num-blocks 1024"
    room = f"--max-num-seqs {max_num_seqs} --max-num-batched-tokens 512 --max-model-len 1024"
    return tuple(f"{room} {blocks}".split())


def enter() -> None:
    """Start this process anew in the environment that a worker with vLLM would have."""
    from worker_svc.runner.vllm import installed, placement

    placement.enter(ranks=1, num_threads=None)
    installed.prepare()


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
    with tempfile.TemporaryDirectory(prefix="octavo-vllm-serve-") as name:
        model, dtype = model_with_tokenizer(Path(name), dtype)
        server = VllmServer(f"http://127.0.0.1:{port}", model, _environment())
        flags = f"--host 127.0.0.1 --port {port} --dtype {dtype} --served-model-name {MODEL}"
        flags += " --gpu-memory-utilization 0.25 --disable-uvicorn-access-log"
        # What `vllm serve` runs; the command itself does not start from the CPU build's package.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += (*flags.split(), *arguments)
        log = Path(name) / "log"
        with log.open("wb") as file:
            process = psutil.Popen(command, env=server.environment, stdout=file, stderr=file)
        try:
            if not await _comes_up(process, server.base_url):
                said = await asyncio.to_thread(log.read_text, errors="replace")
                raise RuntimeError(f"vllm serve did not come up: {said[-500:]}")
            yield server
        finally:
            with suppress(psutil.NoSuchProcess):
                family = [process, *process.children(recursive=True)]
                process.terminate()
                for one in psutil.wait_procs(family, 20)[1]:
                    one.kill()
            process.wait()


def _environment() -> dict[str, str]:
    from worker_svc.runner.vllm import installed, placement

    compiling = installed.compile_environment() if installed.is_cpu_build() else {}
    ours = placement.environment(os.environ, len(os.sched_getaffinity(0)), 1, None)
    # vLLM binds its threads itself, to both cores if told to reserve none.
    environment = {**os.environ, **compiling, **ours, "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
    environment.pop("VLLM_CPU_OMP_THREADS_BIND", None)
    return environment


def model_with_tokenizer(folder: Path, wanted_dtype: str) -> tuple[Path, str]:
    """Return the demo model's folder as vLLM serves it, and the type of its weights."""
    from worker_svc.models.resolve import resolve
    from worker_svc.runner.torch.gguf_file import open_gguf
    from worker_svc.runner.vllm.gguf_folder import hf_folder_of
    from worker_svc.runner.vllm.settings import chosen_dtype

    model = resolve("demo", quiet)
    dtype = chosen_dtype(wanted_dtype, dequantized=True)
    target = folder / "model"
    target.mkdir()
    for file in hf_folder_of(model, dtype, quiet).iterdir():
        (target / file.name).symlink_to(file)
    text = open_gguf(model.path).text
    for name, content in text.tokenizer_files.items():
        (target / name).write_bytes(content)
    # Without it vLLM knows no end of sequence, and takes each for a stop token that was asked for.
    special = {"tokenizer_class": "PreTrainedTokenizerFast", **text.special_tokens}
    (target / "tokenizer_config.json").write_text(json.dumps(special))
    if text.chat_template is not None:
        (target / "chat_template.jinja").write_text(text.chat_template)
    defaults = {name: getattr(text.generation_defaults, name) for name in OF_MODEL}
    (target / "generation_config.json").write_text(json.dumps(defaults))
    return target, dtype


async def _comes_up(process: psutil.Popen, base_url: str) -> bool:
    give_up_at = time.monotonic() + READY_S
    async with aiohttp.ClientSession() as session:
        while process.poll() is None and time.monotonic() < give_up_at:
            with suppress(aiohttp.ClientConnectionError):
                async with session.get(f"{base_url}/health") as answer:
                    if answer.status == 200:
                        return True
            await asyncio.sleep(0.5)
    return False
