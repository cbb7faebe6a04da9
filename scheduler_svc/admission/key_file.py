"""The key file on disk: read at start, and again whenever it changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

import structlog
from octavo.keys import KeyFile, KeyFileError
from octavo.service.followed import signature_of, warn_if_exposed

from scheduler_svc.observe.metrics import SchedulerMetrics

_log = structlog.get_logger()

_POLL_S: Final = 1.0
_REMIND_S: Final = 60.0
_MAX_BYTES: Final = 64 << 20


class KeyFileWatch:
    """Keeps the last good content of a file in force, and says so when that is not the present one."""

    def __init__(self, path: Path, metrics: SchedulerMetrics, on_change: Callable[[KeyFile], None]) -> None:
        self._path = path
        self._metrics = metrics
        self._on_change = on_change
        self._content: bytes | None = None
        self._signature: tuple[tuple[int, ...], ...] | None = None
        self._reminded_at = 0.0
        self.problem: str | None = None
        """Why the file as it is now cannot be used."""

    def load(self) -> None:
        """Read the file for the first time.

        Raises:
            KeyFileError: it cannot be used.
        """
        self._content = self._read()
        warn_if_exposed(self._path)
        self._use(_parse(self._content))

    async def run(self) -> NoReturn:
        """Follow the file until cancelled."""
        while True:
            await asyncio.sleep(_POLL_S)
            await self.poll()

    async def poll(self) -> None:
        """Take in a change, if there is one."""
        try:
            content = await asyncio.to_thread(self._read_if_changed)
            if content is not None and content != self._content:
                self._content = content
                # Large files take a while.
                self._use(await asyncio.to_thread(_parse, content))
        except KeyFileError as error:
            self._complain(str(error))
        except Exception as error:  # noqa: BLE001 - told, and tried again: who follows the file must not end
            self._forget()
            self._complain(f"{type(error).__name__}: {error}")
        else:
            if self.problem is not None:
                self._complain(self.problem)

    def _use(self, key_file: KeyFile) -> None:
        self._on_change(key_file)
        self.problem = None
        self._metrics.key_file_broken.set(0)
        _log.info(
            "key_file_loaded",
            path=str(self._path),
            keys=len(key_file.keys),
            tenants=len(key_file.tenants),
        )

    def _complain(self, problem: str) -> None:
        """Say that the file is broken: when it breaks, and again and again while it is."""
        now = time.monotonic()
        if problem == self.problem and now < self._reminded_at + _REMIND_S:
            return
        self.problem = problem
        self._reminded_at = now
        self._metrics.key_file_broken.set(1)
        _log.error(
            "key_file_broken", path=str(self._path), problem=problem, in_force="the last one that was right"
        )

    def _read_if_changed(self) -> bytes | None:
        """Return the content if it may be another than the last time."""
        try:
            signature = signature_of((self._path,))
            if signature is not None and signature == self._signature:
                return None
            content = self._read()
        except OSError as error:
            self._forget()
            raise KeyFileError(str(error.strerror)) from None
        except KeyFileError:
            self._forget()
            raise
        self._signature = signature
        return content

    def _forget(self) -> None:
        """Take in whatever the file holds next, even if it is what it held before."""
        self._signature = self._content = None

    def _read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                content = file.read(_MAX_BYTES + 1)
        except OSError as error:
            raise KeyFileError(str(error.strerror)) from None
        if len(content) > _MAX_BYTES:
            raise KeyFileError(f"it has more than {_MAX_BYTES} bytes")
        return content


def _parse(content: bytes) -> KeyFile:
    try:
        return KeyFile.parse(content.decode())
    except UnicodeDecodeError:
        raise KeyFileError("it is not UTF-8") from None
