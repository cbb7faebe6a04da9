"""The machine under a measurement: what it is, and how much of its memory processes take."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import psutil
from octavo.client import Client
from octavo.errors import OctavoError

_PACKAGES: Final = ("octavo", "torch", "vllm", "grpcio", "protobuf", "numpy", "tokenizers")


def environment() -> dict[str, Any]:
    """Return hardware and software of this machine, as far as they can be known."""
    pynvml, handles = _gpus()
    return {
        "hardware": {
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "gpus": [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles],
            "load_average_before": [round(value, 2) for value in os.getloadavg()],
        },
        "software": {
            "os": f"{platform.system()} {platform.release()} {platform.machine()}",
            "python": platform.python_version(),
            "packages": {name: number for name in _PACKAGES if (number := _version(name))},
            "commit": _commit(),
        },
    }


def served(endpoint: str) -> dict[str, Any]:
    """Return what a stack serves."""
    try:
        with Client(endpoint) as client:
            model, worker = client.models()[0], client.status().workers[0]
    except (OctavoError, IndexError):
        return {}
    return {
        "model": model.id,
        "revision": model.revision,
        "context": model.max_model_len,
        "runner": worker.runner,
        "blocks": worker.pool.total,
        "block_size": worker.pool.block_size,
    }


def _version(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package)
    return None


def _cpu_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """Return the commit of a checkout, marked when files differ from it; None outside of one."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(  # noqa: S603 # our own words, whatever git there is
            command, cwd=Path(__file__).parent, stderr=subprocess.DEVNULL, text=True, timeout=10
        ).strip()
    return None


def _gpus() -> tuple[Any, list[Any]]:
    """Return NVML and what it knows the GPUs by; none without them."""
    try:
        import pynvml  # noqa: PLC0415 # only where there is a GPU

        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        return pynvml, [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    except Exception:  # noqa: BLE001 # the library, its driver or the device may be missing, each in its own way
        return None, []


def gpu_reader() -> Callable[[Sequence[int]], int | None]:
    """Return what reads the GPU memory of processes in bytes through NVML; None where there is no GPU."""
    pynvml, handles = _gpus()

    def read(pids: Sequence[int]) -> int | None:
        found = [one for handle in handles for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
        return sum(one.usedGpuMemory or 0 for one in found if one.pid in pids) if handles else None

    return read


def tree_bytes(pid: int) -> int:
    """Return the resident memory of a process and its children; whoever is gone has none."""
    total = 0
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
    return total
