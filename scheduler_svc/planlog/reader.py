"""Reads plan logs."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path

from google.protobuf.message import DecodeError
from octavo.v1 import planlog_pb2

from scheduler_svc.planlog.errors import PlanLogError
from scheduler_svc.planlog.writer import FORMAT_VERSION, FRAME, MAGIC

_GZIP = b"\x1f\x8b"


class PlanLogReader:
    """The header and the entries of a plan log, which may be compressed with gzip.

    Raises:
        PlanLogError: the file is no plan log; from iteration: an entry is damaged.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn_bytes = 0
        """Bytes after the last whole entry, known once all entries were read: a crash while writing."""
        with self._records() as records:
            try:
                self.header = planlog_pb2.PlanLogHeader.FromString(next(records, b""))
            except DecodeError as error:
                raise PlanLogError(f"{path}: damaged header: {error}") from error
        written = self.header.format_version
        if written != FORMAT_VERSION:
            problem = f"has format {written}, this version reads {FORMAT_VERSION}"
            raise PlanLogError(f"{path} {problem if written else 'ends in its header'}")

    def __iter__(self) -> Iterator[planlog_pb2.PlanLogEntry]:
        with self._records() as records:
            next(records)
            for record in records:
                try:
                    entry = planlog_pb2.PlanLogEntry.FromString(record)
                except DecodeError as error:
                    raise PlanLogError(f"{self.path}: damaged entry: {error}") from error
                yield entry

    @contextmanager
    def _records(self) -> Iterator[Iterator[bytes]]:
        with self.path.open("rb") as raw:
            file: BufferedIOBase = raw
            if raw.peek(len(_GZIP)).startswith(_GZIP):
                file = gzip.GzipFile(fileobj=raw)
            if file.read(len(MAGIC)) != MAGIC:
                raise PlanLogError(f"{self.path} is no plan log")
            yield self._whole(file)

    def _whole(self, file: BufferedIOBase) -> Iterator[bytes]:
        """Yield whole records; count what follows the last of them."""
        self.torn_bytes = 0
        while frame := file.read(FRAME.size):
            record = b""
            if len(frame) == FRAME.size:
                length, crc = FRAME.unpack(frame)
                record = file.read(length)
                if len(record) == length and zlib.crc32(record) == crc:
                    yield record
                    continue
            self.torn_bytes = len(frame) + len(record) + len(file.read())
