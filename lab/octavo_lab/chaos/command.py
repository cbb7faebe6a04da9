"""`octavo chaos`: attack a stack of real processes and see whether its clients notice more than a pause."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from octavo.cli import output
from octavo.stack import StackError

from octavo_lab.chaos.churn import churn
from octavo_lab.chaos.run import ChaosSettings, attack
from octavo_lab.chaos.schedule import KINDS, schedule
from octavo_lab.chaos.stack import RUNNERS, Sizes
from octavo_lab.command import BenchError, Flag, add_flags, claim_file, claim_folder

EXIT_FOUND: Final = 1
FLAGS: Final[tuple[Flag, ...]] = (
    ("--seconds", float, 60.0, "S", "how long to attack"),
    ("--every", float, 2.5, "S", "from one action to the next, give or take a fifth"),
    ("--streams", int, 40, "N", "clients that ask one question after the other: SDK, plain gRPC, openai"),
    ("--workers", int, 2, "N", "workers"),
    ("--schedulers", int, 2, "N", "schedulers; clients know all of them, in order"),
    ("--gateways", int, 2, "N", "HTTP gateways"),
    ("--max-tokens", int, 96, "N", "tokens of the longest answer"),
    ("--watchdog", float, 3.0, "S", "a worker that owes a report for longer is lost; slow steps want more"),
    (
        "--model",
        str,
        None,
        "MODEL",
        "of torch and vllm workers; by default the demo model",
    ),
    ("--seed", int, 1, "N", "the same seed does the same at the same time"),
    ("--kinds", str, ",".join(KINDS), "KIND,...", "what to do"),
    ("--poison", float, None, "S", "a request that kills workers, every so many seconds"),
    ("--requests", int, 1_000_000, "N", "with --churn: how many, unless the time is over before"),
    ("--out", Path, None, "DIR", "with --churn: write churn.png there"),
    ("--json", Path, None, "FILE", "write what was found there"),
)
SWITCHES: Final = (
    ("--netns", "workers in network namespaces of their own, cut there; for root"),
    ("--churn", "no attack: short requests, and whether any process grows"),
    ("--rolling", "no attack: drain and start anew everything, one after the other"),
    ("--plan", "only print what would be done, and when"),
)


def configure(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the command's arguments."""
    del name
    add_flags(parser, FLAGS)
    add = parser.add_argument
    add("--runner", choices=RUNNERS, default="sim", help="what workers compute with (default: sim)")
    for flag, told in SWITCHES:
        add(flag, action="store_true", help=told)
    repeated = "argument of each worker; repeatable"
    add("--worker-arg", action="append", default=[], metavar="ARG", help=repeated)


def run(arguments: argparse.Namespace) -> int:
    """Attack; return 0 when nothing was found."""
    kinds = arguments.kinds.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        output.fail(f"no such kind: {', '.join(unknown)}; there are {', '.join(KINDS)}")
        return 2
    if arguments.plan:
        for action in schedule(arguments.seed, kinds, arguments.seconds, arguments.every, arguments.watchdog):
            print(f"{action.at_s:8.2f} s  {action.kind:<20} {action.seconds:g} s")
        return 0
    try:
        return _churn(arguments) if arguments.churn else _attack(arguments, kinds)
    except (BenchError, StackError) as error:
        output.fail(str(error))
        return 2


def _sizes(arguments: argparse.Namespace) -> Sizes:
    return Sizes(
        runner=arguments.runner,
        model=arguments.model,
        workers=arguments.workers,
        schedulers=arguments.schedulers,
        gateways=arguments.gateways,
        netns=arguments.netns,
        watchdog_s=arguments.watchdog,
        worker_args=arguments.worker_arg,
    )


def _churn(arguments: argparse.Namespace) -> int:
    if arguments.out is not None:
        claim_folder(arguments.out)
    curve = churn(_sizes(arguments), arguments.seconds, arguments.requests, arguments.streams)
    print(curve.as_text())
    if arguments.out is not None:
        curve.write(arguments.out)
    return 0 if curve.flat else EXIT_FOUND


def _attack(arguments: argparse.Namespace, kinds: Sequence[str]) -> int:
    if arguments.json is not None:
        claim_file(arguments.json)
    found = attack(
        ChaosSettings(
            sizes=_sizes(arguments),
            seed=arguments.seed,
            kinds=kinds,
            seconds=arguments.seconds,
            every_s=arguments.every,
            streams=arguments.streams,
            max_tokens=arguments.max_tokens,
            rolling=arguments.rolling,
            poison_s=arguments.poison,
        )
    )
    print(found.as_text())
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found.as_record(), indent=2) + "\n")
    return EXIT_FOUND if found.findings else 0
