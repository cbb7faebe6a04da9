"""Which vLLM is installed, and what must stand in the environment before it is imported."""

from __future__ import annotations

import os
from importlib import metadata
from typing import Final

from worker_svc.errors import InvalidSettings
from worker_svc.models.demo_model import cache_folder

SUPPORTED_VERSION: Final = "0.32.0"
CPU_DISTRIBUTION: Final = "vllm-cpu"
DISTRIBUTIONS: Final = ("vllm", CPU_DISTRIBUTION)

_PINNED: Final = {
    # The second model runner treats resumed requests and prefill tokens in another way.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # The executor runs in the engine's thread; with "1" the CPU build would move it into a process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
_DEFAULTS: Final = {
    # vLLM's records go where ours go.
    "VLLM_CONFIGURE_LOGGING": "0",
}


def compile_environment() -> dict[str, str]:
    """Return variables under which the CPU build finds at its next start what it has compiled.

    Its ahead-of-time artifacts are written and then not loaded with torch 2.13, so every start would compile
    for minutes; Inductor's own cache works, and must not lie in a folder for temporary files.
    """
    return {
        "VLLM_USE_AOT_COMPILE": "0",
        "TORCHINDUCTOR_CACHE_DIR": str(cache_folder() / "vllm" / "compiled"),
    }


def installed_version() -> str | None:
    """Return the version of the vLLM that is installed, without its local part."""
    return next((version for name in DISTRIBUTIONS if (version := _version(name)) is not None), None)


def is_cpu_build() -> bool:
    """Return whether vLLM's build for the CPU is installed."""
    return _version(CPU_DISTRIBUTION) is not None


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None


def prepare() -> None:
    """Pin what this runner relies on; must come before vLLM is imported.

    Raises:
        InvalidSettings: vLLM is missing, or it is a version whose internals this runner does not know.
    """
    version = installed_version()
    if version is None:
        raise InvalidSettings(
            "vLLM is not installed: `pip install octavo[vllm]` on a machine with a GPU, "
            "scripts/install_vllm_cpu.sh on one without"
        )
    if version != SUPPORTED_VERSION:
        raise InvalidSettings(
            f"vLLM {version} is installed; this runner drives the internals of {SUPPORTED_VERSION}, no other"
        )
    os.environ.update(_PINNED)
    defaults = {**_DEFAULTS, **compile_environment()} if is_cpu_build() else _DEFAULTS
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
