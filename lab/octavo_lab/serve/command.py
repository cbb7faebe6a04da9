"""`octavo bench serve`: drives a service with planned traffic, and tells what its clients see."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.cli import output

from octavo_lab.command import BenchError, BenchInterrupted, claim_file
from octavo_lab.serve.flags import configure

if TYPE_CHECKING:
    from octavo_lab.load.generator import RunProgress
    from octavo_lab.load.records import RunRecord

__all__ = ["configure", "run"]


def run(arguments: argparse.Namespace) -> str:
    """Drive; return the tables.

    Raises:
        BenchError: it cannot be done as asked.
        BenchInterrupted: Ctrl-C; with the tables of what there is.
    """
    # Not earlier: they need the extra `bench`, and the help does not.
    from octavo_lab.load import files, tables  # noqa: PLC0415
    from octavo_lab.machine import environment  # noqa: PLC0415
    from octavo_lab.serve.plan import parse_slo  # noqa: PLC0415

    slo = parse_slo(arguments.slo)
    if arguments.out is not None:
        claim_file(arguments.out)
    record = asyncio.run(_drive(arguments))
    if arguments.json:
        told = json.dumps(files.as_json(record, slo)["summary"], indent=2)
    else:
        told = tables.as_text(record, slo)
    if arguments.out is not None:
        try:
            files.write(record, slo, arguments.out, environment())
        except BenchError as error:
            raise BenchError(str(error), partial=told) from error
        output.note(f"wrote {arguments.out}")
    if record.interrupted:
        raise BenchInterrupted(told)
    return told


async def _drive(arguments: argparse.Namespace) -> RunRecord:
    from octavo_lab.datasets.load import load  # noqa: PLC0415
    from octavo_lab.load.generator import RunLimits, generate  # noqa: PLC0415
    from octavo_lab.serve import plan  # noqa: PLC0415 # see `run`

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        output.note("stopping; Ctrl-C again gives up at once")
        loop.remove_signal_handler(signal.SIGINT)
        stop.set()

    async with plan.target(arguments) as target:
        config = plan.dataset_config(arguments, target.record.details.get("max_model_len"))
        dataset = await load(config, plan.tokenizer(arguments, target))
        traffic = plan.traffic(arguments, dataset)
        target.check(traffic.requests)
        with suppress(NotImplementedError):  # Where there are no such handlers, Ctrl-C just ends.
            loop.add_signal_handler(signal.SIGINT, interrupt)
        with output.ProgressLine() as line:
            record = await generate(
                target,
                traffic,
                RunLimits(timeout_s=arguments.timeout, drain_s=arguments.drain),
                stop=stop,
                on_progress=lambda progress: line(_told(progress), progress.fraction),
            )
    return replace(record, name=arguments.name)


def _told(progress: RunProgress) -> str:
    # Elsewhere than on a terminal each change would be a line of its own.
    if not sys.stderr.isatty():
        return "sending"
    left = ""
    if 0.02 < progress.fraction < 1:
        left = f", {output.duration(progress.elapsed_s / progress.fraction - progress.elapsed_s)} left"
    return f"{progress.ended} ended, {progress.running} under way{left}"
