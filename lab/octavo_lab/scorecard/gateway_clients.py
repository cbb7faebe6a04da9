"""Public programs that speak the OpenAI API, each run as its users run it, against a gateway.

Those of Python live in an environment of their own (`make clients`), `vllm bench serve` in ours.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from octavo_lab.scorecard.vllm_server import BENCH_SERVE

ROOT: Final = Path(__file__).parents[3]
ENVIRONMENT: Final = ROOT / "build/clients"
OUTPUT: Final = ROOT / "build/gateway-clients"
_PROGRAMS: Final = ROOT / "tests/clients"
_TIMEOUT_S: Final = 240.0


@dataclass(frozen=True, slots=True)
class Program:
    """A client, how it is run, and what its output must say beside an exit code of 0."""

    name: str
    command: Sequence[str]
    works: Callable[[str], bool] = lambda _: True
    env: dict[str, str] = field(default_factory=dict)


def programs(base: str, model: str, tokenizer: Path) -> list[Program]:
    """Return the clients for a gateway at `base`, as http://host:port; `tokenizer` is the model's folder."""
    python = str(ENVIRONMENT / "bin/python")
    body = f'{{"model": "{model}", "prompt": "One, two,", "max_tokens": 8, "ignore_eos": true'
    return [
        Program("openai", (python, str(_PROGRAMS / "openai_client.py"), f"{base}/v1", model)),
        Program("langchain-openai", (python, str(_PROGRAMS / "langchain_client.py"), f"{base}/v1", model)),
        Program(
            "curl",
            (
                *("curl", "-N", "-sS", "--fail-with-body", f"{base}/v1/completions"),
                *("-H", "content-type: application/json", "-d", f'{body}, "stream": true}}'),
            ),
            lambda said: said.count("data: {") == 8 and said.rstrip().endswith("data: [DONE]"),
        ),
        *(
            Program(
                f"vllm-bench-serve-{backend}",
                _vllm_bench(base, endpoint, backend, model, tokenizer),
                lambda said: re.search(r"Successful requests:\s+16\b", said) is not None,
            )
            for backend, endpoint in (
                ("openai", "/v1/completions"),
                ("openai-chat", "/v1/chat/completions"),
            )
        ),
        Program(
            "locust",
            (
                *(python, "-m", "locust", "-f", str(_PROGRAMS / "locustfile.py"), "--headless"),
                *("--host", base, "-u", "4", "-r", "4", "-t", "12s", "--only-summary"),
            ),
            env={"OCTAVO_MODEL": model},
        ),
        Program(
            "wrk",
            ("wrk", "-t1", "-c4", "-d8s", "--timeout", "30s", "-s", str(_PROGRAMS / "wrk.lua"), base),
            lambda said: "Non-2xx" not in said and "Socket errors" not in said and "Requests/sec" in said,
            env={"OCTAVO_MODEL": model},
        ),
        Program(
            "hey",
            (
                *("hey", "-n", "24", "-c", "4", "-t", "60", "-m", "POST", "-T", "application/json"),
                *("-d", f"{body}}}", f"{base}/v1/completions"),
            ),
            lambda said: re.search(r"\[200\]\s+24 responses", said) is not None and "Error dist" not in said,
        ),
    ]


def _vllm_bench(base: str, endpoint: str, backend: str, model: str, tokenizer: Path) -> tuple[str, ...]:
    return (
        *(*BENCH_SERVE, "--backend", backend),
        *("--base-url", base, "--endpoint", endpoint, "--model", model, "--tokenizer", str(tokenizer)),
        *("--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "16"),
        *("--num-prompts", "16", "--max-concurrency", "4", "--ignore-eos", "--seed", "1"),
    )


def fails(program: Program) -> str | None:
    """Run a client, keep its output, and return why it fails, or None."""
    if shutil.which(program.command[0]) is None:
        return f"{program.command[0]} is not installed"
    OUTPUT.mkdir(parents=True, exist_ok=True)
    log = OUTPUT / f"{program.name}.txt"
    with log.open("w") as out:
        out.write(f"$ {' '.join(program.command)}\n")
        out.flush()
        try:
            done = subprocess.run(  # noqa: S603 # as listed above
                program.command,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=_TIMEOUT_S,
                check=False,
                env={**os.environ, **program.env},
            )
        except subprocess.TimeoutExpired:
            return f"took longer than {_TIMEOUT_S:g} s"
    if done.returncode:
        return f"exit code {done.returncode}, see {log}"
    return None if program.works(log.read_text(errors="replace")) else f"see {log}"
