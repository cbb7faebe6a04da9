"""The flags of `octavo bench serve`. Nothing here needs the extra `bench`, so that the help does not."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

TARGETS: Final = ("octavo", "completions", "chat")
PROCESSES: Final = ("poisson", "gamma", "bursty", "even", "replay")
DEFAULT_REQUESTS: Final = 200


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    _configure_target(parser)
    _configure_traffic(parser)
    _configure_dataset(parser)
    _configure_results(parser)


def _configure_dataset(parser: argparse.ArgumentParser) -> None:
    dataset = parser.add_argument_group("dataset")
    dataset.add_argument(
        "--dataset",
        default="lognormal",
        metavar="NAME|FILE",
        help="azure-conv, azure-code, mooncake (public traces), lognormal, fixed, or a file: JSON lines with "
        "prompt or messages, or ShareGPT (default: lognormal)",
    )
    dataset.add_argument(
        "--prompt-tokens", type=float, default=256, metavar="N", help="mean of drawn lengths (default 256)"
    )
    dataset.add_argument(
        "--output-tokens",
        type=float,
        metavar="N",
        help="the same for output (default 64); for a file, where it does not say",
    )
    dataset.add_argument(
        "--cv", type=float, default=1.0, help="coefficient of variation of lognormal lengths (default 1)"
    )
    dataset.add_argument(
        "--context", type=int, metavar="N", help="tokens of prompt and output together (default: the model's)"
    )
    dataset.add_argument(
        "--scale", type=int, metavar="N", help="divide the lengths of a trace by this (default: what fits)"
    )
    dataset.add_argument(
        "--traces", type=Path, metavar="DIR", help="folder with other copies of the public traces"
    )
    dataset.add_argument(
        "--tokenizer", metavar="PATH", help="tokenizer.json, its folder, or `demo` (default: ask the service)"
    )
    dataset.add_argument(
        "--buckets", metavar="N,N", help="upper prompt lengths by which requests are told apart in the result"
    )


def _configure_results(parser: argparse.ArgumentParser) -> None:
    limits = parser.add_argument_group("limits and results")
    limits.add_argument(
        "--slo", metavar="ttft=MS,tpot=MS,e2e=MS", help="what a request must keep to count as good"
    )
    limits.add_argument("--timeout", type=float, metavar="S", help="give up on a request after this time")
    limits.add_argument(
        "--drain", type=float, default=60.0, metavar="S", help="wait for the last answers (default 60)"
    )
    limits.add_argument("--name", default="", help="of the system under test, for comparisons")
    limits.add_argument("--out", type=Path, metavar="FILE", help="write the record of the run there")
    limits.add_argument("--json", action="store_true", help="print the figures as JSON")


def _configure_target(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("target")
    group.add_argument(
        "--target",
        choices=TARGETS,
        default="octavo",
        help="octavo over gRPC, or completions or chat of any server with the OpenAI API (default: octavo)",
    )
    group.add_argument(
        "--endpoint", metavar="ADDRESS", help="host:port of a scheduler, or URL of a server (default: local)"
    )
    group.add_argument("--model", default="", help="where several are served")
    group.add_argument(
        "--api-key-env", metavar="NAME", help="variable of the environment that holds the API key"
    )
    group.add_argument(
        "--connections", type=int, default=1, metavar="N", help="streams to a scheduler (default 1)"
    )
    group.add_argument(
        "--stop-at-eos", action="store_true", help="let answers end by themselves (default: full length)"
    )
    group.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="option of every request, value as JSON or text: priority=batch, temperature=0.7, deadline=5",
    )


def _configure_traffic(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("traffic")
    pace = group.add_mutually_exclusive_group()
    pace.add_argument("--rate", type=float, metavar="R", help="requests per second (open loop)")
    pace.add_argument("--concurrency", type=int, metavar="N", help="requests under way (closed loop)")
    group.add_argument(
        "--arrivals",
        choices=PROCESSES,
        default="poisson",
        help="replay: times of the dataset (default: poisson)",
    )
    group.add_argument(
        "--arrivals-cv", type=float, default=2.0, metavar="X", help="variation of gamma's gaps (default 2)"
    )
    group.add_argument(
        "--burst",
        default="10,2,8",
        metavar="RATIO,S,S",
        help="bursty: how much faster, how long, and the calm",
    )
    length = group.add_mutually_exclusive_group()
    length.add_argument("--requests", type=int, metavar="N", help=f"(default {DEFAULT_REQUESTS})")
    length.add_argument("--duration", type=float, metavar="S", help="length of the window")
    group.add_argument(
        "--warm-up", type=float, default=0.0, metavar="S", help="not measured at the beginning (default 0)"
    )
    group.add_argument("--seed", type=int, default=1, help="of traffic and prompts (default 1)")
