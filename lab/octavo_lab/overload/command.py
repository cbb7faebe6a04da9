"""`octavo bench overload`: a service driven past its capacity and back, as a timeline."""

from __future__ import annotations

import argparse
import asyncio
import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

from octavo.cli import output
from octavo.stack import Stack, StackConfig, StackError

from octavo_lab.command import BenchError, Flag, add_flags, claim_folder
from octavo_lab.load.arrivals import Phase, Phases
from octavo_lab.load.targets.octavo import OctavoTarget
from octavo_lab.overload import drive
from octavo_lab.overload.report import as_text, plot
from octavo_lab.overload.timeline import Timeline

FLAGS: Final[tuple[Flag, ...]] = (
    ("--endpoint", str, None, "HOST:PORT", "a scheduler to drive; by default a stack is started"),
    ("--model", str, "demo", "MODEL", "of the stack that is started; `sim` needs no model"),
    ("--max-num-seqs", int, 16, "N", "of the stack that is started"),
    ("--capacity", float, None, "X", "requests per second; by default it is measured"),
    ("--load", float, 2.0, "X", "overload, over the capacity"),
    ("--base", float, 0.5, "X", "load before and after"),
    ("--phases", str, "40,60,40", "S,S,S", "seconds before, of and after the overload"),
    ("--calibrate", float, 20.0, "S", "seconds at capacity"),
    ("--out", Path, None, "DIR", "write timeline.json and timeline.png there"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_flags(parser, FLAGS)
    add = parser.add_argument
    add("--priority", choices=("interactive", "standard", "batch"), default="interactive", help="class")
    repeated = "argument of the worker that is started; repeatable"
    add("--worker-arg", action="append", default=[], metavar="ARG", help=repeated)
    add("--json", action="store_true", help="print as JSON")


def run(arguments: argparse.Namespace) -> str:
    """Drive; return the table.

    Raises:
        BenchError: it cannot be done as asked, or the folder cannot be written.
    """
    phases = _phases(arguments.phases)
    if min(arguments.load, arguments.base, arguments.calibrate, arguments.max_num_seqs) <= 0:
        raise BenchError("loads, seconds and sequences must be positive")
    if arguments.out is not None:
        claim_folder(arguments.out)
    with ExitStack() as stack:
        endpoint = arguments.endpoint or _start(stack, arguments)
        timeline = asyncio.run(_drive(endpoint, arguments, phases))
    record = json.dumps(timeline.as_record(), indent=2, allow_nan=False)
    told = record if arguments.json else as_text(timeline)
    if arguments.out is not None:
        try:
            (arguments.out / "timeline.json").write_text(record)
            plot(timeline, arguments.out / "timeline.png")
        except OSError as error:
            raise BenchError(str(error), partial=told) from error
        output.note(f"wrote {arguments.out}/timeline.json and timeline.png")
    return told


def _phases(text: str) -> tuple[float, float, float]:
    try:
        before, during, after = map(float, text.split(","))
    except ValueError:
        raise BenchError(f"--phases is three numbers of seconds, got {text!r}") from None
    if min(before, during, after) <= 0:
        raise BenchError("phases must take some time")
    return before, during, after


def _start(stack: ExitStack, arguments: argparse.Namespace) -> str:
    """Start scheduler and worker; return where they are."""
    flags = ["--max-num-seqs", str(arguments.max_num_seqs), *arguments.worker_arg]
    if arguments.model == "sim":
        flags += ["--runner", "sim"]
    child = stack.enter_context(Stack(StackConfig(model=arguments.model, worker_args=flags)))
    try:
        with output.ProgressLine() as line:
            child.wait_ready(on_progress=line)
    except StackError as error:
        raise BenchError(str(error)) from error
    return child.endpoint


async def _drive(
    endpoint: str, arguments: argparse.Namespace, phases: tuple[float, float, float]
) -> Timeline:

    before, during, _ = phases
    async with OctavoTarget(endpoint) as target:
        seats = drive.seats_of(target.record.details)
        vocabulary = await drive.vocabulary_of(target)
        output.note("measuring the capacity")
        # No deadline here: whoever waits for a place is to get it.
        plain = drive.Mix(vocabulary=vocabulary)
        measured = await drive.calibrate(target, plain, 2 * seats, arguments.calibrate)
        if arguments.capacity is not None:
            measured = replace(measured, capacity_per_s=arguments.capacity)
        capacity = measured.capacity_per_s
        output.note(f"{capacity:.2f} requests per second; driving {arguments.load:g} times as many")
        loads = zip(phases, (arguments.base, arguments.load, arguments.base), strict=True)
        plan = Phases(tuple(Phase(seconds, load * capacity) for seconds, load in loads))
        terms = {"priority": arguments.priority, "ttft_deadline": drive.TTFT_SLO_S}
        async with drive.watch(target.client) as looks:
            record = await drive.through(target, replace(plain, options=terms), plan)
    return Timeline(record, looks, measured, before, before + during, min(5.0, before / 4))
