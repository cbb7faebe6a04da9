"""Structured logs: JSON lines, or readable ones on a terminal. To log never fails and never waits.

Lines are put into a bounded queue, and a thread writes them. One that cannot be written, or for which the
queue has no room because nobody reads, is dropped and counted; `log_lines_dropped` says so, once it can.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections import deque
from typing import Final, TextIO

import structlog

_MAX_QUEUED_CHARS: Final = 8 << 20
_MAX_WRITE_CHARS: Final = 1 << 16
_FLUSH_AT_EXIT_S: Final = 1.0
_STDERR: Final = 2


class LineWriter:
    """Writes lines to a stream from a thread of its own."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.dropped = 0
        """Lines that were not written, since start."""
        self._told = 0
        """Of these, those that a line has told of."""
        self._lines: deque[str] = deque()
        self._queued_chars = 0
        self._torn = False
        """Only a part of the last line was written."""
        self._start()
        # A forked process has no thread of its own yet, and is not to write what its parent will.
        os.register_at_fork(after_in_child=self._start)

    def _start(self) -> None:
        # Reentrant: what runs when garbage is collected may log, too.
        self._changed = threading.Condition(threading.RLock())
        self._lines.clear()
        self._queued_chars = 0
        self._writing = False
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def put(self, line: str) -> None:
        """Have a line written, if there is room for it."""
        with self._changed:
            if self._queued_chars and self._queued_chars + len(line) > _MAX_QUEUED_CHARS:
                self.dropped += 1
                return
            self._lines.append(line)
            self._queued_chars += len(line)
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> None:
        """Wait until all that was put has been written or dropped, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lines and not self._writing, timeout_s)

    def _run(self) -> None:
        changed = self._changed
        while True:
            with changed:
                self._writing = False
                changed.notify_all()
                changed.wait_for(lambda: self._lines)
                self._writing = True
                lines = self._take()
            unwritten = self._write(lines)
            with changed:
                self.dropped += unwritten
                untold = self.dropped - self._told
                works_again = untold > 0 and not unwritten and not self._lines
            if works_again:
                self._told += untold
                structlog.get_logger().warning("log_lines_dropped", lines=untold, since_start=self._told)

    def _take(self) -> list[str]:
        """Return the lines for the next write."""
        lines, size = [], 0
        while self._lines and size < _MAX_WRITE_CHARS:
            lines.append(self._lines.popleft())
            size += len(lines[-1])
        self._queued_chars -= size
        return lines

    def _write(self, lines: list[str]) -> int:
        """Write lines, for as long as it takes; return how many could not be written as a whole."""
        text = "".join(f"{line}\n" for line in lines)
        data = text.encode(errors="backslashreplace")
        if self._torn:
            data = b"\n" + data
        try:
            descriptor = self.stream.fileno()
        except (OSError, ValueError):
            return 0 if _write_to_object(self.stream, text) else len(lines)
        try:
            while data:
                data = data[os.write(descriptor, data) :]
                self._torn = bool(data)
        except OSError:
            return min(len(lines), data.count(b"\n"))
        return 0


def _write_to_object(stream: TextIO, text: str) -> bool:
    """Write to what is no file of the system, as in tests, or is closed."""
    try:
        stream.write(text)
        stream.flush()
    except (OSError, ValueError):
        return False
    return True


class _Logger:
    """What structlog hands its lines to; it has filtered them by level before."""

    def __init__(self, writer: LineWriter) -> None:
        self._writer = writer

    def msg(self, line: str) -> None:
        """Take a line."""
        self._writer.put(line)

    log = debug = info = warn = warning = msg
    error = err = failure = exception = critical = fatal = msg


class _Handler(logging.Handler):
    """Takes what libraries log."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        """Take a line; a record that no line can be made of is one of the dropped."""
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001 - of whatever library
            line = f"a log record of {record.name} cannot be read"
        self._writer.put(line)


class _Process:
    """The one writer of this process, once it logs."""

    writer: LineWriter | None = None


def dropped() -> int:
    """Return how many lines of this process could not be written."""
    return _Process.writer.dropped if _Process.writer is not None else 0


def flush(timeout_s: float = _FLUSH_AT_EXIT_S) -> None:
    """Wait until all lines are written, but not longer than that: for whoever ends the process at once."""
    if _Process.writer is not None:
        _Process.writer.flush(timeout_s)


def _standard_error() -> TextIO:
    """Return stderr; where it was closed from the start, a hole, so that no socket gets its number."""
    if sys.stderr is None:
        hole = os.open(os.devnull, os.O_WRONLY)
        os.dup2(hole, _STDERR)
        if hole != _STDERR:
            os.close(hole)
        sys.stderr = os.fdopen(_STDERR, "w", closefd=False)
    return sys.stderr


def _writer_to(stream: TextIO) -> LineWriter:
    if _Process.writer is None:
        _Process.writer = LineWriter(stream)
        atexit.register(flush)
    flush()
    _Process.writer.stream = stream
    return _Process.writer


def configure(log_format: str, log_level: str) -> None:
    """Set up structlog to write to stderr; call once, at start.

    Args:
        log_format: `json`, `console`, or `auto`: console on a terminal.
        log_level: least level that is written.
    """
    stream = _standard_error()
    console = log_format == "console" or (log_format == "auto" and stream.isatty())
    renderer: structlog.typing.Processor = (
        # The default would print local variables with a trace, and there prompts may be.
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        if console
        else structlog.processors.JSONRenderer()
    )
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=not console),
    ]
    if not console:
        shared.append(structlog.processors.format_exc_info)
    writer = _writer_to(stream)
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(log_level),
        logger_factory=lambda *_: _Logger(writer),
        cache_logger_on_first_use=True,
    )
    # What libraries log and warn of goes the same way.
    handler = _Handler(writer)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processor=renderer, foreign_pre_chain=shared))
    logging.basicConfig(
        handlers=[handler], level=max(logging.WARNING, logging.getLevelName(log_level.upper())), force=True
    )
    logging.captureWarnings(capture=True)
