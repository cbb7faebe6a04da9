"""`octavo chaos`: attack a stack of real processes and see whether its clients notice more than a pause."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Final

from octavo.cli import output
from octavo.stack import StackError

from octavo_lab.chaos.run import Settings, attack
from octavo_lab.chaos.schedule import KINDS, schedule
from octavo_lab.chaos.stack import RUNNERS, Sizes
from octavo_lab.command import Flag, add_flags

EXIT_FOUND: Final = 1
FLAGS: Final[tuple[Flag, ...]] = (
    ("--seconds", float, 60.0, "S", "how long to attack"),
    ("--every", float, 2.5, "S", "from one action to the next, give or take a fifth"),
    ("--streams", int, 40, "N", "clients that ask one question after the other: SDK, plain gRPC, openai"),
    ("--workers", int, 2, "N", "workers"),
    ("--schedulers", int, 2, "N", "schedulers; clients know all of them, in order"),
    ("--gateways", int, 2, "N", "HTTP gateways"),
    ("--max-tokens", int, 96, "N", "tokens of the longest answer"),
    ("--seed", int, 1, "N", "the same seed does the same at the same time"),
    ("--kinds", str, ",".join(KINDS), "KIND,...", "what to do"),
    ("--poison", float, None, "S", "a request that kills workers, every so many seconds"),
    ("--json", Path, None, "FILE", "write what was found there"),
)


def configure(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the command's arguments."""
    del name
    add_flags(parser, FLAGS)
    add = parser.add_argument
    add("--runner", choices=RUNNERS, default="sim", help="what workers compute with (default: sim)")
    add(
        "--netns", action="store_true", help="workers in network namespaces of their own, cut there; for root"
    )
    add("--plan", action="store_true", help="only print what would be done, and when")
    repeated = "argument of each worker; repeatable"
    add("--worker-arg", action="append", default=[], metavar="ARG", help=repeated)


def run(arguments: argparse.Namespace) -> int:
    """Attack; return 0 when nothing was found."""
    kinds = arguments.kinds.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        output.fail(f"no such kind: {', '.join(unknown)}; there are {', '.join(KINDS)}")
        return 2
    if arguments.plan:
        for action in schedule(arguments.seed, kinds, arguments.seconds, arguments.every):
            print(f"{action.at_s:8.2f} s  {action.kind:<20} {action.seconds:g} s")
        return 0
    settings = Settings(
        sizes=Sizes(
            runner=arguments.runner,
            workers=arguments.workers,
            schedulers=arguments.schedulers,
            gateways=arguments.gateways,
            netns=arguments.netns,
            worker_args=arguments.worker_arg,
        ),
        seed=arguments.seed,
        kinds=kinds,
        seconds=arguments.seconds,
        every_s=arguments.every,
        streams=arguments.streams,
        max_tokens=arguments.max_tokens,
        poison_s=arguments.poison,
    )
    try:
        report = attack(settings)
    except StackError as error:
        output.fail(str(error))
        return 2
    print(report.as_text())
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report.as_record(), indent=2) + "\n")
    return EXIT_FOUND if report.findings else 0
