"""Public programs that speak the OpenAI API, each run as its users run it, against a gateway.

Those of Python live in an environment of their own (`make clients`), `vllm bench serve` in ours.
"""

from __future__ import annotations

import os
import re
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
        OUTPUT.mkdir(parents=True, exist_ok=True)
        log, env = OUTPUT / f"{self.name}.txt", {**os.environ, **self.env}
        with log.open("w") as out:
            print(f"$ {' '.join(self.command)}", file=out, flush=True)
            try:
                done = subprocess.run(  # noqa: S603 # as listed below
                    self.command, stdout=out, stderr=out, timeout=timeout_s, check=False, env=env
                )
            except FileNotFoundError:
                raise RuntimeError(f"{self.command[0]} is not installed: make clients") from None
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
    for name in ("openai", "langchain"):
        client = (python, str(_PROGRAMS / f"{name}_client.py"), f"{base}/v1", model)
        yield Program(name.replace("langchain", "langchain-openai"), client)
    curl = f"curl -N -sS --fail-with-body {base}/v1/completions -H content-type:application/json -d".split()
    streamed = r"\A\$ .*\n(data: \{.*\n\n){8}data: \[DONE\]\s*\Z"
    yield Program("curl", (*curl, f'{body}, "stream": true}}'), streamed)
    for backend, endpoint in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
        flags = f"--backend {backend} --base-url {base} --endpoint {endpoint} --model {model}"
        size = "--dataset-name random --random-input-len 64 --random-output-len 16 --num-prompts 16"
        flags += f" {size} --max-concurrency 4 --ignore-eos --seed 1"
        bench = (*BENCH_SERVE, "--tokenizer", str(tokenizer), *flags.split())
        yield Program(f"vllm-bench-serve-{backend}", bench, r"Successful requests:\s+16\b")
    users = f"--headless --host {base} -u 4 -r 4 -t 12s --only-summary".split()
    locust = (python, "-m", "locust", "-f", str(_PROGRAMS / "locustfile.py"), *users)
    yield Program("locust", locust, env=env)
    wrk = ("wrk", "-s", str(_PROGRAMS / "wrk.lua"), *f"-t1 -c4 -d8s --timeout 30s {base}".split())
    yield Program("wrk", wrk, "Requests/sec", "Non-2xx|Socket errors", env)
    hey = f"hey -n 24 -c 4 -t 60 -m POST -T application/json {base}/v1/completions -d".split()
    yield Program("hey", (*hey, f"{body}}}"), r"\[200\]\s+24 responses", "Error dist")
