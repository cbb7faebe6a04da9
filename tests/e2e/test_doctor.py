"""`octavo doctor` as it is run, on the machine that it is run on."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys

from octavo.stack import Stack, free_ports

LINES = ["versions", "parts", "files", "home", "clock", "ports", "endpoints", "proxies"]
LINES += ["processor", "memory", "models", "torch", "vllm", "types", "gpu"]


def doctor(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "octavo.cli.main", "doctor", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "80", **env},
        timeout=300,
        check=False,
    )


def ports() -> list[str]:
    scheduler, worker, gateway = free_ports(3)
    return [f"--port={scheduler}", f"--worker-port={worker}", f"--gateway-port={gateway}"]


def test_machine_that_runs_these_tests_would_run_a_demo_stack() -> None:
    done = doctor(*ports(), PYTHONIOENCODING="utf-8")

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    found = re.findall(r"^[✓!]  (\w+) ", done.stdout, re.MULTILINE)
    assert list(dict.fromkeys(found)) == LINES
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    assert done.stdout.endswith("A demo stack would run here: octavo up\n")


def test_json_tells_a_taken_port_and_the_health_of_endpoints(sim_stack: Stack) -> None:
    endpoints = f"{sim_stack.endpoint},127.0.0.1:1"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        given = [*ports()[:2], f"--gateway-port={port}", "--json"]
        done = doctor(*given, OCTAVO_ENDPOINT=endpoints, PYTHONIOENCODING="ascii")

    diagnosis = json.loads(done.stdout)
    by_check: dict[str, list[dict[str, str]]] = {}
    for finding in diagnosis["findings"]:
        by_check.setdefault(finding["check"], []).append(finding)
    assert (done.returncode, diagnosis["would_run"]) == (1, False)
    assert list(by_check) == LINES
    assert f"{port} (gateway)" in by_check["ports"][0]["found"]
    assert "--gateway-port 0" in by_check["ports"][0]["advice"]
    assert [one["mark"] for one in by_check["endpoints"]] == ["fine", "warning"]
    others = [one["mark"] for name in by_check if name != "ports" for one in by_check[name]]
    assert "failed" not in others
