"""vLLM's ranks on two Ray nodes: served, a rank killed, recovered.

vLLM's CPU platform says that it knows no Ray. A plugin of vLLM's, as other vendors write them, says that it
does, and each node says that it has one GPU: the rank that is placed there computes on the CPU.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from octavo import Client
from octavo.sampling import SamplingParams
from octavo_lab.scorecard.runner_workload import EngineJob

from tests.e2e.test_runner_stack import LOST_S, READY_S, VLLM, assert_right, running, tiny_model

pytest.importorskip("ray", exc_type=ImportError)
pytestmark = [pytest.mark.vllm, pytest.mark.slow]

RANKS = 2
STOP_S = 60
START_S = 300
HEAD, OTHER = "127.0.0.2", "127.0.0.3"
"""Ray takes 127.0.0.1 for the address that others see."""
PLUGIN = """
from vllm.platforms.cpu import CpuPlatform

class RayCpuPlatform(CpuPlatform):
    ray_device_key = "GPU"

def register():
    return "ray_cpu.RayCpuPlatform"
"""
RAY_ARGS = (
    *("--num-cpus=2", "--num-gpus=1", "--object-store-memory=100000000", "--disable-usage-stats", "--block"),
)


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[psutil.Process]]:
    """Two Ray nodes, which differ by their addresses; the first is the head."""
    plugin = tmp_path / "plugin" / "ray_cpu-1.0.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: ray_cpu\nVersion: 1.0\n")
    (plugin / "entry_points.txt").write_text("[vllm.platform_plugins]\nray_cpu = ray_cpu:register\n")
    (plugin.parent / "ray_cpu.py").write_text(PLUGIN)
    monkeypatch.setenv("PYTHONPATH", str(plugin.parent))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    # As in deploy/kubernetes/overlays/ray: who has no token runs nothing on these nodes.
    (tmp_path / "token").write_text(secrets.token_hex(32))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("RAY_gcs_server_request_timeout_seconds", str(START_S))
    with socket.create_server((HEAD, 0)) as free:
        address = f"{HEAD}:{free.getsockname()[1]}"
    # The paths of Ray's sockets must be short.
    files = Path("/tmp") / f"octavo-ray-{os.getpid()}"  # noqa: S108
    head = ["--head", f"--node-ip-address={HEAD}", f"--port={address.rpartition(':')[2]}"]
    head += ["--include-dashboard=false", f"--temp-dir={files}"]
    started = []
    try:
        for place in (head, [f"--address={address}", f"--node-ip-address={OTHER}"]):
            command = [sys.executable, "-m", "ray.scripts.scripts", "start", *place, *RAY_ARGS]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            started.append(process)
            assert process.stdout is not None
            said = ""
            while "Ray runtime started" not in said:
                line = process.stdout.readline()
                assert line, said
                said += line
        monkeypatch.setenv("RAY_ADDRESS", address)
        yield [psutil.Process(process.pid) for process in started]
    finally:
        for process in reversed(started):
            below = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=STOP_S)
            _, left = psutil.wait_procs(below, STOP_S)
            for one in left:
                one.kill()
        shutil.rmtree(files, ignore_errors=True)


def ranks(node: psutil.Process) -> list[psutil.Process]:
    """Return the ranks that run on a node."""
    below = node.children(recursive=True)
    return [one for one in below if "RayWorkerProc" in "".join(one.cmdline())]


def test_rank_on_another_ray_node_killed_is_a_lost_worker_and_the_request_goes_on(
    nodes: list[psutil.Process], tmp_path: Path
) -> None:
    model, reference = tiny_model(tmp_path, RANKS)
    asked = ("--tensor-parallel-size", str(RANKS), "--vllm-arg", "distributed_executor_backend=ray")
    with running(model, tmp_path, (*VLLM, *asked)) as stack:
        stack.wait_ready(READY_S)
        worker = stack.workers[0]
        assert [len(ranks(node)) for node in nodes] == [1, 1]
        prompt = list(range(3, 40))
        with Client(stack.endpoint, reconnect_timeout=READY_S) as client:
            deltas = iter(client.stream(prompt, temperature=0.0, max_tokens=200, ignore_eos=True))
            first = next(delta for delta in deltas if delta.token_ids)
            ranks(nodes[1])[0].kill()

            assert worker.process.wait(LOST_S) == 1

            worker.start()
            output = [*first.token_ids, *(token for delta in deltas for token in delta.token_ids)]
        assert [len(ranks(node)) for node in nodes] == [1, 1]

    assert_right([EngineJob(prompt, SamplingParams(), output=output)], reference, 200)
    assert [ranks(node) for node in nodes] == [[], []]
