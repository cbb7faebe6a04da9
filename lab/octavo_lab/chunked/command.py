"""`octavo bench chunked`: what chunked prefill spares running requests while long prompts arrive."""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import asdict
from typing import Any, Final

from octavo.cli import output
from octavo.stack import StackError

from octavo_lab.chunked.experiment import ChunkedConfig, ChunkedResult, measure
from octavo_lab.command import BenchError, Flag, add_flags
from octavo_lab.report import bounded, milliseconds, table

FLAGS: Final[tuple[Flag, ...]] = (
    ("--model", str, "demo", "MODEL", "as for `octavo up`"),
    ("--long-tokens", int, 2048, "N", "tokens of each long prompt"),
    ("--requests", int, 510, "N", "short requests of each arm, in all its turns; a P99 wants 500"),
    ("--repeats", int, 3, "N", "turns of each arm"),
    ("--concurrency", int, 16, "N", "short requests that run at any time"),
    ("--prompt-tokens", int, 8, "N", "of a short request"),
    ("--output-tokens", int, 4, "N", "of a short request"),
    ("--every", int, 170, "N", "short requests that end from one long prompt to the next"),
    ("--max-num-batched-tokens", int, 512, "N", "tokens in a step: the size of the chunks"),
    ("--seed", int, 1, "N", "of the prompts"),
)
"""Each is a field of `ChunkedConfig`."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_flags(parser, FLAGS)
    for service in ("worker", "scheduler"):
        told = f"further argument of both {service}s"
        parser.add_argument(f"--{service}-arg", action="append", default=[], metavar="ARG", help=told)
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(arguments: argparse.Namespace) -> str:
    """Measure; return the table.

    Raises:
        BenchError: it cannot be done as asked, or a stack does not start.
    """
    fields = [flag.removeprefix("--").replace("-", "_") for flag, *_ in FLAGS]
    config = ChunkedConfig(
        **{field: getattr(arguments, field) for field in fields},
        worker_args=tuple(arguments.worker_arg),
        scheduler_args=tuple(arguments.scheduler_arg),
    )
    try:
        with output.ProgressLine() as progress:
            found = asyncio.run(measure(config, progress))
    except StackError as error:
        raise BenchError(str(error)) from error
    return json.dumps(as_json(found), indent=2) if arguments.json else as_text(found)


def as_json(found: ChunkedResult) -> dict[str, Any]:
    """Return both arms in figures."""
    ratio = found.ratio
    return {
        "config": asdict(found.config),
        "arms": {
            name: {
                "short_requests": len(arm.gaps_s),
                "long_prompts": len(arm.long_ttft_s),
                "failed": arm.failed,
                "itl_s": asdict(arm.itl_s),
                "long_ttft_s": asdict(arm.ttft_s),
            }
            for name, arm in found.arms.items()
        },
        "itl_p99_ratio": None if ratio is None else asdict(ratio),
    }


def as_text(found: ChunkedResult) -> str:
    """Return both arms as a table."""
    config, rows = found.config, []
    for name, arm in found.arms.items():
        itl = arm.itl_s
        figures = map(milliseconds, (itl.p50, itl.p90, itl.p99, itl.max, arm.ttft_s.p50))
        rows.append([name, len(arm.gaps_s), len(arm.long_ttft_s), arm.failed, *figures])
    ratio = "Too few requests for a P99: it wants 500 of each arm."
    if found.ratio is not None:
        told = bounded(found.ratio.value, found.ratio.low, found.ratio.high, ".3f")
        ratio = f"P99 with chunks over P99 without: {told}, in brackets the 95% interval"
    header = ("prefill", "short", "long", "failed", "ITL P50", "P90", "P99", "max", "long TTFT P50")
    return (
        f"{config.concurrency} short requests ({config.prompt_tokens} in, {config.output_tokens} out) run at "
        f"any time. A prompt of {config.long_tokens} tokens comes each time that {config.every} of them have "
        f"ended. Steps of {config.max_num_batched_tokens} tokens, {config.repeats} turns each.\n"
        f"Inter-token latency (ITL) of the short requests, in ms:\n\n{table(header, rows)}\n\n{ratio}"
    )
