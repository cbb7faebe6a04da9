"""`octavo bench serve`: drives a service with planned traffic, and tells what its clients see."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from octavo.cli import output

from octavo_lab.command import BenchError, BenchInterrupted, Flag, add_flags, claim_file
from octavo_lab.serve import DEFAULT_REQUESTS

# Nothing here needs the extra `bench` before a run, so that the help does not.
if TYPE_CHECKING:
    from octavo_lab.load.generator import RunProgress
    from octavo_lab.load.records import RunRecord

TARGET_FLAGS: Final[tuple[Flag, ...]] = (
    ("--endpoint", str, None, "ADDRESS", "host:port of a scheduler, or URL of a server (default: local)"),
    ("--model", str, "", "MODEL", "where several are served"),
    ("--api-key-env", str, None, "NAME", "variable of the environment that holds the API key"),
    ("--connections", int, 1, "N", "streams to a scheduler"),
)
TRAFFIC_FLAGS: Final[tuple[Flag, ...]] = (
    ("--arrivals-cv", float, 2.0, "X", "variation of gamma's gaps"),
    ("--burst", str, "10,2,8", "RATIO,S,S", "bursty: how much faster, how long, and the calm"),
    ("--warm-up", float, 0.0, "S", "not measured at the beginning"),
    ("--seed", int, 1, "SEED", "of traffic and prompts"),
)
_DATASETS: Final = (
    "azure-conv, azure-code, mooncake (public traces), lognormal, fixed, or a file: JSON lines with "
    "prompt or messages, or ShareGPT"
)
DATASET_FLAGS: Final[tuple[Flag, ...]] = (
    ("--dataset", str, "lognormal", "NAME|FILE", _DATASETS),
    ("--prompt-tokens", float, 256, "N", "mean of drawn lengths"),
    ("--output-tokens", float, None, "N", "the same (default: 64); for a file, where it does not say"),
    ("--cv", float, 1.0, "CV", "coefficient of variation of lognormal lengths"),
    ("--context", int, None, "N", "tokens of prompt and output together (default: the model's)"),
    ("--scale", int, None, "N", "divide the lengths of a trace by this (default: what fits)"),
    ("--traces", Path, None, "DIR", "folder with other copies of the public traces"),
    ("--tokenizer", str, None, "PATH", "tokenizer.json, its folder, or `demo` (default: ask the service)"),
    ("--buckets", str, None, "N,N", "upper prompt lengths by which requests are told apart in the result"),
)
RESULT_FLAGS: Final[tuple[Flag, ...]] = (
    ("--slo", str, None, "ttft=MS,tpot=MS,e2e=MS", "what a request must keep to count as good"),
    ("--timeout", float, None, "S", "give up on a request after this time"),
    ("--drain", float, 60.0, "S", "wait for the last answers"),
    ("--name", str, "", "NAME", "of the system under test, for comparisons"),
    ("--out", Path, None, "FILE", "write the record of the run there"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    group = parser.add_argument_group("target")
    told = "octavo over gRPC, or completions or chat of any server with the OpenAI API (default: %(default)s)"
    group.add_argument("--target", choices=("octavo", "completions", "chat"), default="octavo", help=told)
    add_flags(group, TARGET_FLAGS)
    told = "let answers end by themselves (default: full length)"
    group.add_argument("--stop-at-eos", action="store_true", help=told)
    told = "option of every request, value as JSON or text: priority=batch, temperature=0.7, deadline=5"
    group.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help=told)

    group = parser.add_argument_group("traffic")
    pace = group.add_mutually_exclusive_group()
    pace.add_argument("--rate", type=float, metavar="R", help="requests per second (open loop)")
    pace.add_argument("--concurrency", type=int, metavar="N", help="requests under way (closed loop)")
    processes, told = ("poisson", "gamma", "bursty", "even", "replay"), "replay: times of the dataset"
    group.add_argument(
        "--arrivals", choices=processes, default="poisson", help=f"{told} (default: %(default)s)"
    )
    length = group.add_mutually_exclusive_group()
    length.add_argument("--requests", type=int, metavar="N", help=f"(default: {DEFAULT_REQUESTS})")
    length.add_argument("--duration", type=float, metavar="S", help="length of the window")
    add_flags(group, TRAFFIC_FLAGS)

    add_flags(parser.add_argument_group("dataset"), DATASET_FLAGS)
    group = parser.add_argument_group("limits and results")
    add_flags(group, RESULT_FLAGS)
    group.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(arguments: argparse.Namespace) -> str:
    """Drive; return the tables.

    Raises:
        BenchError: it cannot be done as asked.
        BenchInterrupted: Ctrl-C; with the tables of what there is.
    """
    from octavo_lab.load import files, tables  # noqa: PLC0415
    from octavo_lab.load.summary import summarize  # noqa: PLC0415
    from octavo_lab.machine import environment  # noqa: PLC0415
    from octavo_lab.serve.plan import parse_slo  # noqa: PLC0415

    slo, out = parse_slo(arguments.slo), arguments.out
    if out is not None:
        claim_file(out)
    record = asyncio.run(_drive(arguments))
    figures = asdict(summarize(record, slo))
    told = json.dumps(figures, indent=2) if arguments.json else tables.as_text(record, slo)
    if out is not None:
        try:
            files.write(record, slo, out, environment())
        except BenchError as error:
            raise BenchError(str(error), partial=told) from error
        output.note(f"wrote {out}")
    if record.interrupted:
        raise BenchInterrupted(told)
    return told


async def _drive(arguments: argparse.Namespace) -> RunRecord:
    from octavo_lab.load.generator import RunLimits, generate  # noqa: PLC0415
    from octavo_lab.serve import plan  # noqa: PLC0415

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        output.note("stopping; Ctrl-C again gives up at once")
        loop.remove_signal_handler(signal.SIGINT)
        stop.set()

    async with plan.target(arguments) as target:
        traffic = await plan.traffic_for(arguments, target)
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
