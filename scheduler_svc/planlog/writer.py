"""Writes plan logs: framed records, one `write` each, in files that rotate."""

from __future__ import annotations

import errno
import io
import os
import struct
import time
import zlib
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Final

from octavo.v1 import planlog_pb2

MAGIC: Final = b"OCTAVOPLANLOG\n"
FORMAT_VERSION: Final = 3
FIRST_FORMAT_VERSION: Final = 2
"""The oldest that can be read; its checkpoints cannot."""
FRAME: Final = struct.Struct("<II")
"""Length of the record, CRC-32 of the record."""
MAX_RECORD_BYTES: Final = 1 << 28
"""Of what is read into memory at once; a state that needs more is not written."""
DEFAULT_MAX_BYTES: Final = 256 * 2**20
DEFAULT_FILES: Final = 4


@cache
def _version() -> str:
    return version("octavo")


class PlanLogWriter:
    """Appends entries to `path`.

    A file with `max_bytes` of entries is renamed to `path.1`, that to `path.2` and so on; `files` are
    kept in all. So is one that an earlier scheduler left: nothing is ever appended to it. Files are for
    their owner only, since prompts are in them as token ids. Each entry is handed to the operating
    system at once: when the process dies, however it dies, at most the record being written is torn.
    """

    def __init__(self, path: Path, *, max_bytes: int = DEFAULT_MAX_BYTES, files: int = DEFAULT_FILES) -> None:
        if files < 1:
            raise ValueError(f"a plan log has at least 1 file, got {files}")
        self.path = path
        self._max_bytes = max_bytes
        self._files = files
        self._file: io.FileIO | None = None
        self._size = 0
        self._sequence = 0

    @property
    def is_full(self) -> bool:
        """The next entry belongs into a new file."""
        return self._size >= self._max_bytes

    def start_file(
        self,
        core_config_json: str,
        state: planlog_pb2.Checkpoint | None = None,
        gap: planlog_pb2.PlanLogGap | None = None,
    ) -> None:
        """Begin a new file in which the core starts from a state, or from nothing.

        Args:
            core_config_json: the settings of the core.
            state: of the core now.
            gap: what has been missed before.

        Raises:
            OSError: the file cannot be written; those that are there stay as they are.
        """
        self.close()
        header = planlog_pb2.PlanLogHeader(
            format_version=FORMAT_VERSION,
            octavo_version=_version(),
            core_config_json=core_config_json,
            started_unix_ms=time.time_ns() // 1_000_000,
            sequence=self._sequence,
            state=state,
            gap=gap,
        )
        record = header.SerializeToString()
        if len(record) > MAX_RECORD_BYTES:
            raise OSError(errno.EFBIG, f"the state of the core has {len(record)} bytes")
        # It takes its place only when its beginning stands: to try again and again harms no other file.
        beginning = self.path.with_name(f"{self.path.name}.new")
        beginning.unlink(missing_ok=True)
        descriptor = os.open(beginning, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._file = io.FileIO(descriptor, "wb")
        try:
            self._put(MAGIC)
            self._write(record)
            self._shift()
            beginning.rename(self.path)
        except OSError:
            self.close()
            with suppress(OSError):
                beginning.unlink(missing_ok=True)
            raise
        self._sequence += 1
        # A checkpoint alone must not fill a file, or each entry would begin a new one.
        self._size = 0

    def append(self, entry: planlog_pb2.PlanLogEntry) -> None:
        """Write one entry.

        Raises:
            OSError: the disk is full or gone. The file ends here.
        """
        self._write(entry.SerializeToString())

    def close(self) -> None:
        """Close the file; `start_file` opens the next."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, record: bytes) -> None:
        self._put(FRAME.pack(len(record), zlib.crc32(record)) + record)

    def _put(self, data: bytes) -> None:
        assert self._file is not None
        self._size += len(data)
        while data:
            data = data[self._file.write(data) :]

    def _shift(self) -> None:
        """Make room for a new file: the oldest goes, the others move up by one."""
        names = [self.path, *(self.path.with_name(f"{self.path.name}.{n}") for n in range(1, self._files))]
        names[-1].unlink(missing_ok=True)
        for older, newer in zip(reversed(names), reversed(names[:-1]), strict=False):
            if newer.exists():
                newer.rename(older)
