"""Where vLLM's threads run on a CPU, so that they fight neither each other nor the event loops.

What decides it is read when a process starts, so the worker enters its environment first of all, by `enter`.
Measured in docs/vllm.md.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from worker_svc.runner.vllm import installed

_ENTERED: Final = "OCTAVO_VLLM_ENVIRONMENT"
_IOMP: Final = "libiomp5.so"
_TCMALLOC: Final = "libtcmalloc_minimal.so.4"
_LIBRARY_FOLDERS: Final = ("/usr/lib", "/usr/lib64", "/usr/local/lib")

_INTEL: Final = {
    # Milliseconds that a thread spins for more work before it sleeps. Within a step the next piece of work
    # comes sooner; between steps the core belongs to the event loop.
    "KMP_BLOCKTIME": "1",
    "KMP_TPAUSE": "0",
}
_GNU: Final = {
    # Threads that spin on busy cores wait for each other's time slices: a step takes ten times longer.
    "OMP_WAIT_POLICY": "passive",
}


def environment(given: Mapping[str, str], cores: int, ranks: int, num_threads: int | None) -> dict[str, str]:
    """Return the variables to add to an environment. What is set in it already stays.

    Args:
        given: the environment.
        cores: cores that this process may use.
        ranks: processes that compute (tensor parallelism).
        num_threads: threads of each; by default the cores are shared out.
    """
    preload = given.get("LD_PRELOAD", "")
    # Two OpenMPs in one process do not get along.
    taken = any(name in preload for name in ("libgomp", "libomp"))
    intel = None if taken else _find(_IOMP, (str(Path(sys.prefix) / "lib"),))
    libraries = [
        path
        for path in (_find(_TCMALLOC, _library_folders()), intel)
        if path is not None and Path(path).name not in preload
    ]
    wanted = {
        "OMP_NUM_THREADS": str(num_threads or max(1, cores // ranks)),
        # vLLM's own binding wants a memory node per rank.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        **(_INTEL if intel is not None or _IOMP in preload else _GNU),
    }
    added = {name: value for name, value in wanted.items() if name not in given}
    if libraries:
        added["LD_PRELOAD"] = ":".join([*libraries, *filter(None, [preload])])
    return added


def enter(ranks: int, num_threads: int | None) -> None:
    """Start this process anew in the right environment, unless it is in it or vLLM computes on a GPU."""
    if _ENTERED in os.environ or not installed.is_cpu_build():
        return
    cores = len(os.sched_getaffinity(0))
    added = environment(os.environ, cores, ranks, num_threads)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, sys.orig_argv, {**os.environ, **added, _ENTERED: "1"})  # noqa: S606 - itself


def _library_folders() -> tuple[str, ...]:
    return tuple(
        str(folder)
        for root in _LIBRARY_FOLDERS
        for folder in (Path(root), *sorted(Path(root).glob(f"{os.uname().machine}-*")))
    )


def _find(name: str, folders: tuple[str, ...]) -> str | None:
    return next((str(path) for folder in folders if (path := Path(folder) / name).is_file()), None)
