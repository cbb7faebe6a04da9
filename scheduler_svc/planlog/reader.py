"""Reads plan logs."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from typing import Final

from google.protobuf.message import DecodeError
from octavo.v1 import planlog_pb2

from scheduler_svc.planlog.errors import PlanLogError
from scheduler_svc.planlog.writer import FIRST_FORMAT_VERSION, FORMAT_VERSION, FRAME, MAGIC, MAX_RECORD_BYTES

_GZIP = b"\x1f\x8b"
# How far to look for a record after one that is no good, and for how large a one.
_SCANNED_BYTES: Final = 1 << 20
_SCANNED_RECORD: Final = 1 << 16


class PlanLogReader:
    """The header and the entries of a plan log, which may be compressed with gzip.

    Raises:
        PlanLogError: the file is no plan log, or damaged as gzip; from iteration: an entry cannot be read.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn_bytes = 0
        """Bytes after the last whole entry, known once all entries were read: a crash while writing."""
        self.damaged_bytes = 0
        """Bytes from an entry that is no good, when more come after it: the file has been damaged since."""
        with self._records() as records:
            try:
                self.header = planlog_pb2.PlanLogHeader.FromString(next(records, b""))
            except DecodeError as error:
                raise PlanLogError(f"{path}: damaged header: {error}") from error
        written = self.header.format_version
        if not FIRST_FORMAT_VERSION <= written <= FORMAT_VERSION:
            problem = f"has format {written}, this version reads {FIRST_FORMAT_VERSION} to {FORMAT_VERSION}"
            if not written:
                problem = "is damaged in its header" if self.damaged_bytes else "ends in its header"
            raise PlanLogError(f"{path} {problem}")

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
            yield self._whole(file)

    def _whole(self, file: BufferedIOBase) -> Iterator[bytes]:
        """Yield whole records; count what follows the last of them."""
        self.torn_bytes = self.damaged_bytes = 0
        try:
            if file.read(len(MAGIC)) != MAGIC:
                raise PlanLogError(f"{self.path} is no plan log")
            while frame := file.read(FRAME.size):
                record = b""
                if len(frame) == FRAME.size:
                    length, crc = FRAME.unpack(frame)
                    record = file.read(min(length, MAX_RECORD_BYTES))
                    if 0 < length == len(record) and zlib.crc32(record) == crc:
                        yield record
                        continue
                size = len(frame) + len(record)
                # A file may end in zeros that were to become an entry when the machine lost its power.
                unwritten = not (frame.strip(b"\0") or record.strip(b"\0"))
                rest_bytes = 0
                while rest := file.read(_SCANNED_BYTES):
                    rest_bytes += len(rest)
                    unwritten = unwritten and not rest.strip(b"\0")
                size += rest_bytes
                if not unwritten and (rest_bytes or _holds_record(record)):
                    self.damaged_bytes = size
                else:
                    self.torn_bytes = size
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise PlanLogError(f"{self.path}: damaged compression: {error}") from error


def _holds_record(data: bytes) -> bool:
    """Return whether a whole record is in what looks like the beginning of one with a wrong length."""
    view = memoryview(data)
    for start in range(FRAME.size, min(len(data), _SCANNED_BYTES)):
        length, crc = FRAME.unpack_from(data, start - FRAME.size)
        if 0 < length <= min(len(data) - start, _SCANNED_RECORD) and zlib.crc32(view[start:][:length]) == crc:
            return True
    return False
