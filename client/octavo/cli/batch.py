"""`octavo batch`: run a file of requests, ordered for throughput, and go on after an interruption."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from octavo.aio import AsyncClient
from octavo.batch_file import BatchFileError, BatchLine, OutcomeFile, read_requests, throughput_order
from octavo.cli import output, request
from octavo.errors import ClientClosedError, OctavoError, UnavailableError
from octavo.types import GenerateResult


def configure(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the command's arguments."""
    del name
    parser.add_argument(
        "input", type=Path, help="requests, a JSON object per line: prompt or messages, and options beside it"
    )
    parser.add_argument(
        "output", type=Path, help="outcomes, a JSON object per line as they come; what has a result is kept"
    )
    parser.add_argument(
        "--reconnect-timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds to wait for a scheduler that went away (default: 600)",
    )
    request.add_endpoint(parser)
    request.add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Do it and return the exit code: 1 when some request failed."""
    try:
        lines = read_requests(arguments.input, request.options(arguments))
        with OutcomeFile(arguments.output) as outcomes:
            todo = throughput_order(outcomes.unfinished(lines))
            if len(todo) < len(lines):
                output.note(f"{len(lines) - len(todo)} of {len(lines)} are done already")
            progress = _Progress(len(lines), len(lines) - len(todo))
            try:
                asyncio.run(_run(arguments, todo, outcomes, progress))
            except KeyboardInterrupt:
                progress.close()
                output.note("interrupted; the same command goes on with the rest")
                raise
    except (BatchFileError, OSError) as error:
        output.fail(str(error))
        return 2
    progress.close()
    output.note(progress.summary())
    return 1 if progress.failed else 0


async def _run(
    arguments: argparse.Namespace, todo: list[BatchLine], outcomes: OutcomeFile, progress: _Progress
) -> None:
    """Send what is to do and write what comes.

    Raises:
        UnavailableError: the service is gone; nothing is written of the requests that it still had.
    """
    good = [line for line in todo if line.item is not None]
    for line in todo:
        if line.error is not None:
            outcomes.add(line, line.error)
            progress.ended(line.error)
    options: dict[str, Any] = request.options(arguments)
    client = AsyncClient(
        arguments.endpoint,
        api_key=request.key_of(arguments),
        tls=request.tls_of(arguments),
        connect_timeout=arguments.connect_timeout,
        reconnect_timeout=arguments.reconnect_timeout,
    )
    async with client:
        items = (line.item for line in good if line.item is not None)
        async for index, outcome in client.batch_iter(items, **options):
            if isinstance(outcome, UnavailableError | ClientClosedError):
                raise outcome
            outcomes.add(good[index], outcome)
            progress.ended(outcome)


class _Progress:
    """How far the batch is, how fast it goes, and when it will be done."""

    def __init__(self, total: int, done: int) -> None:
        self._total = total
        self._done = self._done_before = done
        self._tokens = 0
        self._began = time.monotonic()
        self._line = output.ProgressLine()
        self.failed = 0

    def ended(self, outcome: GenerateResult | OctavoError) -> None:
        """Count an outcome and show where we are."""
        self._done += 1
        if isinstance(outcome, OctavoError):
            self.failed += 1
        else:
            self._tokens += outcome.usage.prompt_tokens + outcome.usage.completion_tokens
        if not sys.stderr.isatty() and self._done * 10 // self._total == (self._done - 1) * 10 // self._total:
            return
        elapsed = time.monotonic() - self._began
        left = elapsed / (self._done - self._done_before) * (self._total - self._done)
        failed = f", {self.failed} failed" if self.failed else ""
        speed = f"{self._tokens / elapsed:.0f} tokens per second" if elapsed > 0 else ""
        self._line(
            f"{self._done} of {self._total}{failed}, {speed}, {output.duration(left)} left",
            self._done / self._total,
        )

    def close(self) -> None:
        """Take the bar away."""
        self._line.__exit__(None, None, None)

    def summary(self) -> str:
        """Return what came of it, in a line."""
        ran = self._done - self._done_before
        took = output.duration(time.monotonic() - self._began)
        return f"{ran - self.failed} done, {self.failed} failed, {self._tokens} tokens in {took}"
