"""Public programs that speak the OpenAI API, each run as its users run it, against a gateway.

Those of Python live in an environment of their own (`make clients`), `vllm bench serve` in ours.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from octavo_lab.scorecard.vllm_server import BENCH_SERVE

ROOT: Final = Path(__file__).parents[3]
BIN: Final = ROOT / "build/clients/bin"
OUTPUT: Final = ROOT / "build/gateway-clients"
_PROGRAMS: Final = ROOT / "tests/clients"


@dataclass(frozen=True, slots=True)
class Program:
    """A client, how it is run, and what its output must have and not have beside an exit code of 0."""

    name: str
    command: Sequence[str]
    says: str = ""
    """A regular expression."""
    never_says: str = "$^"
    env: Mapping[str, str] = field(default_factory=dict)

    def run(self, timeout_s: float) -> tuple[int, str]:
        """Run it and keep its output; return the exit code and what it said.

        Raises:
            RuntimeError: it is not installed, or takes too long.
        """
        if shutil.which(self.command[0]) is None:
            raise RuntimeError(f"{self.command[0]} is not installed: make clients")
        OUTPUT.mkdir(parents=True, exist_ok=True)
        log = OUTPUT / f"{self.name}.txt"
        with log.open("w") as out:
            out.write(f"$ {' '.join(self.command)}\n")
            out.flush()
            try:
                done = subprocess.run(  # noqa: S603 # as listed below
                    self.command,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    timeout=timeout_s,
                    check=False,
                    env={**os.environ, **self.env},
                )
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"took longer than {timeout_s:g} s") from None
        return done.returncode, log.read_text(errors="replace")

    def fails(self) -> str | None:
        """Run it; return why it fails, or None."""
        try:
            code, said = self.run(240.0)
        except RuntimeError as error:
            return str(error)
        if code:
            return f"exit code {code}, see {OUTPUT}"
        works = re.search(self.says, said) and not re.search(self.never_says, said)
        return None if works else f"see {OUTPUT}"


def programs(base: str, model: str, tokenizer: Path) -> Iterator[Program]:
    """Yield the clients for a gateway at `base`, as http://host:port; `tokenizer` is the model's folder."""
    python, env = str(BIN / "python"), {"OCTAVO_MODEL": model}
    body = f'{{"model": "{model}", "prompt": "One, two,", "max_tokens": 8, "ignore_eos": true'
    yield Program("openai", (python, str(_PROGRAMS / "openai_client.py"), f"{base}/v1", model))
    yield Program("langchain-openai", (python, str(_PROGRAMS / "langchain_client.py"), f"{base}/v1", model))
    curl = ("curl", "-N", "-sS", "--fail-with-body", f"{base}/v1/completions")
    json_body = ("-H", "content-type: application/json", "-d", f'{body}, "stream": true}}')
    yield Program("curl", (*curl, *json_body), r"\A\$ .*\n(data: \{.*\n\n){8}data: \[DONE\]\s*\Z")
    for backend, endpoint in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
        bench = (
            *(*BENCH_SERVE, "--backend", backend, "--base-url", base, "--endpoint", endpoint),
            *("--model", model, "--tokenizer", str(tokenizer), "--dataset-name", "random"),
            *("--random-input-len", "64", "--random-output-len", "16", "--num-prompts", "16"),
            *("--max-concurrency", "4", "--ignore-eos", "--seed", "1"),
        )
        yield Program(f"vllm-bench-serve-{backend}", bench, r"Successful requests:\s+16\b")
    locust = (python, "-m", "locust", "-f", str(_PROGRAMS / "locustfile.py"), "--headless", "--host", base)
    yield Program("locust", (*locust, "-u", "4", "-r", "4", "-t", "12s", "--only-summary"), env=env)
    wrk = ("wrk", "-t1", "-c4", "-d8s", "--timeout", "30s", "-s", str(_PROGRAMS / "wrk.lua"), base)
    yield Program("wrk", wrk, "Requests/sec", "Non-2xx|Socket errors", env)
    hey = (
        "hey",
        "-n",
        "24",
        "-c",
        "4",
        "-t",
        "60",
        "-m",
        "POST",
        "-T",
        "application/json",
        "-d",
        f"{body}}}",
    )
    yield Program("hey", (*hey, f"{base}/v1/completions"), r"\[200\]\s+24 responses", "Error dist")
