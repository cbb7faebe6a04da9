"""What an experiment ran on: recorded, so that it can be judged and repeated."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import psutil
from octavo.client import Client
from octavo.errors import OctavoError

_PACKAGES: Final = ("octavo", "torch", "vllm", "grpcio", "protobuf", "numpy", "tokenizers")


def environment() -> dict[str, Any]:
    """Return hardware and software of this machine, as far as they can be known."""
    return {"hardware": _hardware(), "software": _software()}


def served(endpoint: str) -> dict[str, Any]:
    """Return what a stack serves."""
    try:
        with Client(endpoint) as client:
            model = client.models()[0]
            worker = client.status().workers[0]
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


def _hardware() -> dict[str, Any]:
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": _gpus(),
        "load_average_before": [round(value, 2) for value in os.getloadavg()],
    }


def _software() -> dict[str, Any]:
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": packages,
        "commit": _commit(),
    }


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpus() -> list[str]:
    try:
        import pynvml  # noqa: PLC0415 # only where there is a GPU

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
    except Exception:  # noqa: BLE001 # the library, its driver or the device may be missing, each in its own way
        return []


def _commit() -> str | None:
    """Return the commit of a checkout, marked when files differ from it; None outside of one."""
    here = Path(__file__).parent
    try:
        told = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],  # noqa: S607 # whatever git there is
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except OSError:
        return None
    return told.stdout.strip() or None
