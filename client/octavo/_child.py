"""Runs a module as a program that dies with the process that started it.

`python -m octavo._child PARENT_PID MODULE [ARGUMENT ...]`
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent is gone; only Linux can be asked."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # It was gone before the kernel knew.
        sys.exit(1)


def main() -> None:
    """Take the arguments off and become the module."""
    parent, module, *arguments = sys.argv[1:]
    die_with(int(parent))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
