"""Structured logs: JSON lines, or readable ones on a terminal."""

from __future__ import annotations

import logging
import sys

import structlog


def configure(log_format: str, log_level: str) -> None:
    """Set up structlog to write to stderr; call once, at start.

    Args:
        log_format: `json`, `console`, or `auto`: console on a terminal.
        log_level: least level that is written.
    """
    console = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
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
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(log_level),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    # What libraries log goes the same way.
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processor=renderer, foreign_pre_chain=shared))
    logging.basicConfig(
        handlers=[handler], level=max(logging.WARNING, logging.getLevelName(log_level.upper())), force=True
    )
